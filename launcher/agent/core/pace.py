"""How fast a job steps on the nodes that it has, and for how long it stood still when they changed; decided purely.

What is looked at are the ends of the latest steps of one worker of this node: all ranks step together.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any, Literal

from unicron_elastic.compat.agent import WorkerGroup
from unicron_elastic.compat.errors import SignalException
from unicron_elastic.launcher.agent.process.workers import WorkerProcess
from unicron_elastic.launcher.common.loop import Loop
from unicron_elastic.recovery.state import JobState
from unicron_elastic.rendezvous.job.job_rendezvous import JobRendezvous

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


# Tells those who divide the cluster between jobs how fast this one trains on its nodes.
#
# Only of a job that they planned, and by the agent of its first node. The pulse pages are looked at a few times a
# second in the event loop; the store, which may not answer for seconds, is written to from a thread of its own.


PLANNED_JOB = "UNICRON_PLANNED_JOB"  # the job's name, in the environment of its agents
LOOK_S = 0.5  # the page of a worker holds the ends of its latest 126 steps
CLOSE_S = 0.2  # so long the end of the agent waits for what is being written

logger = logging.getLogger(__name__)

_Merge = Callable[[bytes | None], bytes]


class PaceReport:
    """Of one agent. Does nothing unless the job was planned and its rendezvous can keep what is told."""

    def __init__(self, loop: Loop, handler: JobRendezvous) -> None:
        """``handler`` is the job's rendezvous."""
        self._loop = loop
        job = os.environ.get(PLANNED_JOB, "")
        self._writer = _Writer(partial(handler.keep_measured, job)) if job else None
        self._see: Callable[[], PaceObservation] | None = None
        self._pace = Pace()
        self._told: PaceFigures | None = None
        self._starts = 0  # timers of earlier ones are not for this one

    def start(self, see: Callable[[], PaceObservation]) -> None:
        """Looks by ``see`` from now on."""
        if self._writer is not None:
            self._starts += 1
            self._see = see
            self._look_on(self._starts)

    def look(self) -> None:
        """Looks now: something has happened, or is about to."""
        if self._writer is None or self._see is None:
            return
        try:
            self._take(self._see(), self._writer)
        except SignalException:
            raise
        except Exception:  # a job trains as well when nobody knows how fast
            logger.debug("The job's pace is not looked at any more", exc_info=True)
            self._see = None

    def stop(self) -> None:
        """Looks a last time: the pages are about to go."""
        self.look()
        self._see = None
        self._starts += 1

    def close(self) -> None:
        """Tells nothing any more, and lets go of the rendezvous."""
        if self._writer is not None:
            self._writer.close()
        self._writer = self._see = None

    def _take(self, seen: PaceObservation, writer: _Writer) -> None:
        self._pace = after(self._pace, seen)
        report = reported(self._pace, seen, self._told) if seen.is_first else None
        if report is not None or not seen.is_first:  # else another agent tells for how long the job stood still
            self._pace = replace(self._pace, stood=())
            self._told = report
        if report is not None:
            writer.write(report)

    def _look_on(self, start: int) -> None:
        if start == self._starts:
            self.look()
            self._loop.call_at(time.monotonic() + LOOK_S, lambda: self._look_on(start))


class _Writer:
    """Writes the newest report; of what could not be written, transitions are told with the next one."""

    def __init__(self, keep: Callable[[_Merge], bool]) -> None:
        self._keep = keep
        self._changed = threading.Condition()
        self._report: PaceFigures | None = None
        self._is_over = False
        self._thread: threading.Thread | None = None

    def write(self, report: PaceFigures) -> None:
        """Takes the place of a report that was not written yet."""
        with self._changed:
            stood = self._report.stood if self._report is not None else ()
            self._report = replace(report, stood=(*stood, *report.stood)[-STOOD_KEPT:])
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="unicron-pace", daemon=True)
            self._thread.start()

    def close(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        unwritten: tuple[Any, ...] = ()
        while (report := self._next()) is not None:
            report = replace(report, stood=(*unwritten, *report.stood)[-STOOD_KEPT:])
            try:
                is_written = self._keep(partial(merged, report))
            except Exception:
                logger.debug("The job's pace could not be told", exc_info=True)
                is_written = False
            unwritten = () if is_written else report.stood

    def _next(self) -> PaceFigures | None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._report is not None)
            report, self._report = self._report, None
            return None if self._is_over else report


def merged(report: PaceFigures, text: bytes | None) -> bytes:
    """What the store is to hold after a report if it holds ``text``; what cannot be read is left out.

    Raises ValueError for a report of what no job can do.
    """
    # Planning calculates with NumPy, which an agent of a job that nobody planned may lack.
    from unicron_elastic.planning.model.measured import MeasuredJob, Now, Stay

    try:
        measured = MeasuredJob() if text is None else MeasuredJob.from_json(text)
    except ValueError as error:
        logger.debug("What was measured of the job before cannot be read: %s", error)
        measured = MeasuredJob()
    measured = measured.with_steps(
        report.nodes,
        Stay(
            since_unix_s=report.since_unix_s,
            step_s=report.step_s,
            steps=report.steps,
            flops_per_step=report.flops_per_step,
        ),
        is_global_batch_fixed=report.is_global_batch_fixed,
        now=Now(
            nodes=report.nodes,
            step_s=report.step_now_s,
            at_unix_s=report.at_unix_s,
            unsaved_s=report.unsaved_s,
        ),
    )
    for kind, stood_s in report.stood:
        measured = measured.with_transition(kind, stood_s)
    return measured.to_json()


def seen_of(
    state: JobState,
    group: WorkerGroup,
    rendezvous: JobRendezvous,
    processes: Mapping[int, WorkerProcess],
    kept_at: float | None,
) -> PaceObservation:
    """What there is to see of a job, by its state on this node, the round of its agents, and its workers here.

    Those who train together in a world that may change have a batch that does not, and every one of them began with it.
    ``kept_at``: when a snapshot was last made that outlives this agent.
    """
    world = state.world
    if world is None:
        nodes = frozenset(rendezvous.node_ids)
        is_settled, is_first = True, group.group_rank == 0
    else:
        nodes = frozenset(member.node.rpartition("#")[0] for member in world.members)
        is_settled = world.number <= 1 or any(worker.went_on_in >= world.number for worker in state.workers)
        is_first = bool(world.members) and world.members[0].node == state.node
    pid, first, ends = _steps(processes)
    told = (process.flops_per_step for _, process in sorted(processes.items()))
    now = time.monotonic()
    return PaceObservation(
        at=now,
        at_unix_s=time.time(),
        nodes=nodes,
        is_settled=is_settled,
        pid=pid,
        first=first,
        ends=ends,
        is_first=is_first,
        is_global_batch_fixed=world is not None,
        flops_per_step=next((each for each in told if each is not None), None),
        unsaved_s=_unsaved_s(processes, kept_at, now),
    )


def _unsaved_s(processes: Mapping[int, WorkerProcess], kept_at: float | None, now: float) -> float:
    """Returns for how long the workers have trained since the last save, or their first step; 0.0 if nobody knows."""
    readings = [found for process in processes.values() if (found := process.reading()) is not None]
    first_steps = [found.first_step_at for found in readings if found.first_step_at is not None]
    if not first_steps:
        return 0.0
    saves = [each for each in (kept_at, *(found.saved_at for found in readings)) if each is not None]
    return max(0.0, now - max([*saves, min(first_steps)]))


def _steps(processes: Mapping[int, WorkerProcess]) -> tuple[int, int, tuple[float, ...]]:
    """The first worker that makes steps: its pid, the number of a step, and the ends of it and those that followed."""
    for _, process in sorted(processes.items()):
        reading = process.reading() if process.returncode is None else None
        if reading is not None and reading.step > 0 and process.page is not None:
            first, ends = process.page.beats()
            missing = sum(end <= 0.0 for end in ends)  # steps that another process made before it
            return process.pid, first + missing, ends[missing:]
    return 0, 1, ()
