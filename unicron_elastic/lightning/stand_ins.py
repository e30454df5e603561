"""What Lightning's loop takes for batches: one optimizer step is made in the last of them that it accumulates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from unicron_elastic.training.loader.epoch_plan import EpochPlan


class StandIn:
    """`StandIn` stands for a batch. All that can be told of it is how many samples a batch has."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Show a size to who looks for it, as Lightning for the weight of what is logged."""
        return iter([torch.empty(self._size, 0)])

    def __repr__(self) -> str:
        return "<stands for a batch, which the ranks read by number>"


class StandIns:
    """`StandIns` stand for the data loader, with the length that it has in one of several processes."""

    def __init__(self, loader: Any, plan: EpochPlan, turns: int, begin: Callable[[], None]) -> None:
        self.loader = loader
        self.plan = plan
        self._turns = turns
        self._begin = begin
        self._stand_in = StandIn(getattr(loader, "batch_size", None) or 1)

    def __len__(self) -> int:
        return self._turns

    def __iter__(self) -> Iterator[StandIn]:
        """Yield as many as are asked for: Lightning's loop counts them, and ``begin`` is told of each."""
        while True:
            self._begin()
            yield self._stand_in


def limited(batches: int, ranks: int, limit: float) -> tuple[int, int]:
    """Return how many batches of an epoch are trained, and what one of ``ranks`` has, by ``limit_train_batches``.

    The limit is that of a rank: a whole number of batches, or a part of what it has.
    """
    turns = -(-batches // ranks)
    taken = min(turns, limit) if isinstance(limit, int) else int(turns * limit)
    return min(batches, taken * ranks), turns
