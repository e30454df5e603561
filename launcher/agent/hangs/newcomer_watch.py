"""Workers on their way into a world in which others train already: nobody waits for them, so nobody would miss one.

A process that is stopped by a signal there would stay so for ever, and the others would train with one rank less.
How long a newcomer may take otherwise is its script's affair.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from unicron_elastic.detection.policy import PacePolicy
from unicron_elastic.launcher.agent.process.activity import state
from unicron_elastic.launcher.agent.process.workers import WorkerProcess
from unicron_elastic.launcher.common.loop import Loop

LOOK_S = 1.0
STOPPED_S = PacePolicy().stopped_s


class NewcomerWatch:
    """Looks at the newcomers of one node while there are any."""

    def __init__(
        self,
        loop: Loop,
        on_stopped: Callable[[int, WorkerProcess, float], None],
        on_going_on: Callable[[int], None],
        *,
        look_s: float = LOOK_S,
        stopped_s: float = STOPPED_S,
        state: Callable[[int], str] = state,
    ) -> None:
        """``on_stopped`` hears the rank and for how many seconds, once that is too long; then ``on_going_on`` may."""
        self._loop = loop
        self._look_s = look_s
        self._stopped_s = stopped_s
        self._state = state
        self._on_stopped = on_stopped
        self._on_going_on = on_going_on
        self._stopped_since: dict[int, float] = {}  # by pid, in monotonic seconds
        self._told: dict[int, WorkerProcess] = {}  # by global rank
        self._is_looking = False
        self.workers: dict[int, WorkerProcess] = {}  # by global rank

    def watch(self, workers: Mapping[int, WorkerProcess]) -> None:
        """These are the newcomers now."""
        self.workers = dict(workers)
        if self.workers and not self._is_looking:
            self._is_looking = True
            self._look()

    def _look(self) -> None:
        now = time.monotonic()
        looked_at = {**self._told, **self.workers}  # who was told may have come to the others meanwhile
        living = {rank: worker for rank, worker in looked_at.items() if worker.returncode is None}
        stopped = {rank: worker for rank, worker in living.items() if self._state(worker.pid) == "T"}
        pids = [worker.pid for worker in stopped.values()]
        self._stopped_since = {pid: self._stopped_since.get(pid, now) for pid in pids}
        gone_on = [rank for rank, worker in self._told.items() if living.get(rank) is worker and rank not in stopped]
        self._told = {rank: worker for rank, worker in self._told.items() if stopped.get(rank) is worker}
        self._is_looking = bool(living)
        if living:
            self._loop.call_at(now + self._look_s, self._look)
        for rank in gone_on:
            self._on_going_on(rank)
        for rank, worker in stopped.items():
            lasted_s = now - self._stopped_since[worker.pid]
            if lasted_s >= self._stopped_s and rank not in self._told:
                self._told[rank] = worker
                self._on_stopped(rank, worker, lasted_s)
