"""What a collective that was begun gives: the promise of its result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor
from torch.distributed import Work

from unicron_elastic.engine.transport.landing import Marking
from unicron_elastic.engine.transport.waiter import Waiter


class UnderWay(Protocol):
    """`UnderWay` is what was begun with the other members, and has not ended yet."""

    def follow(self) -> None:
        """Have what follows come after it. Raises what a collective raises."""

    def wait(self) -> None:
        """Wait for its result. Raises what a collective raises."""

    def has_ended(self) -> bool:
        """Wait for the end of a broken one, good or bad; false if it had to be abandoned, and may still write."""


class Completion:
    """A `Completion` is a collective under way: once ``wait`` has returned, the host may read its result."""

    __slots__ = ("_marking", "_tensors", "_waiter", "_work")

    def __init__(self, work: Work, waiter: Waiter, marking: Marking, tensors: Sequence[Tensor]) -> None:
        self._work = work
        self._waiter = waiter
        self._marking = marking
        self._tensors = tensors

    def follow(self) -> None:
        """Have what follows on the device come after it; the host may read the result after a later one's ``wait``.

        Raises what the collective raises, or AbandonedError; then nobody may read it.
        """
        self._waiter.wait(self._work)

    def wait(self) -> None:
        """Wait for the result. Raises what ``follow`` raises, and DistNetworkError if the world is broken then."""
        self.follow()
        self._waiter.land(self._work, self._marking(self._tensors))

    def has_ended(self) -> bool:
        """Wait for the end of a broken one, good or bad; false if it had to be abandoned, and may still write."""
        return self._waiter.has_ended(self._work) and self._waiter.has_landed(self._marking(self._tensors))
