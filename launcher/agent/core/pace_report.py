"""Tells those who divide the cluster between jobs how fast this one trains on its nodes.

Only of a job that they planned, and by the agent of its first node. The pulse pages are looked at a few times a
second in the event loop; the store, which may not answer for seconds, is written to from a thread of its own.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from unicron_elastic.compat.agent import WorkerGroup
from unicron_elastic.compat.errors import SignalException
from unicron_elastic.launcher.agent.core.pace import STOOD_KEPT, Pace, PaceFigures, PaceObservation, after, reported
from unicron_elastic.launcher.agent.process.workers import WorkerProcess
from unicron_elastic.launcher.common.loop import Loop
from unicron_elastic.launcher.config.forwarded import PLANNED_JOB
from unicron_elastic.recovery.state import JobState
from unicron_elastic.rendezvous.job.job_rendezvous import JobRendezvous

LOOK_S = 0.5  # the page of a worker holds the ends of its latest 126 steps
CLOSE_S = 0.2  # so long the end of the agent waits for what is being written

logger = logging.getLogger(__name__)

_Merge = Callable[[bytes | None], bytes]


class PaceReport:
    """Of one agent. Does nothing unless the job was planned and its rendezvous can keep what is told."""

    def __init__(self, loop: Loop, handler: JobRendezvous, clock: Callable[[], float] = time.monotonic) -> None:
        """``handler`` is the job's rendezvous."""
        self._loop = loop
        self._clock = clock
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
            self._loop.call_at(self._clock() + LOOK_S, lambda: self._look_on(start))


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
