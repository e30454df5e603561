"""Looks at the workers' progress as often as the statistics ask for, and passes on what they conclude.

The decisions are ``unicron_elastic.detection``'s; this is where its samples come from: the pulse pages, the CPU clocks
and, for workers that are late, /proc and the workers' own word on the collectives they have begun.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from unicron_elastic.detection.sample import RankSample, Sample
from unicron_elastic.detection.state import PaceState
from unicron_elastic.detection.verdicts import Verdict
from unicron_elastic.detection.watch import forget, needs_evidence, next_look_at, observe
from unicron_elastic.launcher.activity import activity, cpu_time_s
from unicron_elastic.launcher.loop import Loop
from unicron_elastic.launcher.workers import WorkerProcess
from unicron_elastic.worker.pulse import PulseReading

__all__ = ["ProgressWatch", "is_silent"]


class ProgressWatch:
    """One job's progress on this node. What is usual stays known from one generation to the next."""

    def __init__(self, loop: Loop, on_verdict: Callable[[Verdict], None]) -> None:
        self._loop = loop
        self._on_verdict = on_verdict
        self._state = PaceState()
        self._workers: dict[int, WorkerProcess] = {}
        self._round = 0  # timers of earlier generations are not for this one

    def start(self, workers: Mapping[int, WorkerProcess], *, whole_job: bool) -> None:
        """Watches ``workers``, by global rank; ``whole_job`` if no rank is on another node."""
        self.stop()
        self._workers = {rank: worker for rank, worker in workers.items() if worker.page is not None}
        if len(self._workers) == len(workers):  # who cannot be seen would be taken to stand still
            self._state = replace(forget(self._state), whole_job=whole_job)
            self._look_at(time.monotonic())

    def look_now(self) -> None:
        """Looks once more, before something is done about what was seen; the next looks follow from that."""
        if self._workers:
            self._round += 1
            self._look(has_heard=True)

    def stop(self) -> None:
        """Looks no more."""
        self._round += 1
        self._workers = {}

    def _look_at(self, at: float) -> None:
        this_round = self._round
        self._loop.call_at(at, lambda: self._look() if this_round == self._round else None)

    def _look_once_heard(self) -> None:
        this_round = self._round
        self._loop.call_soon(lambda: self._look(has_heard=True) if this_round == self._round else None)

    def _look(self, *, has_heard: bool = False) -> None:
        was_late = needs_evidence(self._state)
        if was_late and not has_heard and any(map(_is_unread, self._workers.values())):
            self._look_once_heard()  # on a loaded host an answer may be there that this process did not come to read
            return
        ranks = [_sample(rank, worker, was_late) for rank, worker in self._workers.items() if worker.returncode is None]
        seen = tuple(rank for rank in ranks if rank is not None)
        if not seen or len(seen) != len(ranks):
            return  # all have ended, or a script overwrote its page: there is nothing left to go by
        self._state, verdicts = observe(self._state, Sample(at=time.monotonic(), ranks=seen))
        if needs_evidence(self._state):
            for worker in self._workers.values():
                if not was_late:
                    worker.whereabouts = worker.whereabouts.forgotten()
                worker.ask_whereabouts()
        self._look_at(next_look_at(self._state))
        for verdict in verdicts:
            self._on_verdict(verdict)


def is_silent(worker: WorkerProcess, reading: PulseReading, at: float) -> bool:
    """Whether a worker should have answered by now: it does from its first step on, unless it closed the channel."""
    return reading.step > 0 and worker.control is not None and worker.whereabouts.is_silent(at)


def _is_unread(worker: WorkerProcess) -> bool:
    """Whether it has said something that was not read yet."""
    if worker.control is None:
        return False
    waiting = select.poll()
    waiting.register(worker.control.fileno(), select.POLLIN)
    return bool(waiting.poll(0))


def _sample(rank: int, worker: WorkerProcess, is_late: bool) -> RankSample | None:
    reading = worker.reading()
    if reading is None:
        return None
    seen = RankSample(
        rank=rank,
        step=reading.step,
        step_at=reading.at,
        step_time_s=reading.step_time_s,
        phase=reading.phase,
        phase_since=reading.phase_since,
        cpu_time_s=cpu_time_s(worker.pid),
    )
    doing = activity(worker.pid) if is_late else None
    if doing is None:
        return seen
    now, where = time.monotonic(), worker.whereabouts
    return replace(
        seen,
        stopped=doing.stopped,
        runnable=doing.runnable,
        in_io=doing.in_io,
        silent=is_silent(worker, reading, now),
        collective=where.begun(now),
        waiting=where.is_waiting(now),
        uses_gpu=where.uses_gpu,
    )
