"""What a process has of those that started it, and hands on to each fork: its rights, its limits and its place."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import stat
from collections.abc import Mapping, Sequence

# Lines of /proc/PID/status, by what people call them.
_RIGHTS = {
    "user": ("Uid",),
    "groups": ("Gid", "Groups"),
    "capabilities": ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs"),
    "filter of system calls": ("Seccomp", "Seccomp_filters"),
}
_OF_STATUS = {
    "umask": ("Umask",),
    "blocked signals": ("SigBlk",),
    "processors": ("Cpus_allowed",),
    "nodes of memory": ("Mems_allowed",),
    "debugger": ("TracerPid",),
    "speculation": ("Speculation_Store_Bypass", "SpeculationIndirectBranch"),
    "huge pages": ("THP_enabled",),
}
_PLACES = {"control group": "cgroup", "security label": "attr/current"}
_OF_FILES = {
    "limits": "limits",
    "out-of-memory score": "oom_score_adj",
    "core dumps": "coredump_filter",
    "login": "loginuid",
    "session of logins": "sessionid",
    "personality": "personality",
}
_IOPRIO_GET = {"x86_64": 252, "aarch64": 31}  # numbers of the system call, which libc has no function for
_OF_PROCESS = 1


def standing() -> dict[str, str]:
    """Return it by what people call each part; what this kernel does not tell is not there."""
    own = os.getpid()
    found = {**walls(own), **_status(own, _OF_STATUS), **_files(own, _OF_FILES)}
    found["current folder"] = f"{os.getcwd()} {_place('.')}"
    found["scheduling"] = f"{os.sched_getscheduler(0)} {os.sched_getparam(0).sched_priority} {os.nice(0)}"
    found["I/O priority"] = _io_priority()
    found["memory policy"] = _memory_policy()
    return found


def walls(pid: int) -> dict[str, str]:
    """Return what keeps a process from others of the same user: its rights, and where it is, such as in a container.

    Raises OSError where that must not be seen.
    """
    found = {**_status(pid, _RIGHTS), **_files(pid, _PLACES)}
    for name in os.listdir(f"/proc/{pid}/ns"):
        found[f"{name} namespace"] = os.readlink(f"/proc/{pid}/ns/{name}")
    found["root folder"] = _place(f"/proc/{pid}/root")
    return found


def why_elsewhere(held: Mapping[str, str], here: Mapping[str, str]) -> str | None:
    """Say, as a clause, what of its standing a launch has otherwise than what is held for it; None if it has not."""
    for what in sorted(held.keys() | here.keys()):
        if held.get(what) != here.get(what):
            return f"this launch has another {what}"
    return None


def kind_of_stream(fd: int) -> str:
    """What an interpreter asks of a standard stream when it starts: whether it is a terminal, a file, or a pipe."""
    return f"{stat.S_IFMT(os.fstat(fd).st_mode):o}{' terminal' if os.isatty(fd) else ''}"


def _status(pid: int, wanted: Mapping[str, Sequence[str]]) -> dict[str, str]:
    with open(f"/proc/{pid}/status") as file:
        status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    return {what: " ".join(status.get(name, "") for name in names) for what, names in wanted.items()}


def _files(pid: int, wanted: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for what, path in wanted.items():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/{path}", errors="replace") as file:
            found[what] = file.read()
    return found


def _place(path: str) -> str:
    found = os.stat(path)
    return f"{found.st_dev}:{found.st_ino}"


def _io_priority() -> str:
    number = _IOPRIO_GET.get(platform.machine())
    return "" if number is None else str(ctypes.CDLL(None).syscall(number, _OF_PROCESS, 0))


def _memory_policy() -> str:
    """That of the process, as numactl sets it: it stands for the stack, which has none of its own."""
    with contextlib.suppress(OSError), open("/proc/self/numa_maps") as file:
        return next((line.split()[1] for line in file if " stack" in line), "")
    return ""
