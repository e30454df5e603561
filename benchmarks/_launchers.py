"""Starting a launcher on the benchmark's worker script, watching it, and leaving nothing of it behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

WORKER = Path(__file__).parent / "workers" / "ddp_steps.py"
LAUNCHER_VARIABLES = ("PET_", "TORCHELASTIC_", "UNICRON_")
LAUNCH_LINE = re.compile(r"[IWEF]\d{4} \d\d:\d\d:\d\d")  # torch's own log lines; workers share the launcher's stderr
POLL_S = 0.02  # every moment that is reported is stamped by whoever sees it, so polling only has to be cheap


class TimedOutError(Exception):
    """A wait reached its deadline."""


class LauncherEndedError(Exception):
    """The launcher ended while something was still expected of it."""


@dataclass(frozen=True)
class Launcher:
    """One way of launching: a console script beside this Python, and what it needs in its environment."""

    name: str
    program: str
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """The console script; not resolved, because a virtual environment's Python is a link to another folder."""
        return Path(sys.executable).parent / self.program


UNICRON = Launcher("unicron-run", "unicron-run")
# With gloo, torchrun 2.13 hands the dead attempt's addresses to the next one, unless its store is not shared: that is
# the setting under which its restarts work, and the one to compare with.
TORCHRUN = Launcher("torchrun", "torchrun", {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
TORCHRUN_DEFAULT = Launcher("torchrun-default", "torchrun")
LAUNCHERS = (UNICRON, TORCHRUN, TORCHRUN_DEFAULT)


class Launch:
    """A running launcher in a session and a temporary folder of its own; as a context manager, it cleans up both."""

    def __init__(
        self,
        launcher: Launcher,
        ranks: int,
        worker_arguments: Iterable[str],
        deadline_s: float,
        *,
        worker: Path = WORKER,
        options: Iterable[str] = ("--max-restarts=3",),
        prefix: Iterable[str] = (),
        again: Launch | None = None,
    ) -> None:
        """Launch ``worker`` with ``worker_arguments``; ``options`` are the launcher's own, ``prefix`` starts it.

        A worker of the benchmarks is told where to log and when to die. With ``again`` it is the same command in the
        folder of that launch, which has ended and whose folder stays.
        """
        self.launcher = launcher
        self.folder = again.folder if again is not None else Path(tempfile.mkdtemp(prefix="unicron-benchmark-"))
        self._owns_folder = again is None
        self.steps_folder = self.folder / "steps"
        self.logs_folder = self.folder / "logs"
        self.steps_folder.mkdir(exist_ok=True)
        self.deadline = time.monotonic() + deadline_s
        command = [*prefix, str(launcher.path), "--standalone", f"--nproc-per-node={ranks}", *options]
        command += [f"--log-dir={self.logs_folder}", str(worker), *worker_arguments]
        if worker.parent.name == "workers":
            command += [f"--log-dir={self.steps_folder}", f"--deadline={int(deadline_s) + 5}"]
        self.started_ns = time.monotonic_ns()
        self.process = subprocess.Popen(
            command,
            env=_environment(launcher),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.lines: list[tuple[int, str]] = []  # (monotonic ns, line) of all that comes on stderr
        self.launch_lines: list[tuple[int, str]] = []  # those of the launcher's own log
        self.last_lines: deque[str] = deque(maxlen=20)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Launch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._kill_everything()
        self._reader.join(timeout=5)
        if self._owns_folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def wait_alive(self, what: str) -> None:
        """Sleep one poll interval; raise if the launcher has ended or its time is up."""
        if self.process.poll() is not None:
            raise LauncherEndedError(f"{self.launcher.name} exited with {self.process.returncode} before {what}")
        if time.monotonic() > self.deadline:
            raise TimedOutError(f"no {what} in time")
        time.sleep(POLL_S)

    def wait_ended(self) -> int:
        """Wait for the launcher's end and return its exit code."""
        try:
            return self.process.wait(max(0.1, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise TimedOutError("no end in time") from None

    def helpers(self, worker_pids: set[int]) -> list[psutil.Process]:
        """The launcher and its helper processes: every descendant that is neither a worker nor a worker's child."""
        return [process for process in self._tree(skip=worker_pids) if process.is_running()]

    def _tree(self, skip: set[int]) -> list[psutil.Process]:
        try:
            found = waiting = [psutil.Process(self.process.pid)]
            while waiting:
                waiting = [child for parent in waiting for child in _children(parent) if child.pid not in skip]
                found = found + waiting
        except psutil.NoSuchProcess:
            return []
        return found

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            now = time.monotonic_ns()
            self.lines.append((now, line.rstrip()))
            self.last_lines.append(line.rstrip())
            if LAUNCH_LINE.match(line):
                self.launch_lines.append((now, line.rstrip()))

    def _kill_everything(self) -> None:
        # The tree is listed while the launcher lives, for the orphans of a dead parent are no longer found below it;
        # workers that were orphaned all the same are known by the names of their logs.
        processes = self._tree(skip=set())
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for process in [*processes, *self._orphans()]:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait(timeout=10)

    def _orphans(self) -> list[psutil.Process]:
        found = []
        for path in self.steps_folder.glob("steps.*"):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(int(path.name.rpartition(".")[2]))
                # A pid may have been reused; the folder's name in the command line or an open log cannot.
                if any(str(self.steps_folder) in file.path for file in process.open_files()):
                    found.append(process)
        return found


def noticed_ns(launch: Launch, killed_ns: int) -> int | None:
    """When the launcher noticed a death at ``killed_ns``, or None if it did not say.

    unicron-run writes the moment into its ledger of incidents. torchrun's own lines have whole seconds, but the first
    of them after the death comes when its poll has seen it, before it stops the other workers.
    """
    if launch.launcher.program == "torchrun":
        return next((at for at, _ in launch.launch_lines if at >= killed_ns), None)
    return ledger_noticed_ns(launch.logs_folder, killed_ns)


def ledger_noticed_ns(logs_folder: Path, killed_ns: int) -> int | None:
    """The moment at which the first incident after ``killed_ns`` was noticed, from the ledger; None without one."""
    records = incidents(logs_folder, killed_ns)
    return int(records[0]["noticed_at"] * 1e9) if records else None


def incidents(logs_folder: Path, since_ns: int) -> list[dict[str, Any]]:
    """What the ledger says of incidents that were noticed after ``since_ns``; an incident's last record counts."""
    found = {}
    for path in sorted(logs_folder.rglob("incidents.jsonl")):
        for line in path.read_text().splitlines(keepends=True):
            if not line.endswith("\n"):
                continue  # it is being written
            record = json.loads(line)
            noticed_at = record.get("noticed_at")
            if noticed_at is not None and noticed_at * 1e9 >= since_ns:
                found[record["number"]] = record
    return list(found.values())


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children()
    except psutil.NoSuchProcess:
        return []


def _environment(launcher: Launcher) -> dict[str, str]:
    """This process's environment without any launcher's settings, with the launcher's own, one thread per rank."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(LAUNCHER_VARIABLES) and name not in TORCHRUN.environment
    }
    return {**kept, "OMP_NUM_THREADS": "1", **launcher.environment}
