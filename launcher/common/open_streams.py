"""Which of the standard streams a launcher was started with; a daemon may have closed some."""

from __future__ import annotations

import os
import sys

_held: set[int] = set()


def hold_closed() -> None:
    """Occupies each closed stream's number, so that no socket of ours gets it and takes it for a script's output.

    Called once, before sockets are opened. What it opens is not inherited: a worker has the stream closed as well.
    """
    streams = (sys.__stdin__, sys.__stdout__, sys.__stderr__)
    for fd in (0, 1, 2):
        if not _is_open(fd):
            os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)  # takes the lowest free number, which is this one
        elif streams[fd] is None:  # it was closed when Python started; libffi keeps itself open once ctypes is imported
            os.set_inheritable(fd, False)
        else:
            continue
        _held.add(fd)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process's life
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def open_streams() -> list[int]:
    """The numbers of the standard streams that workers are to share."""
    return [fd for fd in (0, 1, 2) if fd not in _held and _is_open(fd)]


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
