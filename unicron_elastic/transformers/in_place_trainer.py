"""What stands in front of a Trainer's class: its loop stays, and each optimizer step is one of a run."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from contextlib import nullcontext
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard

import unicron_elastic
from unicron_elastic.accelerate.alone import hide_rank
from unicron_elastic.training.loader.epoch_plan import EpochPlan
from unicron_elastic.training.loader.loader_facts import loader_facts, refusal_of_loader
from unicron_elastic.training.of_launcher import of_launcher
from unicron_elastic.training.step.randomness import Generators
from unicron_elastic.training.step.wrong_use import WrongUseError
from unicron_elastic.transformers.parts import trainer_facts
from unicron_elastic.transformers.refusal import refusal_of_trainer, refused
from unicron_elastic.transformers.shared_evaluation import SharedEvaluation, WholeLosses
from unicron_elastic.transformers.trainer_run import TrainerRun
from unicron_elastic.transformers.turns import Turn, Turns, turns_of_step

_NO_CHECKPOINT = ""  # for the Trainer's own way to begin in the middle of an epoch, without one
_ENDED_EARLY = "a callback has ended an epoch before its last step, and data are read by the number of the step"


class InPlaceTrainer:
    """`InPlaceTrainer` has the Trainer that stands behind it take its optimizer steps from a run."""

    args: Any
    control: Any
    ranks_asked: int | None
    run_options: dict[str, Any]
    eval_dataset: Any
    _of_unicron: TrainerRun | None = None
    _shared: SharedEvaluation | None = None
    _to_share: AbstractSet[str | None] = frozenset()  # the prefixes of metrics that the loop itself asks for

    def _theirs(self) -> Any:
        """Return this Trainer as it is without us."""
        return super()

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, **kwargs: Any) -> Any:
        """Train. Raises WrongUseError, in one sentence, for what cannot go on in place."""
        has_trained = self._of_unicron is not None
        facts = trainer_facts(self, ranks=self._ranks(), has_trained=has_trained, is_search=trial is not None)
        self._refuse(refusal_of_trainer(facts))
        return self._theirs().train(resume_from_checkpoint=resume_from_checkpoint, trial=trial, **kwargs)

    def _ranks(self) -> int:
        """Return of how many ranks a step has the batches, however many there are now."""
        return self.ranks_asked or of_launcher("WORLD_SIZE", 1)

    def _refuse(self, why: str) -> None:
        if why:
            raise WrongUseError(refused(type(self).__name__, why))

    def get_train_dataloader(self) -> Any:
        """Return what stands for the batches; those are read by number."""
        loader = self._theirs().get_train_dataloader()
        facts = loader_facts(loader, (DataLoaderShard.__iter__,))
        self._refuse(refusal_of_loader(facts, "what get_train_dataloader() returned"))
        plan = EpochPlan(facts.batches, self.args.gradient_accumulation_steps, self._ranks())
        turns = Turns(loader, plan)
        self._of_unicron = TrainerRun(self, self._theirs(), turns, self.run_options)
        hide_rank()
        return turns

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return how many samples a step has, of all ranks."""
        return int(self._theirs().get_total_train_batch_size(args)) * self._ranks()

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare model, optimizer and scheduler, of which nothing may be wrapped."""
        model, loader = self._theirs()._prepare_for_training(*args, **kwargs)
        if model is not getattr(self, "model", None):
            self._refuse(f"accelerate has wrapped the model in {type(model).__name__}")
        return model, loader

    def _run_epoch(self, **kwargs: Any) -> None:
        """Make the steps of an epoch that are left: a replacement comes in the middle of one."""
        ours = self._ours()
        if not ours.has_begun and not ours.begin():
            self.control.should_training_stop = True  # the others have made all
            return
        epoch, made = ours.place()
        if kwargs["epoch"] < epoch:
            return
        self._refuse(_ENDED_EARLY if kwargs["epoch"] > epoch else "")
        kwargs["epochs_trained"] = epoch
        kwargs["steps_trained_in_current_epoch"] = made * self.args.gradient_accumulation_steps
        if ours.is_open:
            kwargs["resume_from_checkpoint"] = None
            ours.agree()  # on the order of the epoch's samples
        elif kwargs["resume_from_checkpoint"] is None and made:
            kwargs["resume_from_checkpoint"] = _NO_CHECKPOINT
        self._theirs()._run_epoch(**kwargs)

    def _ours(self) -> TrainerRun:
        assert self._of_unicron is not None
        return self._of_unicron

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Take the next step of the run; what it counts is known behind it."""
        del epoch_iterator, device
        self._ours().take_step()
        return turns_of_step(num_batches), None

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Make the step of the run in its last turn; return the mean loss of all ranks."""
        if not isinstance(inputs, Turn):
            return self._theirs().training_step(model, inputs, num_items_in_batch)
        if not inputs.is_last:
            return torch.zeros((), device=self.args.device)
        return self._ours().make_step(model)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Count tokens of batches, and not of what stands for them."""
        if not isinstance(inputs, Turn):
            self._theirs()._track_num_input_tokens(inputs)

    def store_flos(self) -> None:
        """Count what all ranks have computed."""
        if self._of_unicron is not None:
            self._of_unicron.share_counts()
        self._theirs().store_flos()

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Log, evaluate and save; all ranks take over what comes of it on the first one."""
        control = self.control
        is_shared = control.should_log or control.should_evaluate or control.should_save
        with unicron_elastic.phase("evaluation") if control.should_evaluate else nullcontext():
            self._theirs()._maybe_log_save_evaluate(*args, **kwargs)
        if is_shared:
            self._ours().agree()

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as often as the loop does, of which each rank may make a share: all come here."""
        names = self.eval_dataset if isinstance(self.eval_dataset, dict) else ()
        self._to_share = {f"eval_{name}" for name in names} or {"eval"}
        try:
            return self._theirs()._evaluate(*args, **kwargs)
        finally:
            self._to_share = set()

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate: all by itself, as a callback of one rank may, or this rank's share."""
        prefix = kwargs.get("metric_key_prefix")
        self._shared = self._ours().shared_evaluation(dataloader) if prefix in self._to_share else None
        self._to_share -= {prefix}  # what callbacks ask for behind it is their own
        try:  # for their shares ranks draw different numbers
            with Generators(self.args.device).kept() if self._shared else nullcontext():
                return self._theirs().evaluation_loop(self._shared or dataloader, *args, **kwargs)
        finally:
            self._shared = None

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss of a batch, which counts with those of the others."""
        if isinstance(inputs, WholeLosses):
            return inputs, None, None
        computed = self._theirs().prediction_step(model, inputs, *args, **kwargs)
        if self._shared is None:
            return computed
        self._shared.note(computed[0])
        return None, None, None

    def _save_rng_state(self, output_dir: Any) -> None:
        """Save random numbers, which are the same on all ranks between steps, on one."""
        if self.args.should_save:
            self._theirs()._save_rng_state(output_dir)

    def _load_rng_state(self, checkpoint: Any) -> None:
        """Load those of a checkpoint, if there is one."""
        if checkpoint:
            self._theirs()._load_rng_state(checkpoint)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Leave the others, and end the training."""
        ours = self._ours()
        self.store_flos()
        ours.end()
        return self._theirs()._finalize_training(*args, **kwargs)


_classes: dict[type[Any], type[Any]] = {}


def in_place_class(kind: type[Any], ranks: int | None, run_options: dict[str, Any]) -> type[Any]:
    """Return a class that is called as this one, and stands in front of it."""
    if kind not in _classes:
        names: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        names |= {"ranks_asked": ranks, "run_options": run_options}
        _classes[kind] = type(kind.__name__, (InPlaceTrainer, kind), names)
    return _classes[kind]
