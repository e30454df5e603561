"""Means over seeds with their 95 % confidence intervals (Student's t). Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

# The 97.5th percentile of Student's t for 1, 2, ... 30 degrees of freedom, then for as many as stand with it.
_T = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)
_T_LARGE = ((40, 2.0211), (60, 2.0003), (120, 1.9799), (1000, 1.9623))


class Interval(NamedTuple):
    """A mean, and the 95 % confidence interval of it; of one value it is not known (nan)."""

    mean: float
    low: float
    high: float

    @property
    def half(self) -> float:
        """Half of the interval's width."""
        return (self.high - self.low) / 2


def interval(values: Sequence[float]) -> Interval:
    """The mean of ``values``, one for each seed. Raises ``ValueError`` if there are none."""
    if not values:
        raise ValueError("there are no values: at least one seed is needed")
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Interval(mean, math.nan, math.nan)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    half = _quantile(len(values) - 1) * math.sqrt(variance / len(values))
    return Interval(mean, mean - half, mean + half)


def _quantile(freedom: int) -> float:
    """Take the next smaller number of degrees of freedom in the table: intervals are rather too wide."""
    if freedom <= len(_T):
        return _T[freedom - 1]
    return next((t for least, t in reversed(_T_LARGE) if freedom >= least), _T[-1])
