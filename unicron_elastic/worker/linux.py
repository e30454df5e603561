"""The few Linux calls that Python's standard library lacks."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Collection

# From Linux's include/uapi/linux/prctl.h.
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


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


def become_subreaper() -> None:
    """Orphans among this process's descendants become its children, so that none escapes."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_thread_name(name: str) -> None:
    """What ``ps -o comm`` and ``top`` show for this thread; at most 15 bytes."""
    _prctl(_PR_SET_NAME, name.encode()[:15])


# The mark in the environment by which the processes of a run are known, and in it those of each worker.


MARK = "UNICRON_RUN_TOKEN"  # the variable; whatever a worker starts inherits it


def mark_of(token: str, number: int) -> str:
    """The mark of what was started by request ``number`` of the run ``token``; all marks of a run are of one length."""
    return f"{token}.{number:08d}"


def token_of(mark: str) -> str:
    """The run that a mark is of."""
    return mark.rpartition(".")[0] or mark


def show_mark(mark: str) -> None:
    """Show ``mark`` in /proc/PID/environ of this fork, and of what it forks, in the place of its parent's.

    The kernel reads there what the program was started with, in memory that is this process's own by now. Does nothing
    if there is no mark of that length.
    """
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    address = libc.getenv(MARK.encode())
    if address and len(ctypes.string_at(address)) == len(mark.encode()):
        ctypes.memmove(address, mark.encode(), len(mark.encode()))


# Signals that a process ignores: whatever program it starts does so as well, until that program takes them up.


_NEVER_CAUGHT = {signal.SIGKILL, signal.SIGSTOP}
_IGNORED_BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}  # each interpreter ignores them, and subprocess restores them


def ignored_signals() -> list[int]:
    """What this process ignores now (nohup's SIGHUP, say)."""
    return [int(number) for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN]


def inherit(ignored: Collection[int]) -> None:
    """Leaves to the program to be executed what it would have of a ``subprocess.Popen`` where these are ignored."""
    for number in signal.valid_signals() - _NEVER_CAUGHT:
        is_ignored = number in ignored and number not in _IGNORED_BY_PYTHON
        signal.signal(number, signal.SIG_IGN if is_ignored else signal.SIG_DFL)


def ignore_instead(before: Collection[int], now: Collection[int]) -> None:
    """Makes an interpreter that started where ``before`` was ignored look as if it had started where ``now`` is."""
    for number in set(now) - set(before):
        signal.signal(number, signal.SIG_IGN)
    for number in set(before) - set(now) - _IGNORED_BY_PYTHON:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
