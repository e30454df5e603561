"""What the Trainer's loop takes for batches: one optimizer step is made in the last turn of its accumulation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from unicron_elastic.training.loader.epoch_plan import EpochPlan


class Turn(dict[str, Any]):
    """`Turn` stands for a batch: it has none of the names of one, so nothing is counted of it."""

    def __init__(self, *, is_last: bool) -> None:
        super().__init__()
        self.is_last = is_last


class Turns:
    """`Turns` stand for the data loader, with the length that it has in one of the Trainer's processes."""

    sampler = None
    prefetch_factor = None  # nothing is read of it, so there are no workers

    def __init__(self, loader: Any, plan: EpochPlan) -> None:
        self.loader = loader
        self.plan = plan
        self.generator = torch.Generator()  # what skips some of them draws a seed for workers, and not everybody's
        self.dataset = loader.dataset
        self.collate_fn = loader.collate_fn
        self.batch_size = getattr(loader, "batch_size", None)
        self.batch_sampler = range(plan.turns)

    def __len__(self) -> int:
        return self.plan.turns

    def __iter__(self) -> Iterator[Turn]:
        """Begin an epoch, of which nothing is read: the run says what is."""
        return iter(())


def turns_of_step(number: int) -> list[Turn]:
    """Return what the Trainer's loop gets for one optimizer step."""
    return [Turn(is_last=each == number - 1) for each in range(number)]
