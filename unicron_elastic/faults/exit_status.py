"""What an exit code says when the worker said nothing itself."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from types import MappingProxyType

from unicron_elastic.base.fault import Status

# Signals by which a launcher, a scheduler or a person asks a process to stop: the process itself is not at fault.
_REQUESTS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})

# What these codes usually mean: 1 and 120 from Python's documentation of sys.exit and Py_FinalizeEx, 2 from argparse,
# 126 and 127 from POSIX sh.
_MEANINGS: Mapping[int, str] = MappingProxyType(
    {
        1: "usually an unhandled exception",
        2: "usually a bad command line",
        120: "output could not be flushed at exit",
        126: "the command is not executable",
        127: "the command was not found",
    }
)


def signal_of(exit_code: int) -> int | None:
    """The signal that ended the process, or None: -n as `subprocess` has it, or 128 + n as a shell reports it.

    A shell's code counts only where the signal exists, so exit(255) is no signal.
    """
    if exit_code < 0:
        return -exit_code
    number = exit_code - 128
    return number if number > 0 and number in signal.valid_signals() else None


def exit_status(exit_code: int) -> tuple[Status, bool]:
    """Status, and whether it is a consequence, of an end of which only the exit code is known.

    SIGKILL from a launcher that gave up waiting looks like any other SIGKILL here: whoever kills must leave it out.
    """
    number = signal_of(exit_code)
    if number is None:
        return Status.EXITED_ABNORMALLY, False
    if number in _REQUESTS:
        return Status.STOPPED_BY_REQUEST, True
    return Status.KILLED_BY_SIGNAL, False


def describe_exit(exit_code: int) -> str:
    """A fragment that follows "rank 3", such as "was killed by signal 9 (SIGKILL)"."""
    number = signal_of(exit_code)
    if number is None:
        meaning = _MEANINGS.get(exit_code)
        return f"exited with code {exit_code}" + (f" ({meaning})" if meaning else "")
    verb = "was stopped by" if number in _REQUESTS else "was killed by"
    return f"{verb} signal {number}{_signal_name(number)}"


def _signal_name(number: int) -> str:
    try:
        return f" ({signal.Signals(number).name})"
    except ValueError:  # real-time signals between the named ones
        return ""
