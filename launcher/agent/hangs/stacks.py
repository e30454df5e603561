"""The stacks of one worker: Python's own, which come at once, and those with the frames of C and C++ below them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from unicron_elastic.health.host.files import read
from unicron_elastic.launcher.agent.hangs.py_spy import dump, dump_native, find_py_spy
from unicron_elastic.launcher.agent.process.activity import activity
from unicron_elastic.launcher.agent.process.kernel_lines import is_in_io
from unicron_elastic.worker.process.stacks import FILE_NAME, STACK_SIGNAL

NATIVE_LEAST_S = 0.2  # with less time left, no native stack is begun

STACK_LOOK_S = 0.005
# faulthandler writes line by line. It has done so when the file does not grow for so long and no thread runs; while
# one runs, it may be the one that writes, and wait for a CPU.
STACK_SETTLE_S = 0.01
STACK_SETTLE_RUNNING_S = 0.1
NATIVE_LINE_MAX = 240  # characters; the names of C++ templates have no end
_LIBRARY_MAX = 40


@dataclass(frozen=True, slots=True)
class StackReader:
    """`StackReader` reads the stacks of workers: by py-spy, which ``find`` looks for, or by Python's faulthandler."""

    find: Callable[[], str | None] = find_py_spy
    py_spy_s: float = 1.5
    faulthandler_s: float = 1.0
    bytes_max: int = 64 * 1024  # of one worker

    def python(self, pid: int, stack_fd: int | None) -> str:
        """Return Python's stacks: by py-spy where it is installed, which reads stopped processes, else by faulthandler.

        ``stack_fd`` is the number, in the worker, of the file that its faulthandler writes to. "" if there are none.
        """
        found = dump(self.find(), pid, self.py_spy_s).text[: self.bytes_max]
        return found or self._by_faulthandler(pid, stack_fd)

    def native(self, pid: int, deadline: float) -> str:
        """Return the stacks with frames of C and C++, or a sentence that says why there are none, by ``deadline``.

        Who reads them holds the process for a moment. One that is stopped is left as it is, and one with a thread that
        cannot be held would keep the reader waiting and all its other threads held until then.
        """
        left_s = deadline - time.monotonic()
        doing = activity(pid)
        if doing is None:
            return "No native stack: the process has ended."
        if doing.stopped:
            return "No native stack: the process is stopped."
        if is_in_io(pid):
            return "No native stack: a thread sleeps in the kernel where it cannot be held."
        if left_s < NATIVE_LEAST_S:
            return "No native stack: there was no time left."
        found = dump_native(self.find(), pid, left_s)
        if not found.text:
            return f"No native stack: {found.problem}."
        return "\n".join(map(_clipped, found.text.splitlines()))[: self.bytes_max]

    def _by_faulthandler(self, pid: int, stack_fd: int | None) -> str:
        """Return what Python writes when asked by a signal; "" of a process that is stopped or takes no question."""
        doing = activity(pid)
        if stack_fd is None or doing is None or doing.stopped:
            return ""
        path = f"/proc/{pid}/fd/{stack_fd}"
        with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
            pidfd = os.pidfd_open(pid)  # its number may become another's, to whom the signal would be the end
            opened.callback(os.close, pidfd)
            # The script may have closed the file and taken its number, or taken the handler away.
            if os.readlink(path) == f"/memfd:{FILE_NAME} (deleted)" and _is_handled(pid):
                file = opened.enter_context(open(path, "rb"))
                return self._written(file.fileno(), pid, lambda: signal.pidfd_send_signal(pidfd, STACK_SIGNAL))
        return ""

    def _written(self, fd: int, pid: int, ask: Callable[[], None]) -> str:
        """Return what comes to a file once ``ask`` was called; of too much, the end, where the main thread is."""
        before = size = os.fstat(fd).st_size
        ask()
        grew_at = time.monotonic()
        deadline = grew_at + self.faulthandler_s
        while (now := time.monotonic()) < deadline:
            time.sleep(STACK_LOOK_S)
            latest, size = size, os.fstat(fd).st_size
            if size != latest:
                grew_at = now
            elif size > before and now - grew_at >= STACK_SETTLE_S:
                doing = activity(pid)
                if doing is None or not doing.runnable or now - grew_at >= STACK_SETTLE_RUNNING_S:
                    break
        start = max(before, size - self.bytes_max)
        return os.pread(fd, size - start, start).decode(errors="replace").rstrip()


STACK_READER = StackReader()


def _clipped(line: str) -> str:
    """Without its middle if it is too long: the name comes first, and the library last."""
    if len(line) <= NATIVE_LINE_MAX:
        return line
    return f"{line[: NATIVE_LINE_MAX - _LIBRARY_MAX]}...{line[-_LIBRARY_MAX:]}"


def _is_handled(pid: int) -> bool:
    """Whether the process has a handler for STACK_SIGNAL, without which it would end."""
    for line in (read(f"/proc/{pid}/status") or "").splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (STACK_SIGNAL - 1) & 1)
    return False
