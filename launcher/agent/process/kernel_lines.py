"""What the kernel says of a process's threads: where they wait, in which call, for which file.

Sources: proc_pid_stat(5), proc_pid_wchan(5), proc_pid_syscall(5), proc_pid_stack(5); the numbers of system calls
are those of the kernel's tables for the two machines. Nothing here attaches to the process or holds it up.
`syscall` needs the right to trace it, and `stack` that of root: what may not be read is left out.
"""

from __future__ import annotations

import os
import platform
import struct
from collections import Counter

from unicron_elastic.health.host.files import read
from unicron_elastic.launcher.agent.process.activity import state, threads

LINES_MAX = 40  # kinds of threads told of one process
_FRAMES_MAX = 12
_STACKS_MAX = 4

_NUMBERS = {
    "x86_64": "read 0 write 1 close 3 poll 7 ioctl 16 pread64 17 pwrite64 18 select 23 nanosleep 35 connect 42 "
    "accept 43 sendto 44 recvfrom 45 sendmsg 46 recvmsg 47 wait4 61 fsync 74 futex 202 restart_syscall 219 "
    "clock_nanosleep 230 exit_group 231 epoll_wait 232 waitid 247 openat 257 pselect6 270 ppoll 271 epoll_pwait 281 "
    "accept4 288",
    "aarch64": "epoll_pwait 22 ioctl 29 openat 56 close 57 read 63 write 64 pread64 67 pwrite64 68 pselect6 72 "
    "ppoll 73 fsync 82 exit_group 94 waitid 95 futex 98 nanosleep 101 clock_nanosleep 115 restart_syscall 128 "
    "accept 202 connect 203 sendto 206 recvfrom 207 sendmsg 211 recvmsg 212 accept4 242 wait4 260",
}
# Their first argument is a descriptor, whose file tells what is waited for: a driver, a socket, a file on a server.
_OF_FILES = frozenset({"read", "write", "close", "ioctl", "pread64", "pwrite64", "fsync"}) | frozenset(
    {"connect", "accept", "accept4", "sendto", "recvfrom", "sendmsg", "recvmsg"}
)


def _names(machine: str) -> dict[int, str]:
    words = _NUMBERS.get(machine, "").split()
    return {int(number): name for name, number in zip(words[::2], words[1::2], strict=True)}


_NAMES = _names(platform.machine())


# Calls in which a main thread waits for a terminal: `read`, and before it those that say when there is something.
_TERMINALS = ("/dev/pts/", "/dev/tty", "/dev/console", "/dev/hvc")
_POLLED = struct.Struct("ihh")  # struct pollfd


def reads_terminal(pid: int) -> bool:
    """Whether the main thread waits for what a person types; False where that may not be read."""
    words = (read(f"/proc/{pid}/syscall") or "").split()
    if len(words) < 3 or not words[0].isdigit():
        return False
    name, first = _NAMES.get(int(words[0]), ""), int(words[1], 16)
    if name in ("select", "pselect6"):
        number = first - 1  # the greatest that is waited for
    elif name == "read":
        number = first
    elif name in ("poll", "ppoll") and int(words[2], 16) == 1:
        number = _polled(pid, first)
    else:
        return False
    try:
        return os.readlink(f"/proc/{pid}/fd/{number}").startswith(_TERMINALS)
    except OSError:
        return False


def _polled(pid: int, address: int) -> int:
    """Return the descriptor of the one ``pollfd`` there; -1 if it may not be read."""
    try:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            return int(_POLLED.unpack(os.pread(memory.fileno(), _POLLED.size, address))[0])
    except (OSError, struct.error, OverflowError):
        return -1


def summary_lines(pid: int) -> list[str]:
    """How many threads are in which state, and where in the kernel they wait."""
    seen: Counter[tuple[str, str]] = Counter()
    for thread in threads(pid):
        if letter := state(pid, thread):
            seen[letter, _wchan(pid, thread)] += 1
    return [
        f"{count} thread{'' if count == 1 else 's'} in state {letter}{f', waiting in {where}' if where else ''}"
        for (letter, where), count in sorted(seen.items())
    ]


def kernel_lines(pid: int, lines_max: int = LINES_MAX) -> list[str]:
    """Each kind of thread with its name and the call it is in, and the kernel's stacks of the main thread and of those
    that no signal wakes.
    """
    seen: Counter[str] = Counter()
    stuck = [str(pid)]
    for thread in sorted(threads(pid), key=int):
        letter = state(pid, thread)
        if not letter:
            continue
        seen[_thread_line(pid, thread, letter)] += 1
        if letter == "D" and thread not in stuck:
            stuck.append(thread)
    lines = [line if count == 1 else f"{line} ({count} threads)" for line, count in seen.items()]
    left_out = len(lines) - lines_max
    lines = [*lines[:lines_max], f"{left_out} more kinds of threads"] if left_out > 0 else lines
    return lines + [line for thread in stuck[:_STACKS_MAX] for line in _stack_line(pid, thread)]


def is_in_io(pid: int) -> bool:
    """Whether some thread is in a sleep that no signal ends: it cannot be held, and who tried would wait with it."""
    return any(state(pid, thread) == "D" for thread in threads(pid))


def _thread_line(pid: int, thread: str, letter: str) -> str:
    name = (read(f"/proc/{pid}/task/{thread}/comm") or "").strip() or "?"
    where = _wchan(pid, thread)
    call = _call(pid, read(f"/proc/{pid}/task/{thread}/syscall") or "")
    parts = [f"state {letter}", f"waiting in {where}" if where else "", f"system call {call}" if call else ""]
    return f"thread {name}: {', '.join(part for part in parts if part)}"


def _call(pid: int, text: str) -> str:
    """The name of a system call, with the file it is about; "" for one that is not known, or if none is made."""
    words = text.split()
    if len(words) < 2 or not words[0].isdigit():  # "running", or "-1" of a thread that was interrupted
        return ""
    name = _NAMES.get(int(words[0]), words[0])
    if name not in _OF_FILES:
        return name
    try:
        return f"{name} of {os.readlink(f'/proc/{pid}/fd/{int(words[1], 16)}')}"
    except (OSError, ValueError):
        return name


def _stack_line(pid: int, thread: str) -> list[str]:
    frames = [
        line.split()[-1].partition("+")[0] for line in (read(f"/proc/{pid}/task/{thread}/stack") or "").splitlines()
    ]
    if not frames:
        return []
    return [f"thread {thread} in the kernel, latest first: {', '.join(frames[:_FRAMES_MAX])}"]


def _wchan(pid: int, thread: str) -> str:
    where = (read(f"/proc/{pid}/task/{thread}/wchan") or "").strip()
    return "" if where == "0" else where
