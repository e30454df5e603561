"""All that is known of the private and changing parts of transformers; of accelerate's see ``alone``.

Written against transformers 5.24 and accelerate 1.15. ``missing_parts`` looks whether they are there; where one is not,
nothing is patched.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import accelerate
import torch
import transformers
from torch import nn
from transformers import TrainingArguments
from transformers.trainer_callback import ExportableState

from unicron_elastic.accelerate import alone
from unicron_elastic.accelerate.alone import show_rank
from unicron_elastic.training.loader.loader_facts import has_index
from unicron_elastic.training.of_launcher import of_launcher
from unicron_elastic.training.step.wrong_use import WrongUseError
from unicron_elastic.transformers.callback_state import callback_state, take_callback_state
from unicron_elastic.transformers.refusal import (
    ArgumentFacts,
    TrainerFacts,
    refusal_of_arguments,
    refused,
)

# What is overridden, with the arguments by which the Trainer's loop calls it.
_METHODS = {
    "train": {"resume_from_checkpoint", "trial"},
    "get_train_dataloader": set(),
    "get_total_train_batch_size": {"args"},
    "get_batch_samples": {"epoch_iterator", "num_batches", "device"},
    "training_step": {"model", "inputs", "num_items_in_batch"},
    "store_flos": set(),
    "_get_num_items_in_batch": {"batch_samples", "device"},
    "_load_rng_state": {"checkpoint"},
    "_maybe_log_save_evaluate": set(),
    "_prepare_for_training": {"train_dataloader"},
    "_run_epoch": {
        "epoch",
        "num_update_steps_per_epoch",
        "resume_from_checkpoint",
        "epochs_trained",
        "steps_trained_in_current_epoch",
    },
    "_save_rng_state": {"output_dir"},
    "_track_num_input_tokens": {"inputs"},
    "_finalize_training": {"trial"},
}
_OF_LOOP = ("_inner_training_loop", "_run_epoch", "get_batch_samples", "_prepare_inputs", "_finalize_training")
_OF_EVALUATION = ("evaluate", "evaluation_loop", "prediction_step", "log")  # which may make or tell more than a loss
_DEVICES = "_setup_devices"
_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)
_OF_PROCESS = ("is_local_process_zero", "is_world_process_zero")  # of a Trainer's state


def missing_parts(trainer_class: Any) -> str:
    """Name what this version of transformers or accelerate has not, or has otherwise; "" if all is there."""
    for name, arguments in _METHODS.items():
        found = getattr(trainer_class, name, None)
        if found is None:
            return f"Trainer.{name}"
        taken = inspect.signature(found).parameters
        if lacking := next((each for each in sorted(arguments) if each not in taken), ""):
            return f"the argument {lacking} of Trainer.{name}"
    if not isinstance(vars(TrainingArguments).get(_DEVICES), functools.cached_property):
        return f"TrainingArguments.{_DEVICES}"
    return alone.missing_parts()


def versions() -> str:
    """Return what is installed."""
    return f"transformers {transformers.__version__} and accelerate {accelerate.__version__}"


def patch_arguments() -> None:
    """Have TrainingArguments take this process for the only one, whatever the launcher says, and know its device."""
    plain: functools.cached_property[Any] = vars(TrainingArguments)[_DEVICES]
    if getattr(plain, "is_of_unicron", False):
        return

    def set_up(arguments: Any) -> torch.device:
        if why := refusal_of_arguments(_argument_facts(arguments)):
            raise WrongUseError(refused("Trainer", why))
        with alone.alone():
            device = alone.own_device(plain.func(arguments))
        if device.type == "cuda":
            arguments._n_gpu = 1  # else all GPUs of the host would be this process's, by DataParallel
        show_rank(of_launcher("RANK", 0))
        return device

    patched = functools.cached_property(set_up)
    patched.is_of_unicron = True  # type: ignore[attr-defined]
    patched.__set_name__(TrainingArguments, _DEVICES)
    setattr(TrainingArguments, _DEVICES, patched)


def _argument_facts(arguments: Any) -> ArgumentFacts:
    return ArgumentFacts(
        has_deepspeed=bool(arguments.deepspeed) or of_launcher_is_true("ACCELERATE_USE_DEEPSPEED"),
        has_fsdp=bool(arguments.fsdp) or of_launcher_is_true("ACCELERATE_USE_FSDP"),
        has_parallelism=getattr(arguments, "parallelism_config", None) is not None,
    )


def of_launcher_is_true(name: str) -> bool:
    """Return whether ``accelerate launch`` has set this variable."""
    from accelerate.utils import parse_flag_from_env

    return bool(parse_flag_from_env(name, False))


def trainer_facts(trainer: Any, *, ranks: int, has_trained: bool, is_search: bool) -> TrainerFacts:
    """Read what decides whether this Trainer can go on in place."""
    arguments, model = trainer.args, trainer.model
    config = arguments.accelerator_config
    return TrainerFacts(
        kind=type(trainer).__name__,
        bases=tuple(each.__name__ for each in type(trainer).__mro__),
        overrides=overridden(type(trainer), _OF_LOOP),
        ranks=ranks,
        has_trained=has_trained,
        is_search=is_search,
        has_index=has_index(trainer.train_dataset),
        wrapped_in=_wrapper(model),
        is_divided=_is_divided(trainer),
        mixed_precision=str(trainer.accelerator.mixed_precision),
        is_compiled=bool(arguments.torch_compile),
        optimizer=_name_of(arguments.optim),
        sampling=_name_of(getattr(arguments, "train_sampling_strategy", "random")),  # which is newer than the rest
        splits_batches=bool(getattr(config, "split_batches", False)),
        dispatches_batches=bool(getattr(config, "dispatch_batches", False)),
        finds_batch_size=bool(arguments.auto_find_batch_size),
        skips_no_data=bool(arguments.ignore_data_skip),
        averages_tokens=bool(arguments.average_tokens_across_devices),
    )


def _name_of(choice: Any) -> str:
    """Return what a user writes for this choice."""
    return str(getattr(choice, "value", choice))


def why_evaluates_alone(trainer: Any) -> str:
    """Return why each rank has to evaluate all batches; "": their mean loss is all that is asked for."""
    if trainer.compute_metrics is not None:
        return "compute_metrics sees all predictions"
    if names := overridden(type(trainer), _OF_EVALUATION):
        return f"{type(trainer).__name__} has {names[0]}() of its own"
    return "inputs are kept for metrics" if trainer.args.include_for_metrics else ""


def overridden(kind: type[Any], names: Sequence[str]) -> tuple[str, ...]:
    """Return which of these methods of the Trainer's are overridden by others than us."""
    ours = __name__.rpartition(".")[0]
    classes = [each for each in kind.__mro__ if not each.__module__.startswith(ours)]
    below = classes[: classes.index(transformers.Trainer)]
    return tuple(name for name in names if any(name in vars(each) for each in below))


def _wrapper(model: Any) -> str:
    """Name what a model is wrapped in, "" if in nothing."""
    is_sharded = any(hasattr(each, "set_requires_gradient_sync") for each in model.modules())
    return type(model).__name__ if isinstance(model, _WRAPPERS) else "fully_shard" if is_sharded else ""


def _is_divided(trainer: Any) -> bool:
    names = ("is_model_parallel", "is_distributed_loading_by_transformers")
    return any(getattr(trainer, name, False) for name in names) or trainer.get_tp_size() > 1


@contextmanager
def backward_by(accelerator: Any, backward: Callable[..., None]) -> Iterator[None]:
    """Have ``accelerator.backward`` be this function, whoever calls it."""
    accelerator.backward = backward
    try:
        yield
    finally:
        del accelerator.backward


@contextmanager
def metrics_kept(trainer: Any) -> Iterator[None]:
    """Leave what Trainers of TRL's note of each loss as it is."""
    before = copy.deepcopy(getattr(trainer, "_metrics", None))
    try:
        yield
    finally:
        if before is not None:
            trainer._metrics = before


def own_optimizer(optimizer: Any) -> Any:
    """Return torch's optimizer, which accelerate has wrapped."""
    return getattr(optimizer, "optimizer", optimizer)


def state_values(trainer: Any) -> dict[str, Any]:
    """Return what a Trainer's loop has counted, and what its callbacks have, but for its log."""
    state = {name: value for name, value in dataclasses.asdict(trainer.state).items() if name not in _OF_PROCESS}
    del state["log_history"]
    return {
        "state": state,
        "control": dataclasses.asdict(trainer.control),
        "callbacks": [(type(each).__name__, *callback_state(each)) for each in _stateful(trainer)],
        "loss": float(trainer._tr_loss),
        "counted": {name: getattr(trainer, name) for name in _COUNTED if hasattr(trainer, name)},
    }


_COUNTED = ("_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "_initial_num_input_tokens_seen")


def set_state_values(trainer: Any, values: dict[str, Any]) -> None:
    """Take over what another rank's ``state_values`` returned, in place: callbacks know state and control."""
    for of, name in ((trainer.state, "state"), (trainer.control, "control")):
        for field, value in values[name].items():
            setattr(of, field, value)
    for callback, (name, *state) in zip(_stateful(trainer), values["callbacks"], strict=True):
        if type(callback).__name__ != name:
            raise ValueError(f"the others have the callback {name} where this rank has {type(callback).__name__}")
        take_callback_state(callback, *state)
    trainer._tr_loss.fill_(values["loss"])
    for name, value in values["counted"].items():
        setattr(trainer, name, value)


def _stateful(trainer: Any) -> list[Any]:
    return [each for each in trainer.callback_handler.callbacks if isinstance(each, ExportableState)]


def take_rank(trainer: Any, rank: int) -> None:
    """Have a Trainer that trains take this for its rank; who becomes the first has its callbacks begin anew.

    Progress bars and reports are begun by the first rank alone, when the training begins.
    """
    was_first = trainer.state.is_world_process_zero
    show_rank(rank)
    trainer.state.is_local_process_zero = trainer.is_local_process_zero()
    trainer.state.is_world_process_zero = trainer.is_world_process_zero()
    if rank == 0 and not was_first:
        kept = dataclasses.asdict(trainer.control)
        handler = trainer.callback_handler
        trainer.control = handler.on_train_begin(trainer.args, trainer.state, trainer.control)
        for name, value in kept.items():
            setattr(trainer.control, name, value)
