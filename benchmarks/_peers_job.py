"""A running job of the comparison of peers: its faults, and its output line by line with the moment each line came."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from pathlib import Path

import psutil
from _launchers import TimedOutError, ledger_noticed_ns
from _peers_launch import Bound, Start
from _recovery_job import RunningJob

TAIL_S = 0.005
PORT_S = 20.0
SIGNALS = {"kill": signal.SIGKILL, "hang": signal.SIGSTOP, "exception": signal.SIGUSR1}


class PeersJob(RunningJob):
    """As a context manager, it starts everything, and ends and removes everything."""

    def __init__(self, bound: Bound, options: tuple[str, ...], deadline_s: float) -> None:
        super().__init__(bound, 0, options, deadline_s)
        self._agents: dict[int, int] = {}  # node: pid
        self._lines: list[tuple[int, str]] = []
        self.said_last: list[str] = []  # once it is over
        self._is_over = threading.Event()
        self._tail = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> PeersJob:
        (self.folder / "output").touch()
        self._tail.start()
        try:
            for command in self._competitor.commands(self._job):
                assert isinstance(command, Start)
                self._main.append(command.start(self.folder))
                if command.node is not None:
                    self._agents[command.node] = self._main[-1].pid
                if command.port is not None:
                    _await_port(command.port)
        except BaseException:
            self._finish()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._finish()

    def strike(self, fault: str, pid: int, slot: int) -> int:
        """Do ``fault`` to the process of ``slot``, or to its whole node; the moment it was done, in ns."""
        if fault == "node":
            return self._strike_node(slot)
        process = self._own(pid)
        at_ns = time.monotonic_ns()
        process.send_signal(SIGNALS[fault])
        while fault == "exception":  # it is raised between two operations of the script
            for event in self.events():
                if event.kind == "struck":
                    return event.at_ns
            self.wait("exception", TAIL_S)
        return at_ns

    def noticed_ns(self, says: str, since_ns: int) -> int | None:
        """When the tool first said something of a fault: a line with one of the words ``says``, or unicron's ledger."""
        if not says:
            return ledger_noticed_ns(self.folder / "logs", since_ns)
        words = says.split("|")
        return next((at for at, line in self._lines if at >= since_ns and any(word in line for word in words)), None)

    def _own(self, pid: int) -> psutil.Process:
        """The process of this job that calls itself ``pid``, which is another number where it has a PID namespace."""
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(OSError, psutil.Error):
                status = Path(f"/proc/{process.pid}/status").read_text()
                line = next(line for line in status.splitlines() if line.startswith("NSpid:"))
                if int(line.split()[-1]) == pid:
                    return process
        raise ProcessLookupError(f"the job has no process {pid}")

    def _strike_node(self, node: int) -> int:
        agent = psutil.Process(self._agents[node])
        everything = [agent, *agent.children(recursive=True)]
        at_ns = time.monotonic_ns()
        for process in everything:
            with contextlib.suppress(psutil.Error):
                process.kill()
        return at_ns

    def _follow(self) -> None:
        rest = b""
        with (self.folder / "output").open("rb") as file:
            while not self._is_over.wait(TAIL_S):
                now = time.monotonic_ns()
                *whole, rest = (rest + file.read()).split(b"\n")
                self._lines += [(now, line.decode(errors="replace")) for line in whole]

    def _finish(self) -> None:
        self._is_over.set()
        self._tail.join()
        self.said_last = self.last_lines()
        self._end()
        for left in Path("/dev/shm").glob(f"*{self.folder.name}-*"):
            left.unlink(missing_ok=True)  # DLRover's memory, which outlives its processes


def _await_port(port: int) -> None:
    deadline = time.monotonic() + PORT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise TimedOutError(f"nobody listens on port {port}")
