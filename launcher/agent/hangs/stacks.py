"""The stacks of one worker: Python's own, which come at once, and those with the frames of C and C++ below them."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from unicron_elastic.health.host.files import read
from unicron_elastic.launcher.agent.process.activity import activity, is_in_io
from unicron_elastic.worker.exceptions import FILE_NAME, STACK_SIGNAL

# py-spy, another program that reads Python's stacks out of a process, where it is installed.
#
# Source: github.com/benfred/py-spy and its crate ``remoteprocess``. Without ``--native`` and with ``--nonblocking``
# it only reads memory. With ``--native`` it attaches to every thread by ptrace(2), which holds the process while it
# looks: for about 0.3 s in a worker with torch.


BESIDE = os.path.dirname(sys.executable)  # a virtual environment's programs, also where it was not activated

_starting = threading.Lock()
_readers: set[subprocess.Popen[bytes]] = set()


@atexit.register
def _end_readers() -> None:
    """They must not outlive this process, which does not wait for them; none starts from now on."""
    _starting.acquire(timeout=1.0)
    for reader in list(_readers):
        reader.kill()


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """What py-spy wrote, or why it wrote nothing."""

    text: str = ""
    problem: str = ""


def find() -> str | None:
    """The program, from PATH or from beside the interpreter."""
    return shutil.which("py-spy") or shutil.which("py-spy", path=BESIDE)


def dump(pid: int, timeout_s: float) -> Dump:
    """The Python stacks of a process, which is not held up and may be stopped."""
    return _run(["--nonblocking", "--pid", str(pid)], timeout_s)


def dump_native(pid: int, timeout_s: float) -> Dump:
    """The stacks with their frames of C and C++. The process is held meanwhile, and goes on whatever becomes of py-spy.

    It must not be stopped by a signal. If py-spy fails, SIGCONT is sent, which no process notices that was not stopped
    and does not ask to hear of it: who attaches stops each thread by SIGSTOP, and if it dies before it has waited for
    that, the stop is the process's own (ptrace(2), "Death under ptrace" and "Attaching and detaching"). In a thread
    that sleeps in the kernel it would come much later; SIGCONT takes that back as well.
    """
    with contextlib.ExitStack() as opened:
        try:
            pidfd = os.pidfd_open(pid)  # its number may become another's
        except OSError:
            return Dump(problem="the process has ended")
        opened.callback(os.close, pidfd)
        found = Dump(problem="py-spy failed")
        try:
            found = _run(["--native", "--pid", str(pid)], timeout_s)
        finally:
            if found.problem:
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(pidfd, signal.SIGCONT)
        return found


def _run(options: list[str], timeout_s: float) -> Dump:
    program = find()
    if program is None:
        return Dump(problem="py-spy is not installed")
    try:
        with _starting:
            reader = subprocess.Popen(
                [program, "dump", *options], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            _readers.add(reader)
    except OSError as error:
        return Dump(problem=f"py-spy cannot be run: {error.strerror or error}")
    try:
        written, said = reader.communicate(timeout=max(0.0, timeout_s))
    except subprocess.TimeoutExpired:
        return Dump(problem=f"py-spy took longer than {timeout_s:.1f} s")
    finally:
        _end(reader)
    text = written.decode(errors="replace").rstrip()
    if reader.returncode == 0 and text:
        return Dump(text=text)
    return Dump(problem=_why(reader.returncode, said.decode(errors="replace")))


def _end(reader: subprocess.Popen[bytes]) -> None:
    reader.kill()
    reader.wait()
    for pipe in (reader.stdout, reader.stderr):
        if pipe is not None:
            pipe.close()
    _readers.discard(reader)


def _why(exit_code: int, said: str) -> str:
    """Return the first of several lines, which names the error; those after it are its causes or the usage."""
    line = next((line.strip() for line in said.splitlines() if line.strip()), "it wrote nothing")
    return f"py-spy failed with exit code {exit_code}: {line[:200]}"


PY_SPY_DEADLINE_S = 1.5
FAULTHANDLER_DEADLINE_S = 1.0
NATIVE_LEAST_S = 0.2  # with less time left, no native stack is begun

STACK_LOOK_S = 0.005
# faulthandler writes line by line. It has done so when the file does not grow for so long and no thread runs; while
# one runs, it may be the one that writes, and wait for a CPU.
STACK_SETTLE_S = 0.01
STACK_SETTLE_RUNNING_S = 0.1
STACK_BYTES_MAX = 64 * 1024
NATIVE_LINE_MAX = 240  # characters; the names of C++ templates have no end
_LIBRARY_MAX = 40


def python_stack(pid: int, stack_fd: int | None) -> str:
    """Python's stacks by py-spy where it is installed, which reads stopped processes as well, else by faulthandler.

    ``stack_fd`` is the number, in the worker, of the file that its faulthandler writes to. "" if there are none.
    """
    return dump(pid, PY_SPY_DEADLINE_S).text[:STACK_BYTES_MAX] or by_faulthandler(pid, stack_fd)


def native_stack(pid: int, deadline: float) -> str:
    """The stacks with frames of C and C++, or a sentence that says why there are none; by ``deadline`` (monotonic).

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
    found = dump_native(pid, left_s)
    if not found.text:
        return f"No native stack: {found.problem}."
    return "\n".join(map(_clipped, found.text.splitlines()))[:STACK_BYTES_MAX]


def _clipped(line: str) -> str:
    """Without its middle if it is too long: the name comes first, and the library last."""
    if len(line) <= NATIVE_LINE_MAX:
        return line
    return f"{line[: NATIVE_LINE_MAX - _LIBRARY_MAX]}...{line[-_LIBRARY_MAX:]}"


def by_faulthandler(pid: int, stack_fd: int | None) -> str:
    """What Python writes when asked by a signal; "" if the process is stopped, has ended or takes no such question."""
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
            return _written(file.fileno(), pid, lambda: signal.pidfd_send_signal(pidfd, STACK_SIGNAL))
    return ""


def _is_handled(pid: int) -> bool:
    """Whether the process has a handler for STACK_SIGNAL, without which it would end."""
    for line in (read(f"/proc/{pid}/status") or "").splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (STACK_SIGNAL - 1) & 1)
    return False


def _written(fd: int, pid: int, ask: Callable[[], None]) -> str:
    """What comes to a file once ``ask`` was called; of too much, the end, where the main thread is."""
    before = size = os.fstat(fd).st_size
    ask()
    grew_at = time.monotonic()
    deadline = grew_at + FAULTHANDLER_DEADLINE_S
    while (now := time.monotonic()) < deadline:
        time.sleep(STACK_LOOK_S)
        latest, size = size, os.fstat(fd).st_size
        if size != latest:
            grew_at = now
        elif size > before and now - grew_at >= STACK_SETTLE_S:
            doing = activity(pid)
            if doing is None or not doing.runnable or now - grew_at >= STACK_SETTLE_RUNNING_S:
                break
    start = max(before, size - STACK_BYTES_MAX)
    return os.pread(fd, size - start, start).decode(errors="replace").rstrip()
