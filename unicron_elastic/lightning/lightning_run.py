"""The run of a Trainer of Lightning's: its steps, of which the micro-batches are all ranks' batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from unicron_elastic.lightning.lightning_progress import LightningProgress
from unicron_elastic.lightning.logged_values import LogExchange
from unicron_elastic.lightning.parts import (
    StepResults,
    backward_of,
    begin_as_first,
    begin_gradients,
    begin_in_epoch,
    compute_by,
    count_by_others,
    end_as_first,
    is_step_made,
    loss_of,
    place_in_epoch,
    results_noted,
    take_logged,
    turns_behind,
)
from unicron_elastic.lightning.refusal_of_options import refused
from unicron_elastic.lightning.stand_ins import StandIns
from unicron_elastic.training.data import ReadAhead
from unicron_elastic.training.loader.loader_order import LoaderOrder
from unicron_elastic.training.loader.numbered_batches import numbered_batches
from unicron_elastic.training.loader.sample_order import SampleOrder
from unicron_elastic.training.optimizer_step import Step
from unicron_elastic.training.run import Run
from unicron_elastic.training.step.wrong_use import WrongUseError

_ENDLESS = 1 << 40  # steps, where neither steps nor epochs have a limit
_OTHER_PLACE = (
    "Lightning's loop is in batch {turns} of epoch {epoch}, and the run in step {step}: an epoch was ended before its "
    "last step, or a checkpoint is of other data, and data are read by the number of the step"
)


class LightningRun:
    """`LightningRun` makes the optimizer steps of a Trainer of Lightning's, which keeps its loop.

    ``options`` are those of ``Run``.
    """

    def __init__(self, trainer: Any, stand_ins: StandIns, seed: int, options: dict[str, Any]) -> None:
        self._trainer = trainer
        self._plan = stand_ins.plan
        self._turns = len(stand_ins)
        self._options = options
        order = LoaderOrder(stand_ins.loader, seed, self._plan.batches)
        self._order = SampleOrder(order.begin_epoch, order.batches)
        self._batches = numbered_batches(stand_ins.loader, self._plan, self._order, seed)
        self._exchange = LogExchange()
        self._progress = LightningProgress(trainer, self._order, self._exchange, self._plan.steps)
        self._results: StepResults | None = None  # of the step that is computed
        self._run: Run | None = None
        self._steps: Iterator[Step] = iter(())
        self._step: Step | None = None
        self._is_taken = False  # the step in which the loop is
        self._is_open = False  # this rank is among the others, and they have not ended
        self._has_to_be_placed = False  # the loop, which begins in the middle of an epoch
        self._is_first = bool(trainer.is_global_zero)  # who takes a lost rank's place is not, before it has come
        compute_by(trainer, self._compute_turn)

    def count_from_checkpoint(self) -> None:
        """Have a loop that begins from a checkpoint of other ranks count its batches as here."""
        step = self._trainer.global_step
        if not step:
            return
        epoch, made = self._plan.place(step)
        if not made and turns_behind(self._trainer):  # at the end of an epoch, which is not over for the loop
            epoch, made = epoch - 1, self._plan.steps
        turns = min(made * self._trainer.accumulate_grad_batches, self._plan.turns)
        count_by_others(self._trainer, turns, epoch * self._plan.turns + turns)

    def begin(self) -> None:
        """Join the others, and have Lightning's loop begin where they are."""
        trainer = self._trainer
        schedulers = [each.scheduler for each in trainer.strategy.lr_scheduler_configs]
        run = self._run = Run(
            model=trainer.lightning_module,
            optimizer=trainer.optimizers[0],
            scheduler=schedulers[0] if schedulers else None,
            lightning=self._progress,
            **{f"scheduler_{number}": each for number, each in enumerate(schedulers) if number},
            **self._options,
        )
        begun = trainer.global_step
        if begun:
            run.begin_at(begun)
        run.restore()
        self._steps = run.steps(self._total(), self._plan.counts)
        self._step = next(self._steps, None)
        step = run.step if self._step is None else self._step.number
        if step != begun:
            begin_in_epoch(trainer, self._plan.place(step)[0], step)
            self._has_to_be_placed = True

    def _total(self) -> int:
        """Return how many steps are made at most."""
        steps, epochs = self._trainer.max_steps, self._trainer.fit_loop.max_epochs
        limits = [steps if steps >= 0 else _ENDLESS]
        limits.append(epochs * self._plan.steps if epochs is not None and epochs >= 0 else _ENDLESS)
        return min(limits)

    def begin_turn(self) -> None:
        """Have Lightning's loop, which takes a batch, be where the run is. Raises WrongUseError if it is not."""
        trainer, plan = self._trainer, self._plan
        epoch, made = plan.place(trainer.global_step)
        if self._has_to_be_placed:
            self._has_to_be_placed = False
            turns = made * trainer.accumulate_grad_batches
            place_in_epoch(trainer, turns, made, epoch * plan.turns + turns)
        turns = turns_behind(trainer)
        if (epoch, made) != (trainer.current_epoch, turns // trainer.accumulate_grad_batches):
            words = _OTHER_PLACE.format(turns=turns, epoch=trainer.current_epoch, step=trainer.global_step)
            raise WrongUseError(refused(words))
        if not turns:
            self.agree()  # on the order of the epoch's samples, and on what its end has brought
        if not turns % trainer.accumulate_grad_batches:
            self._take_next()

    def _take_next(self) -> None:
        """Go on to the run's next step, which is kept as it is before the hooks of its first batch are called."""
        if self._is_taken:
            self._step = next(self._steps, None)
            self._is_taken = False

    def _compute_turn(self) -> torch.Tensor | None:
        """Make the run's step if it is the last batch that is accumulated; return the mean loss of all ranks."""
        trainer = self._trainer
        if not is_step_made(trainer):
            return None
        self._is_taken = True
        step = self._step
        if step is None or step.number != trainer.global_step:
            number = None if step is None else step.number
            raise RuntimeError(f"Lightning's loop is in step {trainer.global_step}, and the run in {number}")
        begin_gradients(trainer)
        # Lightning divides by accumulate_grad_batches also where an epoch's last step has fewer batches.
        part = self._plan.micro_batches(step.number) / self._plan.per_step
        with results_noted(trainer) as results:
            for index in step:
                self._compute(step, index, part, results)
        self._results = results
        self._is_open = True
        self._show_rank()
        return torch.tensor(step.loss / part, device=trainer.strategy.root_device)

    def _compute(self, step: Step, index: int, part: float, results: StepResults) -> None:
        batch = self._batches(step.number, index)
        number = self._plan.batch(step.number, index)[1]
        loss = loss_of(self._trainer, batch, number, lambda prepared: results.begin(index, prepared))
        backward_of(self._trainer, loss, lambda each: step.backward(each * part))

    def share_logged(self) -> None:
        """Have all ranks know what was logged in the step that is made."""
        run, step, results = self._run, self._step, self._results
        assert run is not None
        assert step is not None
        assert results is not None
        count = self._plan.micro_batches(step.number)
        found = self._exchange.of_all(results.noted, count, run.all_reduce, run.rank, run.world_size)
        take_logged(self._trainer, found, self._exchange.ways)
        self._results = None
        if not self._progress.knows_folders:
            self.agree()

    def agree(self) -> None:
        """Have all ranks take over what the first one has logged, found best and decided."""
        if self._is_open and self._run is not None:
            found = self._run.broadcast_object(self._progress.news())
            if self._show_rank():
                self._trainer.strategy.end_what_was_left()
            if self._run.rank != 0:
                self._progress.load_state_dict(found)
            self._progress.take_folders(found)

    def end(self) -> None:
        """Leave the others when all have made the last step; where all stop before, they end in it."""
        self.agree()
        if self._is_open and self._trainer.global_step >= self._total():
            self._take_next()
        self.close()

    def close(self) -> None:
        """Have nothing read ahead any more."""
        self._is_open = False
        if isinstance(self._batches, ReadAhead):
            self._batches.close()

    def _show_rank(self) -> bool:
        """Take the rank that this process has; return whether it has become the first."""
        assert self._run is not None
        rank, was_first = self._run.rank, self._is_first
        self._is_first = rank == 0
        self._trainer.strategy.take_rank(rank)
        if was_first and not self._is_first:
            end_as_first(self._trainer)
        has_become_first = self._is_first and not was_first
        if has_become_first:
            begin_as_first(self._trainer)
        return has_become_first
