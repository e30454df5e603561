"""What a collective that was begun gives: the promise of its result."""

from __future__ import annotations

from torch.distributed import Work

from unicron_elastic.engine.transport.waiter import Waiter


class Completion:
    """A `Completion` is a collective under way: once ``wait`` has returned, its result may be read."""

    __slots__ = ("_waiter", "_work")

    def __init__(self, work: Work, waiter: Waiter) -> None:
        self._work = work
        self._waiter = waiter

    def wait(self) -> None:
        """Wait for the result. Raises what the collective raises, or AbandonedError; then nobody may read it."""
        self._waiter.wait(self._work)

    def has_ended(self) -> bool:
        """Wait for the end of a broken one, good or bad; false if it had to be abandoned, and may still write."""
        return self._waiter.has_ended(self._work)
