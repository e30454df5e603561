"""Whether the silence of others means anything, decided purely: not while nobody could have been heard.

A lease runs out in the store although its agent is well when everything stood for a while, as virtual machines do that
are suspended, or when the store did, or lost its data. Each agent sees that in itself: it could not keep its own lease
alive for as long. Time that passed for nobody counts for nobody: the others have a while to tell of themselves again.
"""

from __future__ import annotations

import math


class Attention:
    """One agent's, which keeps its lease alive every ``beat_s`` seconds and gives the others ``grace_s`` after a break.

    Times are monotonic seconds. For one thread at a time.
    """

    def __init__(self, beat_s: float, grace_s: float) -> None:
        self._late_s = 2 * beat_s  # a lease lives for three beats, and one may just have been due
        self._grace_s = grace_s
        self._kept_at = math.inf  # before it was first kept, nothing was missed
        self._broken_at = -math.inf

    def kept(self, now: float) -> None:
        """Notes that the lease was kept alive."""
        if self._is_late(now):
            self._broken_at = now
        self._kept_at = now

    def broke(self, now: float) -> None:
        """Notes that the store has lost what it was told."""
        self._broken_at = now

    def is_back(self, now: float) -> bool:
        """Whether it stands, or has gone on so lately that others may have had no time to tell of themselves."""
        return self._is_late(now) or now - self._broken_at <= self._grace_s

    def _is_late(self, now: float) -> bool:
        return now - self._kept_at > self._late_s
