"""Tells during a backward pass which buckets of gradients have all that the pass adds to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import ref

from torch import Tensor


class BucketsReady:
    """`BucketsReady` watches ``added``, a list of the parameters to which autograd adds in the present pass.

    It looks only when the parameter of a bucket gets its gradient that got it last in the pass before: a call for each
    parameter would cost more. ``begin`` is called for one bucket after the other, and tells whether it is reduced now.
    """

    def __init__(self, added: list[Tensor]) -> None:
        self.begin: Callable[[int], bool] = lambda _bucket: False
        self._added = added
        self._wanted: list[set[Tensor]] = []
        self._signs: list[Any] = []  # hooks of those that come last
        self._next = 0  # the bucket whose turn it is in this pass
        self._taken, self._seen = 0, set[Tensor]()  # so many of those that were added are seen
        self._begun = set[Tensor]()  # parameters of buckets that are being reduced
        self._is_too_early = False
        self._adds_twice = False  # to a parameter, in one pass: then nobody knows when that is over

    def lay_out(self, buckets: Sequence[Sequence[Tensor]]) -> None:
        """Take it that the first buckets have these parameters."""
        self._forget_signs()
        self._wanted = [set(each) for each in buckets]
        self._is_too_early = self._adds_twice = False
        self.begin_pass()

    def end_pass(self) -> None:
        """Note that a backward pass has ended."""
        if not self._wanted or self._adds_twice:
            return
        self._see()
        if len(self._seen) < len(self._added):
            self._adds_twice = True
            times = Counter(self._added)
            self._is_too_early = any(times[each] > 1 for each in self._begun)
            self._forget_signs()
        elif self._next < len(self._wanted) and self._wanted[self._next] <= self._seen:
            self._learn()
        self.begin_pass()

    def take_too_early(self) -> bool:
        """Return whether more was added to a bucket after it had begun, and forget it."""
        found, self._is_too_early = self._is_too_early, False
        return found

    def begin_pass(self) -> None:
        """Forget what a pass has added that ended, or broke."""
        self._next, self._taken = 0, 0
        self._seen.clear()
        self._begun.clear()

    def _see(self) -> None:
        self._seen.update(self._added[self._taken :])
        self._taken = len(self._added)

    def look(self) -> None:
        """Begin the buckets that are ready."""
        self._see()
        while self._next < len(self._wanted) and self._wanted[self._next] <= self._seen:
            wanted = self._wanted[self._next]
            if self.begin(self._next):
                self._begun |= wanted
            self._next += 1

    def _learn(self) -> None:
        """Note which parameter of each bucket came last in this pass."""
        self._forget_signs()
        at = {parameter: number for number, parameter in enumerate(self._added)}
        for wanted in self._wanted:
            if not wanted <= self._seen:
                break
            last = max(wanted, key=at.__getitem__)
            self._signs.append(last.register_post_accumulate_grad_hook(partial(_look, ref(self))))

    def _forget_signs(self) -> None:
        for sign in self._signs:
            sign.remove()
        self._signs.clear()


def _look(watching: ref[BucketsReady], _parameter: Tensor) -> None:
    # torch keeps a hook in C++: one that kept us would keep the model and its run for ever.
    one = watching()
    if one is not None:
        one.look()
