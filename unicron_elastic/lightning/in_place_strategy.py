"""Lightning's strategy for ranks that go on in place: it sees one process, and the run knows the others."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from unicron_elastic.base.extras import Unusable, why_missing

try:
    from lightning.pytorch.accelerators import CPUAccelerator
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from lightning.pytorch.trainer.states import RunningStage, TrainerFn
except ImportError as error:
    if why := why_missing(error):
        raise Unusable(why) from error
    raise

import unicron_elastic
from unicron_elastic.lightning.lightning_run import LightningRun
from unicron_elastic.lightning.parts import (
    forget_hooks,
    loader_given,
    loader_options,
    measure_alone,
    missing_parts,
    pass_by_hooks,
    show_rank,
    step_by,
    trainer_options,
    version,
)
from unicron_elastic.lightning.refusal_of_options import refusal_of_loader_options, refusal_of_options, refused
from unicron_elastic.lightning.stand_ins import StandIn, StandIns, limited
from unicron_elastic.training.loader.epoch_plan import EpochPlan
from unicron_elastic.training.of_launcher import of_launcher, rank_before_meeting
from unicron_elastic.training.step.wrong_use import WrongUseError
from unicron_elastic.training.whole_number import check_ranks

_RUNS = "run-stage"  # what Lightning calls the barrier behind all that is set up and restored
_OF_TRAINER = {"lightning", "model", "optimizer", "scaler", "scheduler"}


class InPlaceStrategy(SingleDeviceStrategy):  # type: ignore[misc]
    """`InPlaceStrategy` has a Trainer of Lightning's go on in the step in which a rank is lost.

    A step has the batches of so many ``ranks``, by default of as many as the launcher has started: say it where jobs
    grow or shrink. ``run_options`` are those of ``unicron_elastic.Run`` that are no state, as ``snapshot_every``.
    Raises TypeError and ValueError for others, and WrongUseError where Lightning is not as it is known.
    """

    strategy_name = "unicron_in_place"

    def __init__(self, *, ranks: int | None = None, checkpoint_io: Any = None, **run_options: Any) -> None:
        super().__init__(checkpoint_io=checkpoint_io)
        if taken := sorted(_OF_TRAINER & set(run_options)):
            raise TypeError(f"InPlaceStrategy() got {taken[0]}, which is the Trainer's: options are those of Run")
        check_ranks(ranks)
        self._check_parts(missing_parts())
        self._ranks = ranks or of_launcher("WORLD_SIZE", 1)
        self._run_options = run_options
        self._trainer: Any = None
        self._has_fitted = False
        self._is_to_run = False  # all is set up and restored
        self._ours: LightningRun | None = None
        self._stand_ins: StandIns | None = None
        self._phase = ExitStack()
        # Checkpoints that the first rank writes and removes, each in which step.
        self._to_write: list[tuple[int, Any, bool]] = []  # ... and whether it has weights alone
        self._to_remove: list[tuple[int, Any]] = []
        self.local_rank = of_launcher("LOCAL_RANK", 0)
        # A process that takes a lost one's place is not the first before it has come to the others.
        self.take_rank(rank_before_meeting())

    @staticmethod
    def _check_parts(missing: str) -> None:
        if missing:
            raise WrongUseError(
                f"{version()} is not as unicron_elastic.lightning knows it ({missing}): take another version, or a "
                "strategy of Lightning's own, with which all ranks begin again after a loss"
            )

    @staticmethod
    def _refuse(why: str) -> None:
        if why:
            raise WrongUseError(refused(why))

    def take_rank(self, rank: int) -> None:
        """Take this for the rank of this process."""
        self.global_rank = rank
        show_rank(rank)

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the first rank, which writes."""
        return bool(self.global_rank == 0)

    @property
    def root_device(self) -> torch.device:
        """The device of this process, as the accelerator is chosen."""
        if self.accelerator is None or isinstance(self.accelerator, CPUAccelerator):
            return torch.device("cpu")
        if torch.cuda.is_available():
            return torch.device("cuda", of_launcher("LOCAL_RANK", 0) % torch.cuda.device_count())
        raise WrongUseError(refused(f"{type(self.accelerator).__name__} was not tried; take cpu or cuda"))

    def setup(self, trainer: Any) -> None:
        """Set up the Trainer. Raises WrongUseError, in one sentence, for what cannot go on in place."""
        super().setup(trainer)
        self._trainer = trainer
        measure_alone(trainer.lightning_module)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._check_parts(missing_parts(trainer))
        self._refuse(refusal_of_options(trainer_options(trainer, has_fitted=self._has_fitted)))
        self._has_fitted = True
        pass_by_hooks(trainer.lightning_module, StandIn)
        if of_launcher("UNICRON_TAKES_PLACE", 0):
            trainer.num_sanity_val_steps = 0  # the others wait

    def process_dataloader(self, dataloader: object) -> object:
        """Return what stands for the batches to train with; those are read by number."""
        trainer = self.lightning_module.trainer  # who asks how many batches there are has it before setup()
        if trainer.state.fn != TrainerFn.FITTING or trainer.state.stage != RunningStage.TRAINING:
            return dataloader
        options = loader_options(dataloader, is_second=self._stand_ins is not None)
        self._refuse(refusal_of_loader_options(options))
        batches, turns = limited(options.batches, self._ranks, trainer.limit_train_batches)
        plan = EpochPlan(max(batches, 1), trainer.accumulate_grad_batches, self._ranks)
        self._stand_ins = StandIns(dataloader, plan, turns, self._begin_turn)
        if self._is_to_run:
            self._make_run(self._stand_ins)
        return self._stand_ins

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Make the run of data that were asked for before, now that a checkpoint, if there is one, is restored."""
        super().barrier(*args, **kwargs)
        if _RUNS not in (*args, *kwargs.values()):
            return
        self._is_to_run = True
        if self._stand_ins is not None and self._ours is None:
            self._make_run(self._stand_ins)

    def _make_run(self, stand_ins: StandIns) -> None:
        seed = of_launcher("PL_GLOBAL_SEED", torch.initial_seed())
        self._ours = LightningRun(self._trainer, stand_ins, seed, self._run_options)
        self._ours.count_from_checkpoint()

    def _begin_turn(self) -> None:
        assert self._ours is not None
        self._ours.begin_turn()

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch, and leave what only stands for one."""
        return batch if isinstance(batch, StandIn) else super().batch_to_device(batch, device, dataloader_idx)

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Make the run's step, and the optimizer's with the gradients of all ranks."""
        if self._ours is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        loss = step_by(self.precision_plugin, self.lightning_module, optimizer, closure, kwargs)
        self._ours.share_logged()
        return loss

    def on_train_start(self) -> None:
        """Join the others."""
        if loader_given(self._trainer) is not self._stand_ins:
            self._refuse("the training data loader stands in a list, a dict or a CombinedLoader; give it alone")
        if self._ours is not None:
            self._ours.begin()

    def on_train_end(self) -> None:
        """Leave the others."""
        if self._ours is not None:
            self._ours.end()

    def on_validation_start(self) -> None:
        """Have the others wait for who is not done."""
        self._phase.enter_context(unicron_elastic.phase("evaluation"))

    def on_validation_end(self) -> None:
        """Take over what comes of it on the first rank."""
        self._phase.close()
        if self._ours is not None and self._trainer.state.stage != RunningStage.SANITY_CHECKING:
            self._ours.agree()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint, for which the others wait; who is not the first keeps in mind which.

        Should the first be lost, nobody knows how far it had come with it: who takes its place writes it once more.
        """
        with unicron_elastic.phase("checkpoint"):
            super().save_checkpoint(checkpoint, filepath, storage_options)
        if not self.is_global_zero and self._trainer is not None:
            step = self._trainer.global_step
            written = (step, filepath, "optimizer_states" not in checkpoint)
            self._to_write = [each for each in self._to_write if each[0] == step] + [written]

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint; who is not the first keeps in mind which, should that one be lost before it is done."""
        super().remove_checkpoint(filepath)
        if not self.is_global_zero and self._trainer is not None:
            step = self._trainer.global_step
            self._to_remove = [each for each in self._to_remove if each[0] == step] + [(step, filepath)]

    def end_what_was_left(self) -> None:
        """Write and remove the checkpoints with which the first rank was busy in the present step when it was lost."""
        for step, filepath, has_weights_alone in self._to_write:
            if step == self._trainer.global_step:
                self._trainer.save_checkpoint(filepath, has_weights_alone)
        for step, filepath in self._to_remove:
            if step == self._trainer.global_step:
                super().remove_checkpoint(filepath)

    def teardown(self) -> None:
        """Leave the Trainer as it is without us."""
        self._is_to_run = False
        if self._ours is not None:
            self._ours.close()
            forget_hooks(self.lightning_module)
            self._ours = None
        super().teardown()
