"""Finds that ranks wait for each other in different places, where each would wait in vain until its time is over.

A collective ends when all ranks have called it. If some have called another one none of them ends. Who has waited for a
moment writes down what it waits for, by the number of the collective since the ranks met, and looks whether others have
written something else, or that they have gone on to a larger world. A collective that ends soon costs nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from torch.distributed import Store

from unicron_elastic.engine.protocol.said import MismatchError
from unicron_elastic.engine.transport.waiter import AbandonedError

PATIENCE_S = 1.0
LOOK_S = 0.25
_OUTGROWN = "outgrown"


class OutgrownError(AbandonedError):
    """Another member has gone on to a world that others have joined: in this one it does nothing any more."""


class CollectiveOrder:
    """`CollectiveOrder` counts the collectives of one rank in one world, whose members share the ``store``."""

    def __init__(self, store: Store, rank: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._rank = rank
        self._clock = clock
        self._meetings = 0  # of the members in this world
        self._count = 0  # of this rank's collectives since the latest of them
        self._what = ""
        self._next = 0.0
        self._is_told = False

    def meet(self) -> None:
        """All members have met: those who are late then take no part in what the others do until they meet again."""
        self._meetings, self._count = self._meetings + 1, 0
        self.end()

    def begin(self, what: str) -> None:
        """This rank calls its next collective."""
        self._count += 1
        self._what = what
        self._next = self._clock() + PATIENCE_S
        self._is_told = False

    def end(self) -> None:
        """Note that it has ended."""
        self._what = ""

    def outgrow(self) -> None:
        """Tell the others that this rank goes on to a larger world, which they may not have heard of."""
        self._store.set(_OUTGROWN, "")

    def look(self) -> None:
        """Looks where others are, if it is time. Raises MismatchError if they are elsewhere, and OutgrownError.

        What some give to others, beside the collectives of all, ends with a larger world as well.
        """
        if self._clock() >= self._next:
            self._next = self._clock() + LOOK_S
            self.compare()
            if self._store.check([_OUTGROWN]):
                raise OutgrownError("another rank has gone on to a larger world")

    def compare(self) -> None:
        """Raises MismatchError if others are known to be in another collective than this rank."""
        if not self._what:
            return
        first = f"doing/{self._meetings}/{self._count}"
        other = f"{first}/other"
        mine = json.dumps([self._rank, self._what])
        if not self._is_told:
            self._is_told = True
            told = bytes(self._store.compare_set(first, "", mine)).decode()
            if self._differs(told):
                self._store.set(other, mine)
                self._raise(told)
        if self._store.check([other]) and self._differs(told := bytes(self._store.get(other)).decode()):
            self._raise(told)

    def _differs(self, told: str) -> bool:
        return bool(json.loads(told)[1] != self._what)

    def _raise(self, told: str) -> None:
        rank, what = json.loads(told)
        ranks = sorted([(self._rank, self._what), (rank, what)])
        places = " and ".join(f"rank {number} waits for {place}" for number, place in ranks)
        raise MismatchError(f"{places}: all ranks must make the same calls of run.steps(), run.mean() and its like")
