"""Waits for collectives that may have been broken off, without waiting for ever.

Gloo (torch 2.13) forgets one kind of waiting when a connection ends: a send that was under way. The collective then
neither ends nor fails before the group's time-out, and whoever destroys the group waits for it. So the wait here looks
up now and then; once the collectives of a group are known to be broken they get a moment to say so themselves, all the
same one, and then they are abandoned: group and collectives stay in memory, untouched, until the process ends.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import Work

__all__ = ["AbandonedError", "Waiter"]

LOOK_S = 0.05  # between two looks at whether it is broken
LAST_LOOK_S = 0.001  # at one for which there is no patience left
PATIENCE_S = 0.1  # for the broken ones to fail: most do within milliseconds


class AbandonedError(RuntimeError):
    """A collective was broken off and does not end."""


class Waiter:
    """Waits for the collectives of one process. ``is_broken``: they have been broken off, and will not succeed.

    ``looks_up``: whether the back end needs it. NCCL's collectives are ended by an abort, and mind a time-out.
    """

    def __init__(self, is_broken: Callable[[], bool], *, looks_up: bool = True) -> None:
        self._is_broken = is_broken
        self._looks_up = looks_up
        self._broken_at: float | None = None

    def begin(self) -> None:
        """From now on it is about the collectives of a new group."""
        self._broken_at = None

    def wait(self, work: Work) -> None:
        """Raises what the collective raises, or AbandonedError; then nobody knows when it last uses its tensors."""
        if not self._looks_up:
            work.wait()
            return
        while True:
            is_last = self._is_over()
            try:
                work.wait(timedelta(seconds=LAST_LOOK_S if is_last else LOOK_S))
                return
            except RuntimeError:
                if work.is_completed():
                    raise
            if is_last:
                keep_for_ever(work)
                raise AbandonedError("a collective was broken off and does not end")

    def _is_over(self) -> bool:
        """Whether the collectives are broken and had their time to fail."""
        if not self._is_broken():
            return False
        now = time.monotonic()
        self._broken_at = self._broken_at or now
        return now - self._broken_at > PATIENCE_S

    def has_ended(self, work: Work) -> bool:
        """Waits for the end of a broken collective, good or bad; false if it had to be abandoned."""
        try:
            self.wait(work)
        except AbandonedError:
            return False
        except RuntimeError:
            pass
        return True


def keep_for_ever(thing: Any) -> None:
    """Has it never be destroyed, also not when the interpreter ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
