"""One launch of the matrix of tier 2: one agent or two, until all have ended, and nothing left of them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _in_place_cases import Case
from _in_place_logs import ProcessLog, read_logs
from _launchers import UNICRON, LauncherEndedError, TimedOutError, incidents
from _recovery_competitors import WORKERS, Command, Job
from _recovery_job import RunningJob

WORKER = WORKERS / "in_place_steps.py"
OPTIONS = ("--max-restarts=6", "--unicron-hang-patience=1", "--unicron-console=plain")
GOES_ON = {"UNICRON_IN_PLACE": "force"}  # over back ends that are not gloo, too
WORK_MS = 24.0  # that a step's micro-batches take beside their computation, if nobody is missing
STACKS_S = 0.2  # for a process of a job that has not ended in time to write its stacks


@dataclass
class Outcome:
    """What came of a launch. ``exit_codes`` are the agents', None if they had to be killed."""

    exit_codes: list[int | None] = field(default_factory=list)
    logs: list[ProcessLog] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)  # of the ledgers of all agents
    last_lines: list[str] = field(default_factory=list)


class _Agents:
    """The launchers of one job, for a ``RunningJob``."""

    name = "unicron-run"
    replaces = True

    def __init__(self, case: Case) -> None:
        self._case = case

    def problem(self) -> None:
        """None."""

    def replacement(self, job: Job, slot: int) -> None:
        """The launcher sees to it."""

    def commands(self, job: Job) -> list[Command]:
        """One for each node."""
        case = self._case
        where = ["--standalone"]
        if case.nodes > 1:
            endpoint = f"--rdzv-endpoint=localhost:{_free_port()}"
            where = [f"--nnodes={case.nodes}", "--rdzv-backend=c10d", endpoint, f"--rdzv-id={job.folder.name}"]
        script = [
            str(WORKER),
            f"--mode={case.mode}",
            f"--over={case.over}",
            f"--work-ms={WORK_MS * case.ranks / 12}",
            *job.options,
        ]
        script.append(f"--strikes={json.dumps([strike.to_message() for strike in case.strikes])}")
        return [
            Command(
                (
                    str(UNICRON.path), *where, *OPTIONS, f"--nproc-per-node={case.ranks // case.nodes}",
                    f"--log-dir={job.folder / f'logs{node}'}", *script,
                ),
                {"UNICRON_NODE_NAME": f"node-{node}", **({} if case.over == "gloo" else GOES_ON)},
            )
            for node in range(case.nodes)
        ]  # fmt: skip


class _Launch(RunningJob):
    """Until all agents have ended."""

    def wait_ended(self) -> None:
        """Raises TimedOutError."""
        with contextlib.suppress(LauncherEndedError):
            while True:
                self.wait("end")

    def exit_codes(self) -> list[int | None]:
        """Of the agents, in the order of their nodes."""
        return [process.poll() for process in self._main]

    def ask_for_stacks(self) -> None:
        """Has the workers that live write their stacks into the job's output."""
        for log in read_logs(self.folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(log.pid, signal.SIGUSR1)
                time.sleep(STACKS_S)  # one after another, or their lines would mix

    def keep(self) -> Path:
        """A copy of the folder that stays."""
        kept = Path(tempfile.mkdtemp(prefix="unicron-in-place-failed-"))
        shutil.copytree(self.folder, kept, dirs_exist_ok=True)
        return kept


def run(case: Case, deadline_s: float) -> tuple[Outcome, Path]:
    """What came of one launch, and a copy of its folder, which the caller removes or keeps."""
    started_ns = time.monotonic_ns()
    with _Launch(_Agents(case), case.ranks, (), deadline_s) as job:
        try:
            job.wait_ended()
        except TimedOutError:
            job.ask_for_stacks()
        outcome = Outcome(exit_codes=job.exit_codes(), logs=read_logs(job.folder), last_lines=job.last_lines(60))
        for node in range(case.nodes):
            outcome.records += incidents(job.folder / f"logs{node}", started_ns)
        return outcome, job.keep()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def say(line: str) -> None:
    """To stderr, at once."""
    print(line, file=sys.stderr, flush=True)
