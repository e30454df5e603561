"""Looks at the workers' progress as often as the statistics ask for, and passes on what they conclude.

The decisions are ``unicron_elastic.detection``'s; this is where its samples come from: the pulse pages, the CPU clocks
and, for workers that are late, /proc and the workers' own word on the collectives they have begun.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from unicron_elastic.detection.sample import RankSample, Sample
from unicron_elastic.detection.state import PaceState
from unicron_elastic.detection.verdicts import Hung, Verdict
from unicron_elastic.detection.watch import forget, needs_evidence, next_look_at, observe
from unicron_elastic.launcher.activity import activity, cpu_time_s
from unicron_elastic.launcher.loop import Loop
from unicron_elastic.launcher.workers import WorkerProcess

__all__ = ["ProgressWatch"]


class ProgressWatch:
    """One job's progress on this node. What is usual stays known from one generation to the next."""

    def __init__(self, loop: Loop, on_verdict: Callable[[Verdict, bool], None]) -> None:
        """``on_verdict`` is told each verdict, and whether it is certain that those who hang will not go on."""
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

    def stop(self) -> None:
        """Looks no more."""
        self._round += 1
        self._workers = {}

    def _look_at(self, at: float) -> None:
        this_round = self._round
        self._loop.call_at(at, lambda: self._look() if this_round == self._round else None)

    def _look(self) -> None:
        was_late = needs_evidence(self._state)
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
            self._on_verdict(verdict, _is_certain(verdict, seen))


def _is_certain(verdict: Verdict, seen: Sequence[RankSample]) -> bool:
    """Whether those who hang cannot go on by themselves."""
    return isinstance(verdict, Hung) and all(rank.stopped for rank in seen if rank.rank in verdict.ranks)


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
        silent=where.is_silent(now),
        collective=where.begun(now),
        waiting=where.is_waiting(now),
    )
