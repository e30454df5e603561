"""transformers' Trainer keeps its state in memory, and goes on from it after a restart, its loop as it is.

Attached to ``train()``: until that is called nothing is imported. The loop's own way to begin in the middle of an epoch
is used, without a checkpoint.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from typing import Any

EVERY = 10  # steps
_HOW_OFF = "--attach off turns that off"
_FROM_MEMORY = "the memory of this host"  # in the place of a checkpoint's folder
_DRAWN_AGAIN = (
    "what the dataset or the collator draws while samples are read is not what it would have drawn without the "
    "restart, as behind a checkpoint of the Trainer's"
)
_RUNS = "unicron_elastic.training.run"  # imported by a script that keeps its state itself
_WHOLE = ("NO", "MULTI_CPU", "MULTI_GPU")  # what accelerate calls one process, and DistributedDataParallel


def attach(module: Any) -> None:
    """Have the Trainer of this module keep its state. Raises AttributeError if there is none."""
    plain = module.Trainer.train
    trainers: list[AttachedTrainer] = []  # of this process

    @functools.wraps(plain)
    def train(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        _begin(trainer, trainers, has_trial=_has_trial(args, kwargs))
        return plain(trainer, *args, **kwargs)

    module.Trainer.train = train


def _has_trial(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return kwargs.get("trial") is not None or (len(args) > 1 and args[1] is not None)


def _begin(trainer: Any, trainers: list[AttachedTrainer], *, has_trial: bool) -> None:
    """Attach to a Trainer that is about to train, or say why not; a script that has ours itself is left alone."""
    if hasattr(type(trainer), "_of_unicron") or (not trainers and _RUNS in sys.modules):
        return
    try:
        why = "another one has trained in this process" if trainers else why_not(trainer, has_trial=has_trial)
        if not why:
            trainers.append(AttachedTrainer(trainer))
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    if trainer.args.process_index == 0:
        _say(
            f"this Trainer keeps no state in memory: {why}; all ranks begin again after a loss"
            if why
            else f"transformers' Trainer keeps its state in memory every {EVERY} steps, and all ranks go on from there "
            f"after a loss; {_HOW_OFF}"
        )


def why_not(trainer: Any, *, has_trial: bool) -> str:
    """Say why the state of this Trainer is not kept; "" if it is."""
    from unicron_elastic.training.loader.loader_facts import has_index
    from unicron_elastic.transformers.parts import missing_parts, versions

    if missing := missing_parts(type(trainer)):
        return f"{versions()} are not as they are known ({missing})"
    kind = trainer.accelerator.distributed_type.value
    if kind not in _WHOLE:
        return f"{kind} is not tried"
    if has_trial:
        return "a search of hyperparameters trains several times"
    if not has_index(trainer.train_dataset):
        return "its dataset can only be iterated"
    args = trainer.args
    odd = [name for name in ("auto_find_batch_size", "ignore_data_skip", "eval_on_start") if getattr(args, name, False)]
    if odd:
        return f"{odd[0]} is not tried"
    if args.dataloader_num_workers and args.dataloader_persistent_workers:
        return "persistent workers of evaluations begin anew behind a restart, which draws a number more"
    return ""


class AttachedTrainer:
    """`AttachedTrainer` has a Trainer go on from memory, and keep its state there."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._run: Any = None
        self._numbers: dict[str, Any] = {}  # where random numbers were in the state that was taken over
        self._began: dict[str, Any] = {}  # and where its epoch had begun
        self._is_within = False  # the state that was taken over is of the middle of what is to be trained
        self._is_off = False  # an epoch was ended before its last step: where the next state is in it is not known
        self._noted = 0
        self._steps_per_epoch = 1
        for name in ("_run_epoch", "_load_rng_state", "_maybe_log_save_evaluate"):
            setattr(trainer, name, functools.partial(getattr(self, name.removeprefix("_")), getattr(trainer, name)))

    def run_epoch(self, plain: Callable[..., None], **kwargs: Any) -> None:
        """Train the steps of an epoch that are left."""
        self._steps_per_epoch = kwargs["num_update_steps_per_epoch"]
        if self._run is None:
            self._restore()
        if self._is_within:
            state = self._trainer.state
            epoch, made = divmod(state.global_step, self._steps_per_epoch)
            if kwargs["epoch"] < epoch or self._trainer.control.should_training_stop:
                return
            self._is_within = False
            kwargs["epochs_trained"] = epoch
            kwargs["steps_trained_in_current_epoch"] = made * self._trainer.args.gradient_accumulation_steps
            kwargs["resume_from_checkpoint"] = _FROM_MEMORY
            self._generators().set(self._began)  # which some samplers draw the order from
        plain(**kwargs)

    def load_rng_state(self, plain: Callable[..., None], checkpoint: Any) -> None:
        """Put random numbers back, behind what the loop has drawn to come to its place."""
        if checkpoint == _FROM_MEMORY:
            self._generators().set(self._numbers)
        else:
            plain(checkpoint)

    def maybe_log_save_evaluate(self, plain: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Log, evaluate and save; keep the state behind that, at an epoch's end behind what is done there."""
        plain(*args, **kwargs)
        step = self._trainer.state.global_step
        is_edge = step % self._steps_per_epoch == 0
        if is_edge and step != self._noted:
            self._noted = step
            return
        if not is_edge and step == self._noted and not self._trainer.control.should_training_stop:
            self._is_off = True
        self._noted = step
        self._keep(step)

    def _keep(self, step: int) -> None:
        if self._is_off:
            return
        try:
            self._run.snapshot(step, every=EVERY)
        except TypeError as error:
            self._is_off = True
            _say(f"this Trainer's state is kept in memory no more: {error}")

    def _restore(self) -> None:
        """Go on from memory, if there is more than the Trainer has."""
        from unicron_elastic.training.run import Run
        from unicron_elastic.transformers.parts import own_optimizer

        trainer = self._trainer
        run = self._run = Run(
            model=trainer.model_wrapped,
            optimizer=own_optimizer(trainer.optimizer),
            scheduler=trainer.lr_scheduler,
            scaler=trainer.accelerator.scaler,
            trainer=Counted(trainer),
        )
        before = trainer.state.global_step  # of a checkpoint
        if before:
            run.begin_at(before)
        self._began = run.restore_placed()
        self._is_within = trainer.state.global_step > before
        if self._is_within and trainer.args.process_index == 0:
            _say(_DRAWN_AGAIN)
        self._noted = trainer.state.global_step
        self._numbers = self._generators().states()

    def _generators(self) -> Any:
        from unicron_elastic.training.step.randomness import Generators

        return Generators(self._trainer.args.device)


class Counted:
    """`Counted` is what a Trainer has counted and logged, and what its callbacks have."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Return it, as bytes: a log is longer than what may be kept as lists."""
        from unicron_elastic.transformers.parts import state_values

        values = {**state_values(self._trainer), "log": self._trainer.state.log_history}
        return {"text": json.dumps(values, default=float).encode()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take it over."""
        from unicron_elastic.transformers.parts import set_state_values

        values = json.loads(state_dict["text"])
        set_state_values(self._trainer, values)
        self._trainer.state.log_history[:] = values["log"]


def _say(sentence: str) -> None:
    sys.stderr.write(f"unicron: {sentence}.\n")
