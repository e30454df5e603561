"""py-spy, another program that reads Python's stacks out of a process, where it is installed.

Source: github.com/benfred/py-spy and its crate ``remoteprocess``. Without ``--native`` and with ``--nonblocking``
it only reads memory. With ``--native`` it attaches to every thread by ptrace(2), which holds the process while it
looks: for about 0.3 s in a worker with torch.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass

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


def find_py_spy(beside: str = BESIDE) -> str | None:
    """The program, from PATH or from ``beside`` the interpreter."""
    return shutil.which("py-spy") or shutil.which("py-spy", path=beside)


def dump(program: str | None, pid: int, timeout_s: float) -> Dump:
    """The Python stacks of a process, which is not held up and may be stopped. ``program``: what was found, if any."""
    return _run(program, ["--nonblocking", "--pid", str(pid)], timeout_s)


def dump_native(program: str | None, pid: int, timeout_s: float) -> Dump:
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
            found = _run(program, ["--native", "--pid", str(pid)], timeout_s)
        finally:
            if found.problem:
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(pidfd, signal.SIGCONT)
        return found


def _run(program: str | None, options: list[str], timeout_s: float) -> Dump:
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
