"""How often a script begins a DataLoader before an epoch on which it trains, only to look at batches or to evaluate.

Who does that once, before its training, does it at each start, and what it draws there does not count behind the first;
who does it before each epoch draws the same in each run. Which of the two it is shows in the second epoch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

_KINDS_MAX = 64  # of loaders that are remembered: a script may make ones of other lengths without an end

Mark = tuple[Any, ...]


class Looks:
    """`Looks` counts them by the mark of the loader, so also where each is made anew."""

    def __init__(self) -> None:
        self._begun: Counter[Mark] = Counter()  # since the script has trained on one of them, and those it goes on with
        self._known: dict[Mark, list[int]] = {}  # how many before the first epoch, and, if that is known, before others
        self._pending: dict[Mark, int] = {}  # how many of them it had made when the state was kept
        self._has_trained: set[Mark] = set()  # since the script was started
        self._is_restored = False

    def state_dict(self, going_on: Iterable[Sequence[Any]]) -> list[list[Any]]:
        """Return what is known. ``going_on``: marks of those that the script goes through and has not trained on."""
        begun = self._begun - Counter(map(tuple, going_on))
        return [[list(mark), known, begun[mark]] for mark, known in self._known.items()]

    def load_state_dict(self, state: Iterable[Sequence[Any]]) -> None:
        """Takes it over: how often the script begins a loader before it trains tells of skipped epochs, too."""
        found = [(tuple(mark), list(known), pending) for mark, known, pending in state]
        self._known = {mark: known for mark, known, _ in found}
        self._pending = {mark: pending for mark, _, pending in found}
        self._begun.clear()
        self._has_trained.clear()
        self._is_restored = True

    def begins(self, mark: Sequence[Any], going_on: Iterable[Sequence[Any]], *, is_in_midst: bool) -> int:
        """Return how many were begun before the epoch that the script begins now, and have come to nothing.

        ``is_in_midst``: it does so in the midst of an epoch on which it trains, so that this one comes before none.
        """
        number = self._begun[tuple(mark)] - list(going_on).count(list(mark))
        self._begun[tuple(mark)] += not is_in_midst
        _forget_oldest(self._begun)
        return max(number, 0)

    def trains(self, on: Iterable[tuple[Sequence[Any], int]], going_on: Iterable[Sequence[Any]]) -> None:
        """Hears that the script trains for the first time on epochs of such loaders, before which there were so many.

        ``going_on``: the marks of all others that it goes through and has not trained on so far.
        """
        others = Counter(map(tuple, going_on))
        for mark, number in ((tuple(mark), number) for mark, number in on):
            self._begun[mark] = others[mark]
            if mark in self._has_trained and mark in self._known:
                self._known[mark] = [self._known[mark][0], number]
            elif not self._is_restored:
                self._known.setdefault(mark, [number])
            self._has_trained.add(mark)
        _forget_oldest(self._known)
        self._has_trained &= set(self._known)

    def is_look(self, mark: Sequence[Any], begun: int) -> bool:
        """Return whether the script only looks at an epoch of which it has begun so many since it was started."""
        each = self._before_each(mark)
        return begun % (each + 1) < each if each else begun < self._known.get(tuple(mark), [0])[0]

    def is_at_state(self, mark: Sequence[Any], begun: int) -> bool:
        """Return whether it may have made as many looks as when the state was kept, and as many epochs."""
        each = self._before_each(mark)
        return not each or begun % (each + 1) == self._pending.get(tuple(mark), 0)

    def is_known(self, mark: Sequence[Any]) -> bool:
        """Return whether it is known how many there are before each."""
        known = self._known.get(tuple(mark), [0])
        return known[0] == 0 or len(known) > 1

    def _before_each(self, mark: Sequence[Any]) -> int:
        """Return how many there are before each epoch, also the first, as far as is known."""
        first, *others = self._known.get(tuple(mark), [0])
        return first if others == [first] else 0


def _forget_oldest(known: dict[Mark, Any]) -> None:
    while len(known) > _KINDS_MAX:
        del known[next(iter(known))]
