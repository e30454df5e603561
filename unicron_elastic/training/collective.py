"""Waits for collectives that may have been broken off, without waiting for ever.

Gloo (torch 2.13) forgets one kind of waiting when a connection ends: a send that was under way. The collective then
neither ends nor fails before the group's time-out, and whoever destroys the group waits for it. So the wait here looks
up now and then; once the collective is known to be broken it gets a moment to say so itself, and then it is abandoned:
the group and the collective stay in memory, untouched, until the process ends.
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
PATIENCE_S = 0.2  # for a broken one to fail: most do within milliseconds


class AbandonedError(RuntimeError):
    """A collective was broken off and does not end."""


class Waiter:
    """Waits for the collectives of one process. ``is_broken``: they have been broken off, and will not succeed.

    ``looks_up``: whether the back end needs it. NCCL's collectives are ended by an abort, and mind a time-out.
    """

    def __init__(self, is_broken: Callable[[], bool], *, looks_up: bool = True) -> None:
        self._is_broken = is_broken
        self._looks_up = looks_up

    def wait(self, work: Work) -> None:
        """Raises what the collective raises, or AbandonedError; then it still uses its tensors, but does not write."""
        broken_at: float | None = None
        if not self._looks_up:
            work.wait()
            return
        while True:
            try:
                work.wait(timedelta(seconds=LOOK_S))
                return
            except RuntimeError:
                if work.is_completed():
                    raise
            if self._is_broken():
                now = time.monotonic()
                broken_at = broken_at or now
                if now - broken_at > PATIENCE_S:
                    keep_for_ever(work)
                    raise AbandonedError("a collective was broken off and does not end")

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
