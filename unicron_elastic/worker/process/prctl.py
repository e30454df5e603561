"""The few Linux calls that Python's standard library lacks."""

from __future__ import annotations

import ctypes
import os
import signal
import time

# From Linux's include/uapi/linux/prctl.h.
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
REPARENT_DEADLINE_S = 5.0


def _prctl(option: int, argument: int | bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer = ctypes.c_char_p(argument) if isinstance(argument, bytes) else ctypes.c_ulong(argument)
    if libc.prctl(option, pointer, 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, os.strerror(errno))


def die_with_parent(parent_pid: int) -> None:
    """The kernel kills this process when its parent dies; exits at once if the parent is dead already."""
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent_pid:
        os._exit(128 + signal.SIGKILL)


def outlive_parent() -> None:
    """Takes ``die_with_parent`` back."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def wait_for_parent(parent_pid: int) -> None:
    """Waits the moment until the process in between has ended and that one has taken this one over."""
    deadline = time.monotonic() + REPARENT_DEADLINE_S
    while os.getppid() != parent_pid and time.monotonic() < deadline:
        time.sleep(0.0002)


def become_subreaper() -> None:
    """Orphans among this process's descendants become its children, so that none escapes."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def be_no_subreaper() -> None:
    """Takes ``become_subreaper`` back, for orphans to come."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 0)


def set_thread_name(name: str) -> None:
    """What ``ps -o comm`` and ``top`` show for this thread; at most 15 bytes."""
    _prctl(_PR_SET_NAME, name.encode()[:15])
