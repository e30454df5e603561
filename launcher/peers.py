"""Watches the other nodes of a job: a fault that one of them reports, nodes that wait to join.

torch's rendezvous handlers and stores can only be asked, and asking may block on the network, so a thread asks and
posts what it hears.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch.distributed import Store
from torch.distributed.elastic.rendezvous import RendezvousHandler

__all__ = ["PeerWatch", "tell_peers"]

_FAULT_KEY = "unicron/fault"  # in the store of the present round, so a new round begins without it


def tell_peers(store: Store, reason: str) -> None:
    """Lets every other agent of this round know of a fault. Raises what the store raises."""
    # The name of a file that is not UTF-8 comes with lone surrogates, which a store does not take.
    store.set(_FAULT_KEY, reason.encode(errors="backslashreplace").decode())


class PeerWatch:
    """Asks every ``interval_s`` seconds until stopped; calls back from its own thread, at most once."""

    def __init__(
        self,
        handler: RendezvousHandler,
        store: Store,
        interval_s: float,
        *,
        on_fault: Callable[[str], None],
        on_waiting: Callable[[int], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._handler = handler
        self._store = store
        self._interval_s = interval_s
        self._on_fault = on_fault
        self._on_waiting = on_waiting
        self._on_error = on_error
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="unicron-peers", daemon=True)

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
                heard = self._ask()
            except Exception as error:
                if not self._stopped.is_set():
                    self._on_error(error)
                return
            if heard is not None and not self._stopped.is_set():
                heard()
                return

    def _ask(self) -> Callable[[], None] | None:
        """What there is to tell, if anything."""
        if self._store.check([_FAULT_KEY]):
            reason = self._store.get(_FAULT_KEY).decode(errors="replace")
            return lambda: self._on_fault(reason)
        waiting = self._handler.num_nodes_waiting()
        if waiting > 0:
            return lambda: self._on_waiting(waiting)
        return None
