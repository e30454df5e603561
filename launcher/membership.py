"""Watches a rendezvous for nodes that wait to join.

torch's handlers can only be asked, and asking may block on the network, so a thread asks and posts what it hears.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch.distributed.elastic.rendezvous import RendezvousHandler

__all__ = ["MembershipWatch"]


class MembershipWatch:
    """Asks every ``interval_s`` seconds until stopped; calls back from its own thread, at most once."""

    def __init__(
        self,
        handler: RendezvousHandler,
        interval_s: float,
        on_waiting: Callable[[int], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._handler = handler
        self._interval_s = interval_s
        self._on_waiting = on_waiting
        self._on_error = on_error
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="unicron-membership", daemon=True)

    def start(self) -> None:
        """Begins to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the watch; no callback comes after this returns, unless a question is stuck in the network."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=self._interval_s + 1.0)

    def _watch(self) -> None:
        while not self._stopped.wait(self._interval_s):
            try:
                waiting = self._handler.num_nodes_waiting()
            except Exception as error:
                if not self._stopped.is_set():
                    self._on_error(error)
                return
            if waiting > 0 and not self._stopped.is_set():
                self._on_waiting(waiting)
                return
