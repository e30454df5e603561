"""What can be known of workers that hang, gathered before anything is done: stacks, collectives, threads, the host.

Everything here only looks. It runs in a thread of its own, because a sick host may let any of it wait; whoever asked
goes on without it when the time is up.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from unicron_elastic.health.files import read
from unicron_elastic.launcher.activity import activity, threads
from unicron_elastic.launcher.whereabouts import GroupPosition
from unicron_elastic.worker.stacks import FILE_NAME, STACK_SIGNAL

__all__ = ["Evidence", "Subject", "gather"]

# All together less than recovery's Policy.evidence_timeout_s, after which nobody waits for a report any more.
PY_SPY_DEADLINE_S = 1.5
FAULTHANDLER_DEADLINE_S = 1.0
STACKS_DEADLINE_S = 2.6

AT_ONCE_MAX = 16  # workers whose stacks are read at the same time
STACK_LOOK_S = 0.005
# faulthandler writes line by line. It has done so when the file does not grow for so long and no thread runs; while
# one runs, it may be the one that writes, and wait for a CPU.
STACK_SETTLE_S = 0.01
STACK_SETTLE_RUNNING_S = 0.1
STACK_BYTES_MAX = 64 * 1024

_starting = threading.Lock()
_readers: set[subprocess.Popen[bytes]] = set()


@atexit.register
def _end_readers() -> None:
    """They must not outlive this process, which does not wait for them; none starts from now on."""
    _starting.acquire(timeout=1.0)
    for reader in list(_readers):
        reader.kill()


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One worker, and what the agent knew of it when it asked for evidence."""

    rank: int
    local_rank: int
    pid: int
    doing: str  # its step and phase, in words
    is_silent: bool  # owes an answer
    groups: tuple[GroupPosition, ...]  # its latest answer
    stack_fd: int | None  # the number, in the worker, of the file that its faulthandler writes to


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The report, and the Python stacks alone by local rank."""

    text: str
    stacks: tuple[tuple[int, str], ...]


def gather(subjects: Sequence[Subject], reason: str, on_done: Callable[[Evidence], None]) -> None:
    """Gathers in the background and calls ``on_done`` once, from another thread."""

    def work() -> None:
        try:
            found = _gather(subjects, reason)
        except Exception as error:
            found = Evidence(text=f"{reason}\n\nThere is no more: {error!r}\n", stacks=())
        on_done(found)

    _in_background(work)


def _in_background(work: Callable[[], None]) -> None:
    """A thread that holds up neither who began it nor the end of this process, as those of an executor would."""
    threading.Thread(target=work, name="unicron-evidence", daemon=True).start()


def _gather(subjects: Sequence[Subject], reason: str) -> Evidence:
    stacks = _stacks(subjects)
    parts = [reason, "", *_host()]
    for subject in subjects:
        parts += ["", *_of_worker(subject), "", stacks.get(subject.local_rank, "") or "No stack could be read."]
    found = tuple((local_rank, stack) for local_rank, stack in sorted(stacks.items()) if stack)
    return Evidence(text="\n".join(parts) + "\n", stacks=found)


def _stacks(subjects: Sequence[Subject]) -> dict[int, str]:
    """The stacks, by local rank, of those whose came in time."""
    waiting: queue.SimpleQueue[Subject] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    for subject in subjects:
        waiting.put(subject)

    def work() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                subject = waiting.get_nowait()
                stack = ""
                with contextlib.suppress(Exception):  # it may have ended
                    stack = _stack(subject)
                done.put((subject.local_rank, stack))

    end = time.monotonic() + STACKS_DEADLINE_S
    for _ in range(min(len(subjects), AT_ONCE_MAX)):
        _in_background(work)
    found: dict[int, str] = {}
    with contextlib.suppress(queue.Empty):
        while len(found) < len(subjects):
            local_rank, stack = done.get(timeout=max(0.0, end - time.monotonic()))
            found[local_rank] = stack
    return found


def _of_worker(subject: Subject) -> list[str]:
    lines = [f"== rank {subject.rank}, pid {subject.pid}: {subject.doing}"]
    if subject.is_silent:
        lines.append("It does not answer the question which collectives it has begun: its interpreter does not run.")
    for group in subject.groups:
        ended = "" if group.ended is None else f", {group.ended} ended"
        lines.append(f"process group {group.name}: {group.begun} collectives begun{ended}")
    return [*lines, *_threads(subject.pid)]


def _threads(pid: int) -> list[str]:
    """How many threads are in which state, and where in the kernel they wait."""
    seen: Counter[tuple[str, str]] = Counter()
    for thread in threads(pid):
        folder = f"/proc/{pid}/task/{thread}"
        state = (read(f"{folder}/stat") or "").rpartition(") ")[2][:1]
        where = (read(f"{folder}/wchan") or "").strip()
        if state:
            seen[state, "" if where == "0" else where] += 1
    return [
        f"{count} thread{'' if count == 1 else 's'} in state {state}{f', waiting in {where}' if where else ''}"
        for (state, where), count in sorted(seen.items())
    ]


def _host() -> list[str]:
    memory = (read("/proc/meminfo") or "").splitlines()
    wanted = [" ".join(line.split()) for line in memory if line.startswith(("MemTotal", "MemAvailable", "SwapFree"))]
    lines = [f"load of the host: {(read('/proc/loadavg') or '').strip()}", f"memory of the host: {', '.join(wanted)}"]
    for resource in ("cpu", "io", "memory"):
        pressure = (read(f"/proc/pressure/{resource}") or "").splitlines()
        lines += [f"pressure on {resource}: {line}" for line in pressure[:1]]
    return lines


def _stack(subject: Subject) -> str:
    """Python's stacks by py-spy where it is installed, which reads stopped processes as well, else by faulthandler."""
    return _by_py_spy(subject.pid) or _by_faulthandler(subject)


def _by_py_spy(pid: int) -> str:
    program = shutil.which("py-spy")
    if program is None:
        return ""
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        with _starting:
            reader = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            _readers.add(reader)
        try:
            written, _ = reader.communicate(timeout=PY_SPY_DEADLINE_S)
        finally:
            reader.kill()
            reader.wait()
            _readers.discard(reader)
        if reader.returncode == 0:
            return written[:STACK_BYTES_MAX].decode(errors="replace").rstrip()
    return ""


def _by_faulthandler(subject: Subject) -> str:
    doing = activity(subject.pid)
    if subject.stack_fd is None or doing is None or doing.stopped:
        return ""
    path = f"/proc/{subject.pid}/fd/{subject.stack_fd}"
    with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
        pidfd = os.pidfd_open(subject.pid)  # its number may become another's, to whom the signal would be the end
        opened.callback(os.close, pidfd)
        # The script may have closed the file and taken its number, or taken the handler away.
        if os.readlink(path) == f"/memfd:{FILE_NAME} (deleted)" and _is_handled(subject.pid):
            file = opened.enter_context(open(path, "rb"))
            return _written(file.fileno(), subject.pid, lambda: signal.pidfd_send_signal(pidfd, STACK_SIGNAL))
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
