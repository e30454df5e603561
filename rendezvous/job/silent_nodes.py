"""Which nodes of a round have given no sign of life for long, by this host's own clock.

Where nobody tells of a lost node its missing signs are all there is. A sign that was taken away is no new one: whether
its node left or others took it for dead cannot be told apart by a host that saw the sign late.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from unicron_elastic.compat.rendezvous import SignsOfLife


class SilentNodes:
    """`SilentNodes` of one round."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ranks: dict[str, int] = {}
        self._latest: dict[str, tuple[object, float]] = {}  # the sign of each node, and when it was seen first

    def look(self, signs: SignsOfLife) -> tuple[int, ...]:
        """Return the ranks of those that are silent now."""
        now = self._clock()
        for node, rank in signs.ranks.items():
            self._ranks.setdefault(node, rank)
        for node in self._ranks:
            sign, _ = self._latest.get(node, (None, now))
            if sign is None or signs.latest.get(node, sign) != sign:
                self._latest[node] = (signs.latest.get(node), now)
        silent = (node for node, (_, since) in self._latest.items() if now - since >= signs.patience_s)
        return tuple(sorted(self._ranks[node] for node in silent))
