"""Does a quantity grow? Robust slopes of samples, and bounds. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

__all__ = ["BOUNDS", "Bound", "Series", "Trend", "climb", "second_half", "slopes", "trend"]

HOUR_S = 3600.0
WARM_UP_S = 120.0  # of a process's life: it imports, meets, and fills its pools
LEAST_LIFE_S = 180.0  # after that, for a slope that says something
LEAST_CLIMB_S, STARTED_S = 3600.0, 600.0  # of the oldest process: what it takes in ten minutes stays
MOST_POINTS = 120  # of one life: pairs are counted in squares


@dataclass(frozen=True, slots=True)
class Series:
    """Values of one quantity of one thing, by seconds."""

    times_s: tuple[float, ...]
    values: tuple[float, ...]

    @property
    def span_s(self) -> float:
        return self.times_s[-1] - self.times_s[0] if self.times_s else 0.0


@dataclass(frozen=True, slots=True)
class Bound:
    """How much a quantity may grow in an hour: ``least``, or ``share`` of what is usual, whichever is more."""

    least: float
    share: float
    reason: str

    def of(self, usual: float) -> float:
        return max(self.least, self.share * abs(usual))


@dataclass(frozen=True, slots=True)
class Trend:
    """Of a quantity: ``lives`` it was seen in, hours of all of them together, what is usual, growth in an hour."""

    lives: int
    hours: float
    usual: float
    first: float
    last: float
    growth: float | None  # None: no life is long enough
    bound: float

    @property
    def is_leak(self) -> bool:
        return self.growth is not None and self.growth > self.bound


_FAULTS = "an hour of the soak has a hundred faults: a leak of one in twenty of them is seen"
BOUNDS: Mapping[str, Bound] = {
    "memory, MiB": Bound(4.0, 0.04, "what an allocator keeps; 40 KiB a fault would be 4 MiB"),
    "descriptors": Bound(4.0, 0.0, _FAULTS),
    "threads": Bound(4.0, 0.0, _FAULTS),
    "number": Bound(4.0, 0.0, _FAULTS),
    "bytes": Bound(1024.0, 0.05, "1 KiB an hour, or what comes and goes"),
    "database, MiB": Bound(1.0, 0.05, "etcd keeps ten minutes of history, then its size stands"),
}


def second_half(series: Series) -> Series:
    """Of its time."""
    if not series.times_s:
        return series
    middle = (series.times_s[0] + series.times_s[-1]) / 2
    return since(series, middle)


def since(series: Series, begin_s: float) -> Series:
    """What is known from then on."""
    kept = [(at, value) for at, value in zip(series.times_s, series.values, strict=True) if at >= begin_s]
    return Series(tuple(at for at, _ in kept), tuple(value for _, value in kept))


def warm(series: Series) -> Series:
    """Without the first seconds of a life; the second half alone of one that is long."""
    cut = since(series, series.times_s[0] + WARM_UP_S)
    half = second_half(series)
    return half if len(half.times_s) < len(cut.times_s) and half.span_s >= 2 * LEAST_LIFE_S else cut


def slopes(series: Series) -> list[float]:
    """Per hour, of all pairs of points: their median is Theil and Sen's estimate, which outliers do not move."""
    every = max(1, -(-len(series.times_s) // MOST_POINTS))
    points = list(zip(series.times_s[::every], series.values[::every], strict=True))
    return [HOUR_S * (b - a) / (t - s) for (s, a), (t, b) in combinations(points, 2) if t > s]


def trend(lives: Iterable[Series], bound: Bound) -> Trend:
    """Of one quantity in all processes of a role, say: slopes are taken within a life, and their median over all."""
    known = [each for each in lives if each.times_s]
    warmed = [cut for each in known if (cut := warm(each)).span_s >= LEAST_LIFE_S]
    pairs = [slope for cut in warmed for slope in slopes(cut)]
    values = [value for each in warmed or known for value in each.values]
    usual = median(values) if values else 0.0
    longest = max(warmed or known, key=lambda each: each.span_s, default=Series((), ()))
    return Trend(
        lives=len(known),
        hours=sum(each.span_s for each in known) / HOUR_S,
        usual=usual,
        first=_edge(longest.values[:5]),
        last=_edge(longest.values[-5:]),
        growth=median(pairs) if pairs else None,
        bound=bound.of(usual),
    )


def climb(lives: Iterable[Series]) -> float | None:
    """An hour's growth of the longest life, all of it but its first minutes; None if it is too short.

    For quantities that stand still or go in stairs: of a stair that takes half an hour a step, most short lives see
    none, and neither does ``trend``.
    """
    longest = max(lives, key=lambda each: each.span_s, default=Series((), ()))
    if longest.span_s < LEAST_CLIMB_S:
        return None
    return median(slopes(since(longest, longest.times_s[0] + STARTED_S)))


def _edge(values: Sequence[float]) -> float:
    return median(values) if values else 0.0
