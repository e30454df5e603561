"""Sums over time, of what was made and of what was simulated, and who stands for whom. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from unicron_elastic.simulation.model.study_result import CurvePoint

__all__ = ["integral", "seated", "steps_between"]


def steps_between(moments: Sequence[float], begin: float, end: float) -> float:
    """Steps from ``begin`` to ``end``; one that is made across an edge counts by the part of its time within."""
    total = 0.0
    for one, other in pairwise(moments):
        total += max(0.0, min(other, end) - max(one, begin)) / (other - one) if other > one else begin <= one < end
    return total


def integral(curve: Sequence[CurvePoint], begin_s: float, end_s: float) -> float:
    """Weighted FLOP from ``begin_s`` to ``end_s``."""
    ends = [*(point.at_s for point in curve[1:]), float("inf")]
    return sum(
        point.waf_flops * max(0.0, min(end, end_s) - max(point.at_s, begin_s))
        for point, end in zip(curve, ends, strict=True)
    )


def seated(places: Sequence[str], seats: Mapping[str, str]) -> list[str]:
    """Hosts in such an order that each works for the job for which the node of its number does in the simulation.

    Raises ``ValueError`` if the jobs have other numbers of nodes there.
    """
    if sorted(places) != sorted(seats.values()):
        raise ValueError(f"the simulated jobs begin with {sorted(places)}, the live ones with {sorted(seats.values())}")
    left = {job: sorted(host for host in seats if seats[host] == job) for job in set(places)}
    return [left[job].pop(0) for job in places]
