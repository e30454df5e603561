"""Signals that a process ignores: whatever program it starts does so as well, until that program takes them up."""

from __future__ import annotations

import signal
from collections.abc import Collection

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
