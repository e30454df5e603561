"""Gloo as the inside of a process group; its connections are told from those of other groups of this process.

Gloo sets the time-out of its group on each of its sockets. So each group has one that no other has: longer than it was
asked for by some milliseconds.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from datetime import timedelta

from torch.distributed import Store

from unicron_elastic.compat.collectives.gloo_backend import GlooBackend
from unicron_elastic.worker.collectives.gloo_connections import kept_time_out, shut_gloo_connections

TICK = timedelta(milliseconds=4)

_by_time_out: weakref.WeakValueDictionary[bytes, GlooInside] = weakref.WeakValueDictionary()
_lock = threading.Lock()


class GlooInside(GlooBackend):
    """A `GlooInside` has connections of its own, which can be broken off alone."""

    kind = "gloo"
    looks_up = True

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        with _lock:
            own = next(each for n in itertools.count(1) if kept(each := timeout + n * TICK) not in _by_time_out)
            self._kept = kept(own)
            _by_time_out[self._kept] = self
        super().__init__(store, rank, size, own)

    def break_off(self) -> None:
        """Shut these connections down: what waits for them raises within milliseconds."""
        shut_gloo_connections(self._kept)


def kept(timeout: timedelta) -> bytes:
    """Return how the kernel keeps it."""
    return kept_time_out(timeout.total_seconds())
