"""Tells people of slowness that matters to them: at once if it is large and news, else when it lasts.

The statistics notice ten percent within half a second, which is right for a machine that asks. A person who is told
of every half second in which a host was busy with something else will soon read nothing any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from unicron_elastic.detection.telling import Degraded
from unicron_elastic.launcher.common.loop import Loop

MILD_FACTOR = 1.2
PATIENCE_S = 10.0
PATIENCE_MAX_S = 600.0
FORGET_S = 3600.0  # without a word: then the next slowness is news again


class Slowness:
    """What has been said of the present slowness, if there is any."""

    def __init__(self, loop: Loop, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._loop = loop
        self._clock = clock
        self._say = say
        self._untold: Degraded | None = None  # it does not last yet
        self._patience_s = 0.0  # doubles each time, so that a host that is always busy tells less and less
        self._told_at = 0.0

    def begins(self, verdict: Degraded) -> None:
        """Says so, now or later."""
        now = self._clock()
        if now - self._told_at > FORGET_S:
            self._patience_s = 0.0
        patience_s = max(self._patience_s, 0.0 if verdict.factor >= MILD_FACTOR else PATIENCE_S)
        self._untold = verdict
        if patience_s:
            self._loop.call_at(now + patience_s, lambda: self._lasts(verdict))
        else:
            self._lasts(verdict)

    def ends(self, reason: str) -> None:
        """Says so, unless nothing was said of its beginning."""
        was_untold, self._untold = self._untold is not None, None
        if not was_untold:
            self._say(reason)

    def forget(self) -> None:
        """The workers have ended, and their slowness with them."""
        self._untold = None

    def _lasts(self, verdict: Degraded) -> None:
        if self._untold is not verdict:
            return
        self._untold = None
        self._told_at = self._clock()
        self._patience_s = min(max(2 * self._patience_s, PATIENCE_S), PATIENCE_MAX_S)
        self._say(verdict.reason)
