"""A keeper that another launcher has started: it is no child of this process."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess


class TakenKeeper:
    """`TakenKeeper` is such a process, with what is used of ``subprocess.Popen`` for one of our own."""

    def __init__(self, pid: int) -> None:
        """Raises OSError if it has ended."""
        self.pid = pid
        self.returncode: int | None = None  # 0 once it has ended: how is for its parent to know
        self._pidfd = os.pidfd_open(pid)

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float) -> int:
        """Wait for its end. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._pidfd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("the keeper", timeout)
            self.returncode = 0
            os.close(self._pidfd)
        return self.returncode
