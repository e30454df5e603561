"""The exact optimum by way of what solutions lose against the bound at a price; see ``prices``.

At a price p each option k of a task loses r(k) = max over k' of (key(k') - p * k') - (key(k) - p * k), at least 0, and
each node that is not used loses p. The sum of keys of a solution is the bound minus all that it loses: the best one
loses least. So with a budget of loss, options and partial solutions that exceed it are dropped, and what is found
within the budget is the optimum: everything that loses as little was looked at. If nothing is found, the budget grows.
In practice nearly every task has one option left, and a handful of partial solutions are looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from unicron_elastic.planning.allocate.prices import AlteredBlock, Choice, choice_at, priced
from unicron_elastic.planning.model.tasks import Ints

FAR = 2**62
GROWTH = 16  # of the budget, when nothing was found within it
PAIRS = 2**12  # so many combinations are made at once; with more, one option after the other is faster
BUDGET_MAX = 2**61  # an option never loses more, and what is impossible always does: see waf.IMPOSSIBLE


class TaskOptions(NamedTuple):
    """What is left of a task within the budget: options that take ``shifts`` more nodes than its best one and lose so
    much, by number of nodes. ``first`` is the number at the best one.
    """

    name: str
    first: int
    shifts: Ints
    losses: Ints


class States(NamedTuple):
    """Partial solutions: for each sum of shifts, ascending, the least that is lost."""

    shifts: Ints
    losses: Ints


class Target(NamedTuple):
    """What the sum of shifts should be, for all nodes to be used; fewer lose ``price`` each, more are impossible."""

    shift: int
    price: int
    budget: int


def optimum(problem: AlteredBlock) -> dict[str, int]:
    """How many nodes each task gets: the largest sum of keys. Of equal ones as ``plain_optimum``, in order of names.

    Raises ``ValueError`` if there is no solution.
    """
    choice = priced(problem)
    found = _Losses(problem, choice)
    ceiling = found.solution_loss()
    budget = min(choice.price // GROWTH + problem.nodes, ceiling)
    while budget <= BUDGET_MAX:
        solved = _within(found, budget)
        if solved is not None:
            return solved
        budget = min(GROWTH * (budget + 1), max(ceiling, budget + 1))
    raise ValueError(f"the tasks cannot share {problem.nodes} nodes: some must have more than there are")


class _Losses:
    """What each option of each task loses at a price."""

    def __init__(self, problem: AlteredBlock, choice: Choice) -> None:
        block, price = problem.block, choice.price
        self.problem, self.choice = problem, choice
        best = choice.values - price * choice.counts
        self._block = (best[:, None] + price * block.nodes) - block.keys
        self._block[list(problem.without)] = FAR
        self._extra = []
        self.base = {name: int(count) for name, count in zip(block.names, choice.counts, strict=True)}
        for place in problem.without:
            del self.base[block.names[place]]
        for name, row in problem.extra:
            count = choice_at(row, price)
            self.base[name] = count
            self._extra.append((name, int(row[count]) - price * count + price * np.arange(len(row)) - row))
        self.left = problem.nodes - sum(self.base.values())

    def rows(self, budget: int) -> list[TaskOptions]:
        """The tasks with more than one option within the budget, in order of their names."""
        names, counts = self.problem.block.names, self.choice.counts
        places, options = (self._block <= budget).nonzero()
        losses = self._block[places, options]
        ends = places.searchsorted(np.arange(len(names) + 1)).tolist()
        found = []
        for place, (start, end) in enumerate(pairwise(ends)):
            if end - start > 1:
                first = int(counts[place])
                found.append(TaskOptions(names[place], first, options[start:end] - first, losses[start:end]))
        for name, row in self._extra:
            (options,) = np.nonzero(row <= budget)
            if len(options) > 1:
                found.append(TaskOptions(name, self.base[name], options - self.base[name], row[options]))
        return sorted(found, key=lambda row: row.name)

    def solution_loss(self) -> int:
        """What a solution loses that is easily found: no budget need be larger. ``BUDGET_MAX`` if none is found.

        While there are nodes left, the task that gains most from them takes what it can use.
        """
        if self.left < 0:
            return BUDGET_MAX
        block, price = self.problem.block, self.choice.price
        left, loss = self.left, price * self.left
        counts, values = self.choice.counts.copy(), self.choice.values.copy()
        while left > 0 and len(counts):
            gains = block.highest[block.every, np.minimum(counts + left, block.width - 1)] - values
            gains[list(self.problem.without)] = 0
            place = int(gains.argmax())
            if gains[place] <= 0:
                break
            count = int(np.argmax(block.keys[place] == values[place] + gains[place]))
            left -= count - int(counts[place])
            loss -= int(gains[place])
            values[place] += gains[place]
            counts[place] = count
        for name, lost in self._extra:
            count = self.base[name]
            ahead = lost[count : count + self.left + 1]
            alone = int((ahead + price * (self.left - np.arange(len(ahead)))).min())
            loss = min(loss, alone)
        return loss


def _within(found: _Losses, budget: int) -> dict[str, int] | None:
    """The best solution that loses at most ``budget``; None if there is none."""
    rows = found.rows(budget)
    target = Target(found.left, found.choice.price, budget)
    levels = _levels(rows, target)
    if levels is None:
        return None
    final = levels[0]
    unused = target.shift - final.shifts
    lost = np.where(unused >= 0, final.losses + target.price * unused, FAR)
    least = int(lost.min())
    if least > budget:
        return None
    ends = final.shifts[lost == least]
    counts = dict(found.base)
    for row, whole, rest in zip(rows, levels, levels[1:], strict=False):
        shift, ends = _last(row, whole, rest, ends)
        counts[row.name] = row.first + shift
    return counts


def _levels(rows: Sequence[TaskOptions], target: Target) -> list[States] | None:
    """The states of all rows, of all but the first, and so on to none; None if none is left within the budget."""
    levels = [States(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))]
    rates = _rates(rows, target)
    for row, (up, down) in zip(reversed(rows), reversed(rates), strict=True):
        merged = _merged(levels[-1], row, target.budget)
        missing = target.shift - merged.shifts
        # The rest of the way loses at least the best rate per node of the rows that are to come. To divide what is
        # left of the budget cannot leave 64 bits, as a product could.
        afforded = (target.budget - merged.losses) // np.maximum(np.abs(missing), 1)
        is_kept = (missing == 0) | (np.where(missing > 0, up, down) <= afforded)
        if not is_kept.any():
            return None
        levels.append(States(merged.shifts[is_kept], merged.losses[is_kept]))
    return levels[::-1]


def _rates(rows: Sequence[TaskOptions], target: Target) -> list[tuple[int, int]]:
    """For each row: what those before it lose at least for each node that they take more, or fewer."""
    up, down = target.price, target.budget + 1  # taking fewer is impossible at first
    found = []
    for row in rows:
        found.append((up, down))
        rates = row.losses // np.maximum(np.abs(row.shifts), 1)
        best = int(row.shifts.searchsorted(0))
        up = min(up, int(rates[best + 1 :].min(initial=FAR)))
        down = min(down, int(rates[:best].min(initial=FAR)))
    return found


def _merged(states: States, row: TaskOptions, budget: int) -> States:
    """All combinations of a state and an option within the budget, the best for each sum of shifts."""
    is_kept = row.losses <= budget - int(states.losses.min())
    shifts, losses = row.shifts[is_kept], row.losses[is_kept]
    if len(states.shifts) == 1:
        return States(shifts + states.shifts, losses + states.losses)
    if len(states.shifts) * len(shifts) <= PAIRS:
        sums = np.add.outer(states.losses, losses).ravel()
        places = np.add.outer(states.shifts, shifts).ravel()
        is_kept = sums <= budget
        return _least(places[is_kept], sums[is_kept])
    few, many = sorted((states, States(shifts, losses)), key=lambda side: len(side.shifts))
    return _convolved(few, many, budget)


def _convolved(few: States, many: States, budget: int) -> States:
    """The same for many combinations: one side after the other's image, moved and raised."""
    start = int(many.shifts[0])
    image = np.full(int(many.shifts[-1]) - start + 1, FAR)
    image[many.shifts - start] = many.losses
    first = int(few.shifts[0])
    found = np.full(len(image) + int(few.shifts[-1]) - first, FAR)
    raised = np.empty_like(image)
    for shift, loss in zip((few.shifts - first).tolist(), few.losses.tolist(), strict=True):
        part = found[shift : shift + len(image)]
        np.minimum(part, np.add(image, loss, out=raised), out=part)
    (places,) = np.nonzero(found <= budget)
    return States(places + (first + start), found[places])


def _least(shifts: Ints, losses: Ints) -> States:
    """The least loss for each shift, ascending."""
    first = int(shifts.min())
    found = np.full(int(shifts.max()) - first + 1, FAR)
    np.minimum.at(found, shifts - first, losses)
    (places,) = np.nonzero(found < FAR)
    return States(places + first, found[places])


def _last(row: TaskOptions, whole: States, rest: States, ends: Ints) -> tuple[int, Ints]:
    """The largest shift of a row with which one of ``ends`` is reached, and what is left of these ends for the rest."""
    wanted = ends[:, None] - row.shifts
    places = np.minimum(np.searchsorted(rest.shifts, wanted), len(rest.shifts) - 1)
    lost = whole.losses[np.searchsorted(whole.shifts, ends)]
    is_way = (rest.shifts[places] == wanted) & (rest.losses[places] + row.losses == lost[:, None])
    option = int(np.flatnonzero(is_way.any(axis=0))[-1])
    return int(row.shifts[option]), wanted[is_way[:, option], option]
