"""The run of a Trainer: its steps, whose micro-batches are the batches of all ranks, and what ranks agree on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard

from unicron_elastic.accelerate.alone import shown_ranks
from unicron_elastic.training.data import ReadAhead
from unicron_elastic.training.loader.loader_facts import loader_facts, refusal_of_loader
from unicron_elastic.training.loader.numbered_batches import numbered_batches
from unicron_elastic.training.loader.order_of import order_of
from unicron_elastic.training.of_launcher import of_launcher
from unicron_elastic.training.optimizer_step import Step
from unicron_elastic.training.run import Run
from unicron_elastic.training.step.randomness import Generators
from unicron_elastic.training.step.wrong_use import WrongUseError
from unicron_elastic.transformers.loss_kind import PART, LossKind, loss_kind
from unicron_elastic.transformers.parts import (
    backward_by,
    metrics_kept,
    own_optimizer,
    take_rank,
    why_evaluates_alone,
)
from unicron_elastic.transformers.refusal import OTHER_LOSS, refused
from unicron_elastic.transformers.shared_evaluation import SharedEvaluation
from unicron_elastic.transformers.trainer_progress import TrainerProgress
from unicron_elastic.transformers.turns import Turns


class TrainerRun:
    """`TrainerRun` makes the optimizer steps of a Trainer, which keeps its loop.

    ``theirs`` is the Trainer as it is without us, and ``options`` are those of ``Run``.
    """

    def __init__(self, trainer: Any, theirs: Any, turns: Turns, options: dict[str, Any]) -> None:
        self._trainer = trainer
        self._theirs = theirs
        self._plan = turns.plan
        self._options = options
        arguments, loader = trainer.args, turns.loader
        seed = arguments.seed if arguments.data_seed is None else arguments.data_seed
        self._order = order_of(loader, seed)
        self._batches = numbered_batches(loader, turns.plan, self._order, seed)
        self._progress = TrainerProgress(trainer, self._order, turns.plan.steps)
        self._run: Run | None = None
        self._steps: Iterator[Step] = iter(())
        self._step: Step | None = None
        self._is_taken = False  # the step in which the loop is
        self._kind = LossKind.UNKNOWN  # of the loss
        self._is_open = False  # this rank is among the others, and they have not ended
        self._tokens = 0  # that this rank has read since they were summed up

    @property
    def is_open(self) -> bool:
        """Return whether this rank has made a step with the others, and has not left them."""
        return self._is_open

    @property
    def has_begun(self) -> bool:
        """Return whether the run is there."""
        return self._run is not None

    def begin(self) -> bool:
        """Join the others; return whether there is a step to make."""
        trainer = self._trainer
        run = self._run = Run(
            model=trainer.model,
            optimizer=own_optimizer(trainer.optimizer),
            scheduler=trainer.lr_scheduler,
            trainer=self._progress,
            **{"seed": trainer.args.seed, **self._options},
        )
        if trainer.state.global_step:
            run.begin_at(trainer.state.global_step)
        run.restore()
        self._steps = run.steps(trainer.state.max_steps, self._plan.counts)
        self._take()
        if self._step is not None:
            trainer.state.global_step = self._step.number
        self._is_taken = False
        if not of_launcher("UNICRON_TAKES_PLACE", 0):  # who does has no rank among the others yet
            self._show_rank()
        return self._step is not None

    def place(self) -> tuple[int, int]:
        """Return the epoch in which the next step is, and how many of this epoch are made."""
        return self._plan.place(self._trainer.state.global_step)

    def take_step(self) -> None:
        """Take the step that the Trainer's loop begins. Raises RuntimeError if it is another one than the loop's."""
        if self._is_taken:
            self._take()
        self._is_taken = True
        if self._step is None or self._step.number != self._trainer.state.global_step:
            number = None if self._step is None else self._step.number
            raise RuntimeError(f"the Trainer is in step {self._trainer.state.global_step}, and the run in {number}")

    def _take(self) -> None:
        self._step = next(self._steps, None)

    def make_step(self, model: Any) -> torch.Tensor:
        """Compute what this rank is dealt of the step, until its gradients are reduced; return its mean loss."""
        step, trainer = self._step, self._trainer
        assert step is not None
        trainer.current_gradient_accumulation_steps = 1  # means are not divided: the run does that
        for index in step:
            batch = self._batches(step.number, index)
            self._compute(model, batch, step)
            self._count(batch)
        self._is_open = True
        self._show_rank()
        return torch.tensor(step.loss, device=trainer.args.device)

    def _count(self, batch: Any) -> None:
        """Count what a micro-batch has; the Trainer's state, which ranks compare, has what all have together."""
        state = self._trainer.state
        before = state.num_input_tokens_seen
        self._theirs._track_num_input_tokens(batch)
        self._tokens += state.num_input_tokens_seen - before
        state.num_input_tokens_seen = before
        self._trainer.current_flos += float(self._theirs.floating_point_ops(batch))

    def _compute(self, model: Any, batch: Any, step: Step) -> None:
        """Compute a micro-batch; its loss is a sum if the Trainer divides it by how many items there are."""
        trainer = self._trainer
        items = trainer._get_num_items_in_batch([batch], trainer.args.device)
        is_mean = items is None or getattr(trainer, "loss_is_scaled_for_ga", None) is False
        one = None if is_mean else torch.ones_like(torch.as_tensor(items))
        if one is not None and self._kind is LossKind.UNKNOWN:
            self._kind = self._kind_of_loss(model, batch, one)
        weight = None if is_mean or self._kind is LossKind.ADDED else items
        added = 1 if is_mean or weight is not None else self._plan.micro_batches(step.number)

        def backward(loss: torch.Tensor, **_: Any) -> None:
            step.backward(loss * added, weight=weight)

        with backward_by(trainer.accelerator, backward):
            self._theirs.training_step(model, batch, one)

    def _kind_of_loss(self, model: Any, batch: Any, one: torch.Tensor) -> LossKind:
        """Look how the loss depends on ``num_items_in_batch``; ranks know no other's number before the step's end.

        Nothing of it is left: the model evaluates, and random numbers are put back. Raises WrongUseError for a loss
        that could not be divided later.
        """
        ranks = self._plan.ranks
        generators = Generators(self._trainer.args.device)
        model.eval()
        try:
            with torch.no_grad(), metrics_kept(self._trainer), generators.kept():
                whole, part = (self._loss(model, batch, one * each) for each in (1, PART))
                with shown_ranks(ranks):
                    of_ranks = self._loss(model, batch, one)
        finally:
            model.train()
        kind = loss_kind(whole, part, of_ranks, ranks)
        if kind is LossKind.OTHER:
            raise WrongUseError(refused(type(self._trainer).__name__, OTHER_LOSS))
        return kind

    def _loss(self, model: Any, batch: Any, items: torch.Tensor) -> float:
        trainer = self._trainer
        with trainer.compute_loss_context_manager():
            inputs = trainer._prepare_inputs(dict(batch))
            return float(trainer.compute_loss(model, inputs, num_items_in_batch=items))

    def share_counts(self) -> None:
        """Sum up over all ranks how much they have computed since the last time."""
        trainer = self._trainer
        if self._is_open and self._run is not None:
            counts = torch.tensor([trainer.current_flos, self._tokens], dtype=torch.float64)
            flops, tokens = self._run.all_reduce(counts).tolist()
            trainer.current_flos, self._tokens = flops, 0
            trainer.state.num_input_tokens_seen += int(tokens)
            self._show_rank()  # where the first rank was lost in an evaluation, another one saves

    def agree(self) -> None:
        """Have all ranks take over what the first one has logged, evaluated and decided."""
        if self._is_open and self._run is not None:
            self._progress.load_state_dict(self._run.broadcast_object(self._progress.news()))

    def shared_evaluation(self, loader: Any) -> SharedEvaluation | None:
        """Return what stands for an evaluation's loader, of which each rank makes a share; None: each makes all."""
        facts = loader_facts(loader, (DataLoaderShard.__iter__,))
        if self._run is None or not self._is_open or refusal_of_loader(facts, "") or why_evaluates_alone(self._trainer):
            return None
        run, seed = self._run, self._trainer.args.seed

        def all_reduce(share: torch.Tensor) -> torch.Tensor:
            found = run.all_reduce(share)
            self._show_rank()  # where the first rank was lost in the evaluation, another one reports it
            return found

        with suppress(TypeError, IndexError):  # samples that are not numbered
            return SharedEvaluation(loader, seed, lambda: (run.rank, run.world_size), all_reduce)
        return None

    def end(self) -> None:
        """Leave the others when all have made the last step; where all stop before, they end in it."""
        if self._is_open and self._trainer.state.global_step >= self._trainer.state.max_steps:
            next(self._steps, None)
        self._is_open = False
        if isinstance(self._batches, ReadAhead):
            self._batches.close()

    def _show_rank(self) -> None:
        assert self._run is not None
        take_rank(self._trainer, self._run.rank)
