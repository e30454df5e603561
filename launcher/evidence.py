"""What can be known of workers that hang, gathered before anything is done: stacks, collectives, threads, the host.

Everything here only looks. It runs in a thread of its own, because a sick host may let any of it wait; whoever asked
goes on without it when the time is up.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from unicron_elastic.health.files import read
from unicron_elastic.launcher.activity import activity, threads
from unicron_elastic.launcher.whereabouts import Whereabouts
from unicron_elastic.worker.stacks import FILE_NAME, STACK_SIGNAL

__all__ = ["Evidence", "Subject", "gather"]

STACK_DEADLINE_S = 2.0
STACK_SETTLE_S = 0.01  # faulthandler writes line by line: a file that does not grow for so long is complete
STACK_BYTES_MAX = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One worker, and what the agent knows of it."""

    rank: int
    local_rank: int
    pid: int
    doing: str  # its step and phase, in words
    whereabouts: Whereabouts
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

    threading.Thread(target=work, name="unicron-evidence", daemon=True).start()


def _gather(subjects: Sequence[Subject], reason: str) -> Evidence:
    with ThreadPoolExecutor(max_workers=min(len(subjects), 16)) as pool:
        stacks = list(pool.map(_stack, subjects))
    parts = [reason, "", *_host()]
    for subject, stack in zip(subjects, stacks, strict=True):
        parts += ["", *_of_worker(subject), "", stack or "No stack could be read."]
    found = tuple((subject.local_rank, stack) for subject, stack in zip(subjects, stacks, strict=True) if stack)
    return Evidence(text="\n".join(parts) + "\n", stacks=found)


def _of_worker(subject: Subject) -> list[str]:
    lines = [f"== rank {subject.rank}, pid {subject.pid}: {subject.doing}"]
    where = subject.whereabouts
    if where.is_silent(time.monotonic()):
        lines.append("It does not answer the question which collectives it has begun: its interpreter does not run.")
    for group in where.groups:
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
        done = subprocess.run(command, capture_output=True, timeout=STACK_DEADLINE_S, check=False)
        if done.returncode == 0:
            return done.stdout[:STACK_BYTES_MAX].decode(errors="replace").rstrip()
    return ""


def _by_faulthandler(subject: Subject) -> str:
    doing = activity(subject.pid)
    path = f"/proc/{subject.pid}/fd/{subject.stack_fd}"
    if subject.stack_fd is None or doing is None or doing.stopped:
        return ""
    with contextlib.suppress(OSError):
        if FILE_NAME in os.readlink(path):  # the script may have closed it and taken its number
            with open(path, "rb") as file:
                return _written(file.fileno(), lambda: os.kill(subject.pid, STACK_SIGNAL))
    return ""


def _written(fd: int, ask: Callable[[], None]) -> str:
    """What comes to a file once ``ask`` was called."""
    before = latest = os.fstat(fd).st_size
    ask()
    deadline = time.monotonic() + STACK_DEADLINE_S
    while time.monotonic() < deadline:
        time.sleep(STACK_SETTLE_S)
        size = os.fstat(fd).st_size
        if before < size == latest:
            return os.pread(fd, STACK_BYTES_MAX, before).decode(errors="replace").rstrip()
        latest = size
    return ""
