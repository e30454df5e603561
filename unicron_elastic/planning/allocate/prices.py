"""What a node is worth: the price at which tasks that each take what pays best take about as many nodes as there are.

For any price p of 0 or more, the sum over tasks of max over k of (key(k) - p * k), plus p * n, is at least the optimum:
tasks that only pay for what they take are bound by nothing else. The price that makes this bound least is the best one
to compare with (Lagrangian relaxation); any other gives a correct bound, too.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unicron_elastic.planning.model.tasks import Ints

COST_MAX = 2**60  # of all nodes: what is impossible stays worse than anything else, and all within 64 bits
ROUNDS = 60  # of the search; it takes 5 to 15, and any price is good enough


@dataclass(frozen=True, slots=True)
class Choice:
    """What each row of a block takes at a price: ``counts`` of nodes and their ``values``, both of shape (tasks,)."""

    price: int
    counts: Ints
    values: Ints
    used: int
    value: int


class Block:
    """The keys of several tasks at one n', and what is known of them whatever a problem changes.

    ``keys``: shape (tasks, at most nodes + 1).
    """

    def __init__(self, names: Sequence[str], keys: Ints, nodes: int) -> None:
        self.names = tuple(names)
        self.keys = keys
        self.width = keys.shape[1]
        self.every = np.arange(len(keys))
        self.nodes = np.arange(self.width)
        self.price_max = COST_MAX // max(nodes, 1)
        self.highest = np.maximum.accumulate(keys, axis=1)  # the best key with at most so many nodes
        self.choices = [self._choice(price) for price in (0, self.price_max)]

    def between(self, price: int, low: Choice, high: Choice) -> Choice:
        """What is taken at a price between two others. A row that takes the same at both takes it here, too."""
        moving = np.flatnonzero(low.counts != high.counts)
        if 2 * len(moving) > len(self.every):
            found = self._choice(price)
        else:
            counts, values = high.counts.copy(), high.values.copy()
            counts[moving] = (self.keys[moving] - price * self.nodes).argmax(axis=1)
            values[moving] = self.keys[moving, counts[moving]]
            found = Choice(price, counts, values, int(counts.sum()), int(values.sum()))
        insort(self.choices, found, key=lambda choice: choice.price)
        return found

    def _choice(self, price: int) -> Choice:
        counts = (self.keys - price * self.nodes).argmax(axis=1)
        values = self.keys[self.every, counts]
        return Choice(price, counts, values, int(counts.sum()), int(values.sum()))


@dataclass(frozen=True, slots=True)
class AlteredBlock:
    """A block without some of its rows and with other ones: what an event changes. ``nodes``: n'."""

    block: Block
    nodes: int
    without: tuple[int, ...] = ()
    extra: tuple[tuple[str, Ints], ...] = ()


@dataclass(frozen=True, slots=True)
class _Total:
    """A choice of the block, and what it comes to for the problem."""

    choice: Choice
    used: int
    value: int


def choice_at(row: Ints, price: int) -> int:
    """What one task takes: the fewest nodes among the best."""
    return int((row - price * np.arange(len(row))).argmax())


def priced(problem: AlteredBlock) -> Choice:
    """The choice of the block at the lowest price known at which the problem does not use more nodes than it has.

    Kelley's method: the bound is convex and piecewise linear in the price, so the next price is where the tangents at
    the two ends of the bracket meet. Where pins leave hardly a node, the largest price may not be enough: what is
    returned then uses too many, and serves as well.
    """
    block = problem.block
    low, high = _bracket(problem)
    if low.used <= problem.nodes:
        return low.choice
    for _ in range(ROUNDS):
        if low.used <= high.used:
            break
        price = min(-((high.value - low.value) // (low.used - high.used)), block.price_max)
        if not low.choice.price < price < high.choice.price:
            break
        middle = _total(problem, block.between(price, low.choice, high.choice))
        if middle.used > problem.nodes:
            low = middle
        else:
            high = middle
    return high.choice


def _bracket(problem: AlteredBlock) -> tuple[_Total, _Total]:
    """The two known prices between which the problem goes from too many nodes to enough."""
    choices = problem.block.choices
    first, last = 0, len(choices) - 1
    low = _total(problem, choices[first])
    if low.used <= problem.nodes:
        return low, low
    high = _total(problem, choices[last])
    while last - first > 1:
        place = (first + last) // 2
        middle = _total(problem, choices[place])
        if middle.used > problem.nodes:
            first, low = place, middle
        else:
            last, high = place, middle
    return low, high


def _total(problem: AlteredBlock, choice: Choice) -> _Total:
    used, value = choice.used, choice.value
    for place in problem.without:
        used -= int(choice.counts[place])
        value -= int(choice.values[place])
    for _, row in problem.extra:
        count = choice_at(row, choice.price)
        used += count
        value += int(row[count])
    return _Total(choice, used, value)
