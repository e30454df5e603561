"""Which nodes of a round have given no sign of life for long, by this host's own clock.

Where nobody tells of a lost node its missing signs are all there is. A node that leaves, or joins again, takes its sign
away while that is fresh; one whose sign was old when others took it away is gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

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
            if node in signs.latest:
                self._ranks.setdefault(node, rank)
        self._note(signs.latest, now, signs.patience_s / 2)
        silent = (node for node, (_, since) in self._latest.items() if now - since >= signs.patience_s)
        return tuple(sorted(self._ranks[node] for node in silent))

    def _note(self, latest: Mapping[str, object], now: float, fresh_s: float) -> None:
        """Note which signs are others than before; who takes away a fresh one is well, and not waited for."""
        for node in tuple(self._ranks):
            sign, since = self._latest.get(node, (None, now))
            if node in latest and latest[node] != sign:
                self._latest[node] = (latest[node], now)
            elif node not in latest and now - since < fresh_s:
                del self._ranks[node]
                self._latest.pop(node, None)
