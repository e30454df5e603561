"""Who begins the job's collectives late: in synchronous training that alone tells whom all the others wait for.

All ranks take the same time for a step, and one that waits for its device uses no more CPU than the rest. But who is
slow comes late to the first collective of each step. What is late is compared with what was usual before: a rank that
logs always is, a little.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

RECENT_STEPS = 8
USUAL_STEPS_MIN = 4
_MARGIN = 1.5  # of the steps that are called recent: those before may be slow already


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """When one rank began its latest collectives: number ``first``, and those after it, in seconds of one clock.

    ``ops`` are their operations, "all_reduce"; none if they are not known.
    """

    first: int
    at_s: tuple[float, ...]
    ops: tuple[str, ...] = ()

    @property
    def end(self) -> int:
        """One more than the number of the latest."""
        return self.first + len(self.at_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beats:
    """When one rank has ended its latest steps: number ``first`` and those after it, by the clock of its arrivals."""

    first: int
    at_s: tuple[float, ...]


def later_s(arrivals: Mapping[int, Arrivals], per_step: float, slow_steps: float) -> dict[int, float]:
    """Return by how much each rank begins its collectives later since the steps became slow, in seconds a step.

    ``per_step`` collectives make a step, and the last ``slow_steps`` were slow. Empty if too little is known.
    """
    late = _late_s(arrivals, max(1, round(per_step)))
    recent = max(2, min(RECENT_STEPS, int(slow_steps)))
    margin = max(recent, int(_MARGIN * slow_steps) + 1)
    if any(len(steps) < margin + USUAL_STEPS_MIN for steps in late.values()):
        return {}
    return {rank: median(steps[-recent:]) - median(steps[:-margin]) for rank, steps in late.items()}


def _late_s(arrivals: Mapping[int, Arrivals], per_step: int) -> dict[int, list[float]]:
    """For each rank how late it was in each step that all know of: in that of its collectives where it was latest."""
    begin = max((each.first for each in arrivals.values()), default=0)
    end = min((each.end for each in arrivals.values()), default=0)
    steps = max(0, end - begin) // per_step
    begin = end - steps * per_step
    shared = {rank: each.at_s[begin - each.first : end - each.first] for rank, each in arrivals.items()}
    firsts = [min(each) for each in zip(*shared.values(), strict=True)]
    late = {rank: [at - first for at, first in zip(at_s, firsts, strict=True)] for rank, at_s in shared.items()}
    return {rank: [max(of[i : i + per_step]) for i in range(0, len(of), per_step)] for rank, of in late.items()}
