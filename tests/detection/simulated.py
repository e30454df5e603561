"""A simulated training job.

Ranks compute, meet in one collective per step, and go on together. Each rank's life is a row of stretches, in each of
which it uses some share of a core and is in one state as /proc names them. Everything random comes from one seed.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from unicron_elastic.detection.arrivals import Arrivals
from unicron_elastic.detection.sample import TRAIN, RankSample

FOREVER = math.inf
STEP_TIMES_S = (0.005, 0.02, 0.2, 2.0, 30.0)

# What a rank may be caught in: share of a core, state.
STOPPED, ASLEEP, BUSY, DISK, PREEMPTED = (0.0, "T"), (0.0, "S"), (1.0, "R"), (0.02, "D"), (0.0, "R")


class Stretch(NamedTuple):
    """A time in which a rank does one thing."""

    end: float
    cpu_share: float
    state: str
    collective: int
    waiting: bool
    step: int
    step_at: float | None
    step_time_s: float | None
    phase: str
    phase_since: float | None


@dataclass(frozen=True)
class Trouble:
    """Something that happens to one rank in one step: ``seconds`` in a state, after a share of its computation."""

    step: int
    rank: int
    kind: tuple[float, str]
    seconds: float = FOREVER
    after: float = 0.05


@dataclass(frozen=True)
class Slowdown:
    """One rank, or all, computes ``factor`` times as long from one step to another."""

    factor: float
    begin: int
    end: int = 10**9
    rank: int | None = None
    works: bool = True  # on a CPU; else it waits, as for a device


@dataclass(frozen=True, kw_only=True)
class Script:
    """What a job does. Seconds and steps; zero switches a thing off."""

    step_s: float = 0.2
    ranks: int = 4
    noise: float = 0.03  # of each rank's computation
    start_s: float = 5.0
    compile_s: float = 20.0
    evaluate_every: int = 0
    evaluate_s: float = 0.0
    checkpoint_every: int = 0
    checkpoint_s: float = 0.0
    phases_are_named: bool = False
    mishap_every_s: float = 0.0  # data stalls, garbage collections and pauses of the whole machine
    spins: bool = False  # whether a rank that waits in a collective uses its core
    troubles: tuple[Trouble, ...] = ()
    slowdowns: tuple[Slowdown, ...] = ()
    runs_ahead: tuple[int, int] | None = None  # step and rank: it skips the collective and goes on to the next


class Worker:
    """One rank: what it will do, planned up to ``clock``, and how far it was looked at."""

    def __init__(self, rank: int, began_at: float) -> None:
        self.rank = rank
        self.clock = self.seen_at = began_at
        self.plan: deque[Stretch] = deque()
        self.cpu_time_s = 0.0
        self.step, self.collective, self.waiting, self.phase = 0, 0, False, TRAIN
        self.step_at: float | None = None
        self.step_time_s: float | None = None
        self.begun_at: list[float] = []  # of every collective
        self.phase_since: float | None = None

    def spend(self, seconds: float, kind: tuple[float, str]) -> None:
        self.clock += seconds
        self.plan.append(
            Stretch(
                self.clock,
                *kind,
                self.collective,
                self.waiting,
                self.step,
                self.step_at,
                self.step_time_s,
                self.phase,
                self.phase_since,
            )
        )

    def name(self, phase: str) -> None:
        self.phase, self.phase_since = phase, self.clock

    def begin_collective(self) -> None:
        self.collective, self.waiting = self.collective + 1, True
        self.begun_at.append(self.clock)

    def end_step(self) -> None:
        self.step_time_s = None if self.step_at is None else self.clock - self.step_at
        self.step, self.step_at = self.step + 1, self.clock

    def seen(
        self, at: float, *, counts_collectives: bool, with_evidence: bool, with_arrivals: bool = False
    ) -> RankSample:
        """What an agent sees at ``at``, which never goes back."""
        while self.plan[0].end <= at:
            done = self.plan.popleft()
            self.cpu_time_s += (done.end - self.seen_at) * done.cpu_share
            self.seen_at = done.end
        now = self.plan[0]
        self.cpu_time_s += (at - self.seen_at) * now.cpu_share
        self.seen_at = at
        return RankSample(
            rank=self.rank,
            step=now.step,
            step_at=now.step_at,
            step_time_s=now.step_time_s,
            phase=now.phase,
            phase_since=now.phase_since,
            cpu_time_s=self.cpu_time_s,
            collective=now.collective if counts_collectives else None,
            arrivals=self.arrivals(at, counts_collectives) if with_arrivals else None,
            waiting=now.waiting if counts_collectives else None,
            stopped=with_evidence and now.state == "T",
            runnable=now.state == "R" if with_evidence else None,
            in_io=now.state == "D" if with_evidence else None,
        )

    def arrivals(self, at: float, counts_collectives: bool) -> Arrivals:
        """Of the latest collectives until ``at``, if anything records them."""
        if not counts_collectives:
            return Arrivals(first=0, at_s=())
        begun_at = self.begun_at[: bisect_right(self.begun_at, at)]
        return Arrivals(first=max(0, len(begun_at) - 500) + 1, at_s=tuple(begun_at[-500:]))


class Job:
    """All ranks, planned step by step as far as anybody looks."""

    def __init__(self, script: Script, seed: int = 0, began_at: float = 1000.0) -> None:
        self.script, self.random = script, random.Random(seed)
        self.workers = [Worker(rank, began_at) for rank in range(script.ranks)]
        self.number = 0  # of the step planned next
        self.planned_to = began_at
        self.trouble_at: float | None = None  # when the latest trouble began
        for worker in self.workers:
            worker.spend(script.start_s, (0.8, "R"))

    def plan_to(self, at: float) -> None:
        while self.planned_to <= at:
            self._plan_step()

    def _plan_step(self) -> None:
        script, number = self.script, self.number
        if number and script.evaluate_every and number % script.evaluate_every == 0:
            self._evaluate()
        if number and script.checkpoint_every and number % script.checkpoint_every == 0:
            self._checkpoint()
        self._mishap()
        for worker in self.workers:
            self._compute(worker)
        self._meet()
        self.number += 1
        self.planned_to = min(worker.clock for worker in self.workers)

    def _compute(self, worker: Worker) -> None:
        script, number = self.script, self.number
        compute_s = 0.85 * script.step_s * math.exp(script.noise * self.random.gauss(0.0, 1.0))
        for slowdown in script.slowdowns:
            if slowdown.begin <= number < slowdown.end and slowdown.rank in {None, worker.rank}:
                # The whole step shall take longer by the factor, and computing is not all of it.
                extra_s = (slowdown.factor - 1.0) * script.step_s
                if slowdown.works:
                    compute_s += extra_s
                else:
                    worker.spend(extra_s, ASLEEP)
        if number == 0:
            worker.spend(script.compile_s, BUSY)
        done = 0.0
        for trouble in script.troubles:
            if trouble.step == number and trouble.rank == worker.rank:
                worker.spend(trouble.after * compute_s, (0.95, "R"))
                done = trouble.after
                self.trouble_at = worker.clock
                worker.spend(trouble.seconds, trouble.kind)
        worker.spend((1.0 - done) * compute_s, (0.95, "R"))

    def _meet(self) -> None:
        """The collective, and the end of the step; if somebody never comes, the others wait for ever."""
        script, step_s = self.script, self.script.step_s
        waits = (1.0, "R") if script.spins else (0.01, "S")
        if script.runs_ahead is not None and script.runs_ahead[0] == self.number:
            self._run_ahead(self.workers[script.runs_ahead[1]])
        arrived_at = max(worker.clock for worker in self.workers)
        for worker in self.workers:
            if worker.clock == FOREVER:
                continue
            worker.begin_collective()
            worker.spend(arrived_at + 0.1 * step_s - worker.clock, waits)
            if worker.clock == FOREVER:
                continue
            worker.waiting = False
            worker.spend(0.05 * step_s, (0.9, "R"))
            worker.end_step()

    def _run_ahead(self, worker: Worker) -> None:
        self.trouble_at = worker.clock
        worker.end_step()
        worker.spend(0.85 * self.script.step_s, (0.95, "R"))
        worker.begin_collective()
        worker.spend(FOREVER, ASLEEP)

    def _evaluate(self) -> None:
        seconds = self.script.evaluate_s * self.random.uniform(0.8, 1.2)
        for worker in self.workers:
            self._occupy(worker, "evaluate", [(seconds, (0.6, "R"))])

    def _checkpoint(self) -> None:
        seconds = self.script.checkpoint_s * self.random.uniform(0.7, 1.3)
        self._occupy(self.workers[0], "checkpoint", [(0.3 * seconds, BUSY), (0.7 * seconds, DISK)])

    def _occupy(self, worker: Worker, phase: str, rows: Sequence[tuple[float, tuple[float, str]]]) -> None:
        if self.script.phases_are_named:
            worker.name(phase)
        for seconds, kind in rows:
            worker.spend(seconds, kind)
        if self.script.phases_are_named:
            worker.name(TRAIN)

    def _mishap(self) -> None:
        script, random = self.script, self.random
        if not script.mishap_every_s or random.random() * script.mishap_every_s > script.step_s:
            return
        what = random.randrange(3)
        if what == 0:
            random.choice(self.workers).spend(random.uniform(0.1, 1.5 + min(script.step_s, 2.0)), DISK)
        elif what == 1:
            random.choice(self.workers).spend(random.uniform(0.02, 0.2), BUSY)
        else:
            for worker in self.workers:
                worker.spend(0.3, PREEMPTED)
