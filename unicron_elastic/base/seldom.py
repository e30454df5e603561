"""Lines that somebody else can cause as often as they like."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

EVERY_S = 60.0


class Seldom:
    """`Seldom` lets one line through at once, then at most one in a minute, which says how many were left out."""

    def __init__(self, every_s: float = EVERY_S, now: Callable[[], float] = time.monotonic) -> None:
        self._every_s, self._now = every_s, now
        self._may_tell_at = now()
        self._untold = 0
        self._lock = threading.Lock()

    def line(self, sentence: str) -> str:
        """Returns what is to be said now: ``sentence``, with how many came since the last one; "": nothing."""
        with self._lock:
            now = self._now()
            if now < self._may_tell_at:
                self._untold += 1
                return ""
            more = f" So were {self._untold} more since this was last said." if self._untold else ""
            self._may_tell_at, self._untold = now + self._every_s, 0
        return f"{sentence}{more}"
