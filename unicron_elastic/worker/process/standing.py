"""What a process has of those that started it, and hands on to each fork: its rights, its limits and its place."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import stat

# Lines of /proc/self/status, by what people call them.
_OF_STATUS = {
    "umask": ("Umask",),
    "user": ("Uid",),
    "groups": ("Gid", "Groups"),
    "capabilities": ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs"),
    "filter of system calls": ("Seccomp", "Seccomp_filters"),
    "blocked signals": ("SigBlk",),
    "processors": ("Cpus_allowed",),
    "nodes of memory": ("Mems_allowed",),
    "debugger": ("TracerPid",),
    "speculation": ("Speculation_Store_Bypass", "SpeculationIndirectBranch"),
    "huge pages": ("THP_enabled",),
}
_OF_FILES = {
    "limits": "limits",
    "control group": "cgroup",
    "out-of-memory score": "oom_score_adj",
    "core dumps": "coredump_filter",
    "login": "loginuid",
    "session of logins": "sessionid",
    "security label": "attr/current",
    "personality": "personality",
}
_IOPRIO_GET = {"x86_64": 252, "aarch64": 31}  # numbers of the system call, which libc has no function for
_OF_PROCESS = 1


def standing() -> dict[str, str]:
    """Return it by what people call each part; what this kernel does not tell is not there."""
    found = {}
    with open("/proc/self/status") as file:
        status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    for what, names in _OF_STATUS.items():
        found[what] = " ".join(status.get(name, "") for name in names)
    for what, path in _OF_FILES.items():
        with contextlib.suppress(OSError), open(f"/proc/self/{path}", errors="replace") as file:
            found[what] = file.read()
    for name in os.listdir("/proc/self/ns"):
        with contextlib.suppress(OSError):
            found[f"{name} namespace"] = os.readlink(f"/proc/self/ns/{name}")
    found["root folder"] = _place("/")
    found["current folder"] = f"{os.getcwd()} {_place('.')}"
    found["scheduling"] = f"{os.sched_getscheduler(0)} {os.sched_getparam(0).sched_priority} {os.nice(0)}"
    found["I/O priority"] = _io_priority()
    found["memory policy"] = _memory_policy()
    return found


def kind_of_stream(fd: int) -> str:
    """What an interpreter asks of a standard stream when it starts: whether it is a terminal, a file, or a pipe."""
    return f"{stat.S_IFMT(os.fstat(fd).st_mode):o}{' terminal' if os.isatty(fd) else ''}"


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
