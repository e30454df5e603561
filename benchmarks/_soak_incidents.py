"""What a soak's faults came to: which incident belongs to which fault, how long a job stood, what stayed open. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from _soak_chaos import Struck

from unicron_elastic.base.incident import Incident

__all__ = ["Told", "open_incidents", "outcomes", "unexplained"]

AFTER_S = 120.0  # of a fault: what is noticed later is no answer to it
ENDING = ("lose", "agent", "coordinator")  # faults that end the launcher of a host, and with it what it had open
ENDS_WITHIN_S = 180.0  # of an incident: such a fault, when nobody was left to close it
CLOSED_ACTIONS = ("observe",)
EXPLAINS_S = 60.0  # so long a fault may have consequences
MOVES = ("lose", "agent", "coordinator", "cut")  # faults after which nodes go from job to job


@dataclass(frozen=True, slots=True)
class Told:
    """A fault and its answer, in seconds: until noticed, None if no ledger tells; the longest standstill of its job."""

    struck: Struck
    noticed_s: float | None
    stood_s: float | None
    statuses: tuple[str, ...]


def outcomes(
    struck: Sequence[Struck],
    incidents: Iterable[Incident],
    made: Mapping[str, Sequence[float]],
    monotonic_at: float,
    end: float,
) -> list[Told]:
    """Each fault, with what was told of its job before the next fault that hit the same job.

    ``made``: when each job's steps were made, Unix seconds in order. ``monotonic_at``: Unix seconds at CLOCK_MONOTONIC
    0. ``end`` of the run.
    """
    by_job: dict[str, list[tuple[float, str]]] = {}
    for incident in incidents:
        if incident.noticed_at is not None:
            by_job.setdefault(incident.run_id, []).append((monotonic_at + incident.noticed_at, incident.status))
    found = []
    for place, each in enumerate(struck):
        later = (other.at for other in struck[place + 1 :] if other.job == each.job or other.host == each.host)
        until = min(next(later, end), each.at + AFTER_S)
        told = sorted((at, status) for at, status in by_job.get(each.job, ()) if each.at - 0.05 <= at < until)
        found.append(
            Told(
                struck=each,
                noticed_s=max(0.0, told[0][0] - each.at) if told else None,
                stood_s=_longest(made.get(each.job, ()), each.at, until),
                statuses=tuple(dict.fromkeys(status for _, status in told)),
            )
        )
    return found


def _longest(made: Sequence[float], begin: float, end: float) -> float | None:
    """The longest time without a new step, of those that reach into this time; None without any step in it."""
    first, last = max(0, bisect_left(made, begin) - 1), bisect_right(made, end)
    between = [after - before for before, after in zip(made[first:last], made[first + 1 : last + 1], strict=False)]
    return max(between, default=None)


def open_incidents(
    incidents: Iterable[Incident], struck: Sequence[Struck], monotonic_at: float, last_at: float
) -> tuple[list[Incident], int]:
    """Those that nobody closed, and how many stayed open because their launcher was ended by a later fault.

    ``last_at``: Unix seconds of the end of the quiet time; what was noticed in its last moments may be open.
    """
    stays, cut_short = [], 0
    for incident in incidents:
        if incident.is_closed:
            continue
        if incident.action in CLOSED_ACTIONS or incident.noticed_at is None:
            continue
        at = monotonic_at + incident.noticed_at
        if at > last_at:
            continue
        ended = any(
            each.kind in ENDING and each.host == incident.host and at - 1.0 <= each.at < at + ENDS_WITHIN_S
            for each in struck
        )
        if ended:
            cut_short += 1
        else:
            stays.append(incident)
    return stays, cut_short


def unexplained(incidents: Iterable[Incident], struck: Sequence[Struck], monotonic_at: float) -> list[Incident]:
    """Those that no fault of the same job or host came before, nor one that moves nodes: false alarms, say."""
    found = []
    for incident in incidents:
        at = monotonic_at + (incident.noticed_at or 0.0)
        if not any(
            at - EXPLAINS_S <= each.at <= at + 0.1
            and (each.kind in MOVES or each.job == incident.run_id or each.host == incident.host)
            for each in struck
        ):
            found.append(incident)
    return found
