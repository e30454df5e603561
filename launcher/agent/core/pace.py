"""How fast a job steps on the nodes that it has, and for how long it stood still when they changed; decided purely.

What is looked at are the ends of the latest steps of one worker of this node: all ranks step together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Literal

Kind = Literal["grow", "shrink", "replace"]

STEPS_MIN = 5  # before anything is said
STEPS_KEPT = 512
STEPS_NOW = 15  # of which the present pace is the median
STOOD_KEPT = 5  # transitions that were not told yet
NEWS_S = 2.0  # so often news are told, ...
STILL_S = 10.0  # ... and so often that nothing has changed
CHANGE = 0.01  # of the seconds per step; less is no news
OVERDUE = 3.0  # times the usual step: then nobody knows whether the job still trains, ...
OVERDUE_MIN_S = 5.0  # ... which may be an evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceObservation:
    """What an agent sees of its job at one moment. Times are monotonic seconds but for ``at_unix_s``.

    ``nodes`` are those that train together. ``is_settled``: this node has made a step with them, or its workers began
    anew with them. ``ends`` of steps, ``first`` being the number of the first of them, of the worker ``pid``.
    ``unsaved_s``: how long it has trained since the last save that outlives the workers, or since they began.
    ``is_first``: this node is the one that reports.
    """

    at: float
    at_unix_s: float
    nodes: frozenset[str]
    is_settled: bool = True
    pid: int = 0
    first: int = 1
    ends: tuple[float, ...] = ()
    is_first: bool = True
    is_global_batch_fixed: bool = False
    flops_per_step: float | None = None
    unsaved_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChange:
    """The nodes have changed, and the job has not settled on the new ones yet."""

    before: frozenset[str]
    usual_s: float  # a step, before
    longest_s: float = 0.0  # between two steps since
    has_stepped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What is known so far. ``stood``: transitions that were not told yet, with the seconds without a step."""

    nodes: frozenset[str] = frozenset()
    since_unix_s: float = 0.0
    steps_s: tuple[float, ...] = ()  # on these nodes
    change: NodeChange | None = None
    stood: tuple[tuple[Kind, float], ...] = ()
    pid: int = 0
    last: int = 0  # the number of the latest step
    last_end: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceFigures:
    """What is to be told."""

    at: float
    at_unix_s: float
    nodes: int
    since_unix_s: float
    step_s: float
    steps: int
    step_now_s: float
    is_global_batch_fixed: bool
    flops_per_step: float | None
    unsaved_s: float
    stood: tuple[tuple[Kind, float], ...]


def after(pace: Pace, seen: PaceObservation) -> Pace:
    """What is known after another look."""
    if not seen.nodes:
        return pace
    if seen.nodes != pace.nodes:
        if not seen.is_settled:  # its latest steps were made with the nodes before
            pace = _with_steps(pace, seen)
        pace = _with_nodes(pace, seen)
    return _settled(_with_steps(pace, seen), seen)


def reported(pace: Pace, seen: PaceObservation, told: PaceFigures | None) -> PaceFigures | None:
    """What there is to tell, if ``told`` was told last; None: nothing."""
    if len(pace.steps_s) < STEPS_MIN or pace.last_end is None or pace.change is not None:
        return None
    report = PaceFigures(
        at=seen.at,
        at_unix_s=seen.at_unix_s,
        nodes=len(pace.nodes),
        since_unix_s=pace.since_unix_s,
        step_s=median(pace.steps_s),
        steps=len(pace.steps_s),
        step_now_s=median(pace.steps_s[-STEPS_NOW:]),
        is_global_batch_fixed=seen.is_global_batch_fixed,
        flops_per_step=seen.flops_per_step,
        unsaved_s=seen.unsaved_s,
        stood=pace.stood,
    )
    is_overdue = seen.at - pace.last_end > max(OVERDUE_MIN_S, OVERDUE * report.step_now_s)
    return report if _is_news(report, told) and not is_overdue else None


def _is_news(report: PaceFigures, told: PaceFigures | None) -> bool:
    if told is None:
        return True
    passed_s = report.at - told.at
    has_changed = (
        bool(report.stood)
        or (report.nodes, report.since_unix_s) != (told.nodes, told.since_unix_s)
        or (report.flops_per_step, report.is_global_batch_fixed) != (told.flops_per_step, told.is_global_batch_fixed)
        or _differs(report.step_s, told.step_s)
        or _differs(report.step_now_s, told.step_now_s)
    )
    return passed_s >= (NEWS_S if has_changed else STILL_S)


def _differs(one_s: float, other_s: float) -> bool:
    return abs(one_s - other_s) > CHANGE * other_s


def _with_nodes(pace: Pace, seen: PaceObservation) -> Pace:
    """The job goes on with other nodes. Nobody stood still if it had not begun."""
    changed = replace(pace, nodes=seen.nodes, since_unix_s=seen.at_unix_s, steps_s=())
    if pace.last_end is None:
        return changed
    if pace.change is not None:  # it did not come to a step on those between
        return replace(changed, change=replace(pace.change, has_stepped=False))
    usual_s = median(pace.steps_s) if pace.steps_s else 0.0
    return replace(changed, change=NodeChange(before=pace.nodes, usual_s=usual_s))


def _with_steps(pace: Pace, seen: PaceObservation) -> Pace:
    """Takes over the steps that have ended since the last look."""
    last_end = pace.last_end
    fresh = [(number, end) for number, end in enumerate(seen.ends, seen.first) if last_end is None or end > last_end]
    if not fresh:
        return pace
    ends = [end for _, end in fresh]
    times_s = [later - end for end, later in pairwise(ends)]
    is_same = seen.pid == pace.pid
    follows = last_end is not None and fresh[0][0] == pace.last + 1
    if last_end is not None and ((is_same and follows) or (not is_same and pace.change is not None)):
        times_s.insert(0, ends[0] - last_end)
    pace = replace(pace, pid=seen.pid, last=fresh[-1][0], last_end=ends[-1])
    if pace.change is None:
        return replace(pace, steps_s=(*pace.steps_s, *times_s)[-STEPS_KEPT:])
    longest_s = max([pace.change.longest_s, *times_s])
    return replace(pace, change=replace(pace.change, longest_s=longest_s, has_stepped=True))


def _settled(pace: Pace, seen: PaceObservation) -> Pace:
    """The job has made a step with the nodes that it has now: the pause before is over."""
    change = pace.change
    if change is None or not (seen.is_settled and change.has_stepped):
        return pace
    pace = replace(pace, change=None, since_unix_s=seen.at_unix_s)
    if change.before == pace.nodes:
        return pace
    stood_s = max(0.0, change.longest_s - change.usual_s)
    return replace(pace, stood=(*pace.stood, (_kind(change.before, pace.nodes), stood_s))[-STOOD_KEPT:])


def _kind(before: frozenset[str], nodes: frozenset[str]) -> Kind:
    if len(nodes) == len(before):
        return "replace"
    return "grow" if len(nodes) > len(before) else "shrink"
