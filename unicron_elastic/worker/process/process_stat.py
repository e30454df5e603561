"""What the kernel says of a process, or of one of its threads, in one line: proc_pid_stat(5)."""

from __future__ import annotations

from typing import NamedTuple

# Places after the name. That stands in parentheses and may hold anything, parentheses and blanks too.
_STATE, _PARENT, _FLAGS, _UTIME, _STIME, _THREADS, _STARTED, _EXIT_STATUS = 0, 1, 6, 11, 12, 17, 19, 49


class ProcessStat(NamedTuple):
    """`ProcessStat` is such a line, of which it has what somebody asks for."""

    name: str
    state: str  # a letter
    parent: int
    flags: int  # Linux's include/linux/sched.h
    cpu_ticks: int  # of all its threads, in the user's code and in the kernel
    threads: int
    started_at: int  # clock ticks after the boot, which tells a reused pid apart
    exit_status: int | None  # as wait(2) has it; 0 to those who may not look

    @property
    def has_ended(self) -> bool:
        """Return whether it has, although nobody has collected it."""
        return self.state in ("Z", "X")


def parse_stat(text: str) -> ProcessStat:
    """Return what the line says. Raises ValueError for what is no such line."""
    head, _, rest = text.rpartition(")")
    fields = rest.split()
    if len(fields) <= _STARTED:
        raise ValueError(f"not what the kernel says of a process: {text!r}")
    return ProcessStat(
        name=head.partition("(")[2],
        state=fields[_STATE],
        parent=int(fields[_PARENT]),
        flags=int(fields[_FLAGS]),
        cpu_ticks=int(fields[_UTIME]) + int(fields[_STIME]),
        threads=int(fields[_THREADS]),
        started_at=int(fields[_STARTED]),
        exit_status=int(fields[_EXIT_STATUS]) if len(fields) > _EXIT_STATUS else None,
    )


def read_stat(path: str) -> ProcessStat | None:
    """Return what stands at ``path``; None if it is gone, cannot be read, or is no such line."""
    try:
        with open(path, errors="replace") as file:
            return parse_stat(file.read())
    except (OSError, ValueError):
        return None
