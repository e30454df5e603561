"""FLOP/s on numbers of units on which a job never ran, from those that were measured and nothing else.

A step is taken to be a part that all units share and one that more of them do not shorten::

    seconds per step = a + b / x        FLOP/s = x / (a x + b), times a constant

with the step's samples as they are on one number of units. If each worker has a batch of its own, the same formula
says that a step takes ``b + a x``: it gets longer with every unit. ``a`` and ``b`` are 0 or more, so the FLOP/s of a
unit never grow with their number. Where the FLOPs or the batch of a job are known, ``throughput`` knows more.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

# The part that units do not share has to explain a fifth of itself. Measurements of 7 and of 8 units that differ by
# noise would give any share otherwise, and those of 4 and of 8 still say what it is.
SHARE_WEIGHT = 0.2
CLEARLY = 1e-9  # less is rounding, and the simpler line is taken


class _Line(NamedTuple):
    """Seconds per unit of work and unit, ``a x + b``."""

    a: float
    b: float

    def at(self, units: int) -> float:
        return self.a * units + self.b


def filled(rates_flops: Mapping[int, float], x_max: int) -> tuple[float, ...]:
    """FLOP/s by number of units from 0 to ``x_max``, by those that were measured: positive, by units from 1 on.

    What was measured stays as it is, and around it the line is moved to meet it. Nothing is above what the nearest
    smaller measured number promises if one more unit brings as much as each of those. 0.0 everywhere if nothing was
    measured.
    """
    points = sorted(rates_flops.items())
    if not points:
        return (0.0,) * (x_max + 1)
    line = _fitted([(units, units / rate) for units, rate in points])
    units = [each for each, _ in points]
    misses = [math.log(rate * line.at(each) / each) for each, rate in points]
    return (0.0, *(_rate(points, line, units, misses, x) for x in range(1, x_max + 1)))


def _rate(
    points: Sequence[tuple[int, float]], line: _Line, units: Sequence[int], misses: Sequence[float], x: int
) -> float:
    place = bisect_left(units, x)
    if place < len(units) and units[place] == x:
        return points[place][1]
    found = x / line.at(x) * math.exp(_between(units, misses, place, x))
    if place == 0:
        return found
    below, rate = points[place - 1]
    return min(found, rate * x / below)


def _between(units: Sequence[int], misses: Sequence[float], place: int, x: int) -> float:
    """By how much the line misses at ``x``: what it misses at the measured numbers around it, by ratio."""
    if place == 0:
        return misses[0]
    if place == len(units):
        return misses[-1]
    share = math.log(x / units[place - 1]) / math.log(units[place] / units[place - 1])
    return misses[place - 1] + share * (misses[place] - misses[place - 1])


def _fitted(points: Sequence[tuple[int, float]]) -> _Line:
    """The line through two points, or with one part alone through one, of which all are least far away in relation.

    Least absolute residuals: one that is far off pulls no harder than one that is a little off.
    """
    candidates = [_Line(0.0, y) for _, y in points]
    for (x, y), (other_x, other_y) in combinations(points, 2):
        a = (other_y - y) / (other_x - x)
        candidates.append(_Line(a, y - a * x))
    candidates += [_Line(y / x, 0.0) for x, y in points]
    best = candidates[0]
    least = _loss(best, points)
    for each in candidates[1:]:
        if each.a >= 0.0 and each.b >= 0.0 and (loss := _loss(each, points)) < least - CLEARLY:
            best, least = each, loss
    return best


def _loss(line: _Line, points: Sequence[tuple[int, float]]) -> float:
    most = points[-1][0]
    share = line.a * most / line.at(most)
    return sum(abs(line.at(x) / y - 1.0) for x, y in points) + SHARE_WEIGHT * share
