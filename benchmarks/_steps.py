"""Reading the step logs of ``workers/ddp_steps.py``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from _launchers import Launch

TAIL_BYTES = 128  # holds the last whole line


@dataclass(frozen=True)
class StepLog:
    """The log of one worker process."""

    path: Path
    rank: int
    restart_count: int
    pid: int

    def last_step(self) -> int:
        """The newest finished step; 0 before the first. Reads only the end, for this is polled while ranks step."""
        with self.path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read().split(b"\n")
        word = lines[-2].split()[0] if len(lines) > 1 else b"start"
        return 0 if word == b"start" else int(word)

    def started_ns(self) -> int:
        """When the script began, before it imported torch."""
        return int(self.path.read_text().split("\n", 1)[0].split()[1])

    def step_ns(self) -> list[int]:
        """The moments of all finished steps, in order."""
        return [int(line.split()[1]) for line in self.path.read_text().splitlines()[1:]]


def read_logs(folder: Path) -> list[StepLog]:
    """All logs of a launch that have at least their first line."""
    found = []
    for path in folder.glob("steps.*"):
        rank, restart_count, pid = map(int, path.name.split(".")[1:])
        if path.stat().st_size:
            found.append(StepLog(path, rank, restart_count, pid))
    return found


def wait_for_step(launch: Launch, ranks: int, step: int, known_pids: frozenset[int] = frozenset()) -> list[StepLog]:
    """Wait until every rank has a process, not of ``known_pids``, that finished ``step``; return one log a rank."""
    while True:
        reached: dict[int, StepLog] = {}
        for log in read_logs(launch.steps_folder):
            if log.pid not in known_pids and log.last_step() >= step:
                reached[log.rank] = log
        if len(reached) == ranks:
            return [reached[rank] for rank in sorted(reached)]
        launch.wait_alive(f"step {step} of every rank")


def wait_for_start(launch: Launch, ranks: int) -> list[StepLog]:
    """Wait until every rank's script has begun."""
    return wait_for_step(launch, ranks, step=0)


def stop_soon(launch: Launch, known_pids: frozenset[int] = frozenset()) -> None:
    """Let the workers that are not of ``known_pids`` end, all at the same step, shortly from now."""
    newest = max(log.last_step() for log in read_logs(launch.steps_folder) if log.pid not in known_pids)
    # Far enough ahead that no rank can have passed it when the file appears: ranks are never a whole step apart.
    unfinished = launch.steps_folder / "stop_at.tmp"
    unfinished.write_text(str(newest + 100))
    unfinished.replace(launch.steps_folder / "stop_at")


def median_interval_ms(log: StepLog, warm_up: int) -> float:
    """The median time between two steps, after the first ``warm_up``."""
    moments = log.step_ns()[warm_up:]
    return median(end - start for start, end in pairwise(moments)) / 1e6
