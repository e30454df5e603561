"""A running job of the benchmark of recovery, and the certainty that nothing of it is left."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

import psutil
from _launchers import LauncherEndedError, TimedOutError
from _recovery_competitors import Competitor, Job
from _recovery_events import Event, parse

MEMORY = Path("/dev/shm")
PREFIX = "unicron-recovery-"
POLL_S = 0.02  # the moments are the workers' own, so that polling only has to be cheap
PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make this process the parent of its descendants' orphans, so that none of them can get away."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def sweep() -> None:
    """Remove the folders in memory of benchmarks that were killed before they could do it themselves."""
    for folder in MEMORY.glob(f"{PREFIX}*"):
        owner = folder.name.removeprefix(PREFIX).partition("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)


class RunningJob:
    """A competitor's job in a folder of its own in memory; as a context manager, it ends and removes everything."""

    def __init__(self, competitor: Competitor, ranks: int, options: tuple[str, ...], deadline_s: float) -> None:
        self._competitor = competitor
        self.folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=MEMORY))
        options = (f"--folder={self.folder}", f"--deadline={int(deadline_s) + 5}", *options)
        self._job = Job(self.folder, ranks, options)
        self._deadline = time.monotonic() + deadline_s
        self._main: list[subprocess.Popen[bytes]] = []
        self._read_bytes = 0
        self._events: list[Event] = []

    def __enter__(self) -> RunningJob:
        try:
            for command in self._competitor.commands(self._job):
                self._main.append(command.start(self.folder))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def events(self) -> list[Event]:
        """Everything that the workers have logged so far, in the order of its time."""
        with contextlib.suppress(FileNotFoundError), (self.folder / "events").open("rb") as file:
            file.seek(self._read_bytes)
            whole, newline, _ = file.read().rpartition(b"\n")
            if newline:
                self._read_bytes += len(whole) + 1
                self._events = sorted(self._events + parse(whole.decode() + "\n"), key=lambda event: event.at_ns)
        return self._events

    def wait(self, what: str, poll_s: float = POLL_S) -> None:
        """Sleep for ``poll_s``.

        Raises TimedOutError at the deadline and LauncherEndedError if nothing of the job runs any more.
        """
        if time.monotonic() > self._deadline:
            raise TimedOutError(f"no {what} in time")
        if all(process.poll() is not None for process in self._main):
            codes = ", ".join(str(process.returncode) for process in self._main)
            raise LauncherEndedError(f"{self._competitor.name} ended ({codes}) before {what}")
        time.sleep(poll_s)

    def exit_code(self) -> int | None:
        """Of the launcher that was started first; None while it runs."""
        return self._main[0].poll()

    def processes(self) -> list[psutil.Process]:
        """The launchers, and all that they have started."""
        launchers = [psutil.Process(process.pid) for process in self._main if process.poll() is None]
        return [*launchers, *(child for each in launchers for child in each.children(recursive=True))]

    def kill(self, pid: int, slot: int) -> int:
        """SIGKILL the process of ``slot``, start the replacement if that is ours to do, and return when it was."""
        at_ns = time.monotonic_ns()
        os.kill(pid, signal.SIGKILL)
        replacement = self._competitor.replacement(self._job, slot)
        if replacement is not None:
            self._main.append(replacement.start(self.folder))
        return at_ns

    def last_lines(self, count: int = 20) -> list[str]:
        """The end of what the job has printed."""
        try:
            return (self.folder / "output").read_text(errors="replace").splitlines()[-count:]
        except FileNotFoundError:
            return []

    def _end(self) -> None:
        # Twice and more: what a launcher started while we were looking becomes our child when its parent dies.
        while children := psutil.Process().children(recursive=True):
            for process in children:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(children, timeout=5)
            _reap()
        for started in self._main:
            started.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def _reap() -> None:
    """Collect the exit codes of the dead that are our children by adoption only."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
