"""The mark in the environment by which the processes of a run are known, and in it those of each worker."""

from __future__ import annotations

import ctypes

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
