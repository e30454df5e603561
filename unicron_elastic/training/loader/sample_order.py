"""In which order a data loader's samplers have the samples of an epoch, and a digest of it."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable
from typing import Any


class SampleOrder:
    """`SampleOrder` is the batches of an epoch as numbers of samples, and stays the same if it is asked again.

    ``begin_epoch`` tells the sampler of an epoch, and ``batches`` lists what it has then. Two epochs are kept.
    """

    def __init__(self, begin_epoch: Callable[[int], None], batches: Callable[[int], Iterable[list[int]]]) -> None:
        self._begin_epoch = begin_epoch
        self._batches = batches
        self._kept: dict[int, list[array[int]]] = {}
        self._digests: dict[int, str] = {}
        self._present: int | None = None

    def batch(self, epoch: int, number: int) -> list[int]:
        """Return the samples of a batch. Raises IndexError if the sampler has fewer batches than it said."""
        return list(self._of(epoch)[number])

    def digest(self, epoch: int) -> str:
        """Return the same for the same samples in the same order and batches, and else something else."""
        if epoch not in self._digests:
            found = hashlib.blake2b(digest_size=16)
            for batch in self._of(epoch):
                found.update(len(batch).to_bytes(8, "little"))
                found.update(batch.tobytes())
            self._digests[epoch] = found.hexdigest()
        return self._digests[epoch]

    def check(self, epoch: int, digest: str) -> None:
        """Raise ValueError if others, who told this ``digest``, have the samples of an epoch in another order."""
        if why := why_other_order(epoch, self.digest(epoch), digest):
            raise ValueError(why)

    def _of(self, epoch: int) -> list[array[int]]:
        """List an epoch, and have sampler and dataset in it."""
        if epoch != self._present:
            self._begin_epoch(epoch)
            self._present = epoch
        if epoch not in self._kept:
            self._kept[epoch] = [_numbers(batch) for batch in self._batches(epoch)]
            if len(self._kept) > 2:
                del self._kept[next(iter(self._kept))]
        return self._kept[epoch]


def _numbers(batch: Iterable[Any]) -> array[int]:
    """Return the numbers of a batch. Raises TypeError for samples that have other names, as texts."""
    return array("q", (int(each) for each in batch))


def why_other_order(epoch: int, own: str, others: str) -> str:
    """Return why a rank cannot train with the others; "" if it has the same order."""
    if own == others:
        return ""
    return (
        f"this rank has the samples of epoch {epoch} in another order than the others, so some would be trained twice "
        "and some never: dataset, seed and sampler must be the same on all ranks, and the order depend on nothing else"
    )
