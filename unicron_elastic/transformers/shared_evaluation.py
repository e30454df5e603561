"""An evaluation of which each rank makes a share. The Trainer's loop gets the losses of all batches in their order."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from unicron_elastic.base.text import counted
from unicron_elastic.training.data import MicroBatchError
from unicron_elastic.training.loader.epoch_plan import EpochPlan
from unicron_elastic.training.loader.numbered_batches import NumberedBatches, read_in_turn
from unicron_elastic.training.loader.order_of import order_of

_MADE, _HAS_LOSS = 1, 2  # rows of what ranks sum up; the first one has the losses


class WholeLosses(dict[str, Any]):
    """`WholeLosses` stand for a last batch, with which the Trainer's loop gets the losses of all."""

    def __init__(self, losses: Tensor, sizes: Sequence[int]) -> None:
        super().__init__()
        self._losses, self._sizes = losses, torch.tensor(sizes)

    def repeat(self, _batch_size: int) -> Tensor:
        """Return the loss of a batch once for each of its samples."""
        return self._losses.repeat_interleave(self._sizes)


class SharedEvaluation:
    """`SharedEvaluation` stands for a data loader: it has the batches that this rank makes, and then all losses.

    ``place`` returns this rank, and of how many; ``all_reduce`` sums up over those that are left. What a lost rank was
    to make is dealt once more, so no batch is missing or counts twice, however many ranks are lost on the way.
    Raises TypeError and IndexError for a loader whose samplers number no samples, or have fewer batches than they say.
    """

    def __init__(
        self, loader: Any, seed: int, place: Callable[[], tuple[int, int]], all_reduce: Callable[[Tensor], Tensor]
    ) -> None:
        number = len(loader.batch_sampler)
        order = order_of(loader, seed)
        self._loader = loader
        self._batches = NumberedBatches(loader, EpochPlan(number, number, 1), order, seed)
        self._sizes = [len(order.batch(0, each)) for each in range(number)]
        self._place, self._all_reduce = place, all_reduce
        self._noted: Tensor | None = None
        self._dtype = torch.float32
        self.dataset = loader.dataset
        self.batch_size = getattr(loader, "batch_size", None)

    def __len__(self) -> int:
        """Return how many batches the loop sees if nobody is lost."""
        rank, size = self._place()
        return len(range(rank, len(self._sizes), size)) + 1

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of this rank, each of which is to be noted, until those of all are there."""
        sums = torch.zeros(3, len(self._sizes), dtype=torch.float64)
        missing: Sequence[int] = range(len(self._sizes))
        is_dealt = True
        while missing:
            rank, size = self._place()
            share = yield from self._made(missing[rank::size] if is_dealt else missing)
            sums += self._all_reduce(share).cpu()
            left = [each for each in missing if not sums[_MADE, each]]
            is_dealt, missing = len(left) < len(missing), left  # else those to whom it was dealt are gone, or late
            if missing and self._place()[0] == 0:
                batches = counted(len(missing), "batch", "batches")
                sys.stderr.write(f"unicron: the ranks that are left make {batches} of the evaluation for those lost.\n")
        if sums[_HAS_LOSS].any():
            yield WholeLosses((sums[0] / sums[_MADE]).to(self._dtype), self._sizes)

    def note(self, loss: Tensor | None) -> None:
        """Note the loss of the batch that was yielded last, if it has one."""
        self._noted = loss
        self._dtype = self._dtype if loss is None else loss.dtype

    def _made(self, numbers: Sequence[int]) -> Generator[Any, None, Tensor]:
        share = torch.zeros(3, len(self._sizes), dtype=torch.float64)
        batches = read_in_turn(self._loader, self._batches, [(0, each) for each in numbers])
        try:
            for number, batch in zip(numbers, batches, strict=True):
                yield batch
                share[0, number] = 0 if self._noted is None else self._noted
                share[_MADE, number], share[_HAS_LOSS, number] = 1, self._noted is not None
        except MicroBatchError as error:
            samples = ", ".join(map(str, error.samples[:8]))
            raise RuntimeError(
                f"batch {error.index} of the evaluation (samples {samples}) could not be read: {error.why}"
            ) from error
        return share
