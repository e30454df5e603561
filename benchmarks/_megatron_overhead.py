"""The undisturbed step of two jobs that are both there and run in turn: one is stopped while the other trains.

So the same processes are compared with one another every few seconds, and whatever else the machine does meets both. A
job is stopped (SIGSTOP) as a whole, with its launcher, and the steps around a change are left out.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median

import psutil
from _launchers import LauncherEndedError, TimedOutError, incidents
from _megatron_jobs import Launched, Split, torchrun, unicron
from _recovery_events import steps_of
from _recovery_job import RunningJob
from _scenarios import Run

WARM_UP_STEPS = 15
LEFT_OUT_STEPS = 2  # after a change: the one that was interrupted, and one more
START_S = 90.0


@dataclass(frozen=True)
class Block:
    """The steps of one turn: their mean, the processor time of the whole job in one of them, and how many."""

    step_ms: float
    cpu_ms: float
    steps: int


class Turns:
    """Two jobs, of which one runs at a time."""

    def __init__(self, split: Split, jobs: Sequence[Launched], time_s: float) -> None:
        options = (*split.options, "--checkpoint-every=0")
        self._jobs = [RunningJob(launched, split.ranks, options, START_S + time_s) for launched in jobs]
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Turns:
        with contextlib.ExitStack() as stack:
            for job in self._jobs:
                stack.enter_context(job)
                while len(steps_of(job.events(), 0)) < WARM_UP_STEPS:
                    job.wait("warm-up", 0.1)
                _stop(job)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def block(self, number: int, block_s: float) -> Block:
        """Let job ``number`` run for so long."""
        job = self._jobs[number]
        processes = job.processes()
        used_s = _cpu_s(processes)
        begin_ns = time.monotonic_ns()
        _signal(reversed(processes), signal.SIGCONT)
        time.sleep(block_s)
        end_ns = time.monotonic_ns()
        _stop(job)
        cores = (_cpu_s(processes) - used_s) / ((time.monotonic_ns() - begin_ns) / 1e9)
        moments = [each.at_ns for each in steps_of(job.events(), 0) if begin_ns < each.at_ns < end_ns][LEFT_OUT_STEPS:]
        steps = [(after - before) / 1e6 for before, after in pairwise(moments)]
        if len(steps) < 3:
            job.wait("step in a turn")  # raises if it has ended
            raise RuntimeError(f"only {len(steps)} steps in a turn of {block_s:g} s")
        return Block(mean(steps), cores * mean(steps), len(steps))

    def incidents(self) -> int:
        """How many faults unicron-run saw, where there were none."""
        return sum(len(incidents(job.folder / "logs", 0)) for job in self._jobs)


def pairs(turns: Turns, count: int, block_s: float) -> Iterator[tuple[Block, Block]]:
    """A block of either job, so many times; each time the other job is the first."""
    for number in range(count):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        found = {each: turns.block(each, block_s) for each in order}
        yield found[0], found[1]


def _stop(job: RunningJob) -> None:
    _signal(job.processes(), signal.SIGSTOP)  # the launcher first: it sees nothing of it


def _signal(processes: Iterator[psutil.Process] | Sequence[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    """Seconds of processor time that they have used."""
    used = 0.0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            used += times.user + times.system
    return used


def overhead(split: Split, launches: int, count: int, block_s: float) -> Iterator[Run]:
    """Compare unicron-run and torchrun in so many pairs of launches, of so many pairs of turns each."""
    for repetition in range(launches):
        run = Run("overhead", "both", split.ranks, repetition)
        run.notes = {"split": split.name, "is_distributed": split.is_distributed, "incidents": 0}
        run.notes |= {name: [] for name in ("ours_ms", "theirs_ms", "ratios", "cpu_ratios", "steps")}
        try:
            with Turns(split, (unicron(), torchrun()), 2 * count * block_s) as turns:
                for ours, theirs in pairs(turns, count, block_s):
                    run.notes["ours_ms"].append(ours.step_ms)
                    run.notes["theirs_ms"].append(theirs.step_ms)
                    run.notes["ratios"].append(ours.step_ms / theirs.step_ms)
                    run.notes["cpu_ratios"].append(ours.cpu_ms / theirs.cpu_ms)
                    run.notes["steps"].append(ours.steps)
                run.notes["incidents"] = turns.incidents()
        except (LauncherEndedError, TimedOutError, psutil.Error, RuntimeError) as error:
            run.problem = str(error)
        if run.notes["ratios"]:
            run.values["ratio"] = median(run.notes["ratios"])
        yield run
