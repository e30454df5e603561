"""Tells people of slowness that matters to them: at once if it is large, else when it lasts.

The statistics notice ten percent within half a second, which is right for a machine that asks. A person who is told of
every half second in which a host was busy with something else will soon read nothing any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from unicron_elastic.detection.verdicts import Degraded
from unicron_elastic.launcher.loop import Loop

__all__ = ["MILD_FACTOR", "PATIENCE_S", "Slowness"]

MILD_FACTOR = 1.25
PATIENCE_S = 10.0


class Slowness:
    """What has been said of the present slowness, if there is any."""

    def __init__(self, loop: Loop, say: Callable[[str], None]) -> None:
        self._loop = loop
        self._say = say
        self._untold: Degraded | None = None  # mild, and not yet for long

    def begins(self, verdict: Degraded) -> None:
        """Says so, now or later."""
        if verdict.factor >= MILD_FACTOR:
            self._say(verdict.reason)
            return
        self._untold = verdict
        self._loop.call_at(time.monotonic() + PATIENCE_S, lambda: self._lasts(verdict))

    def ends(self, reason: str) -> None:
        """Says so, unless nothing was said of its beginning."""
        was_untold, self._untold = self._untold is not None, None
        if not was_untold:
            self._say(reason)

    def forget(self) -> None:
        """The workers have ended, and their slowness with them."""
        self._untold = None

    def _lasts(self, verdict: Degraded) -> None:
        if self._untold is verdict:
            self._untold = None
            self._say(verdict.reason)
