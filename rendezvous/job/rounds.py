"""The store of one round, for its agents and their workers: its first node hosts it, and all wait there for each other.

torch's agent asks this store for what the other agents say and waits for it, deaf to everything else. So nobody is let
through before all have come: who is lost on the way is noticed here, and the others meet again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, TCPStore
from torch.distributed import Store as TorchStore

from unicron_elastic.base.store_link import break_when_silent, open_files
from unicron_elastic.compat.rendezvous import RendezvousStoreInfo
from unicron_elastic.rendezvous.job.bound_store import bound_store

CONNECT_TIMEOUT_S = 15.0
_ARRIVED = "arrived"
_LOOK_S = 0.002
_LOOK_PER_NODE_S = 0.0002  # or hundreds of nodes would keep the store busy with nothing else


class RoundStoreError(Exception):
    """The store's node is gone, or cannot be reached."""


def host(address: str, timeout_s: float) -> TCPStore:
    """A new store in this process, at ``address`` if that is this node's, else at all addresses.

    Its calls wait for up to ``timeout_s`` seconds for what others write.
    """
    return bound_store(address, timedelta(seconds=timeout_s))


def visit(address: str, timeout_s: float) -> tuple[TCPStore, str, int]:
    """The store at HOST:PORT, and both. Raises ValueError for another text, and RoundStoreError."""
    name, _, port = address.rpartition(":")
    if not name or not (port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 65536):
        raise ValueError(f"should hold HOST:PORT, and holds {address[:80]!a}")
    connect_timeout = timedelta(seconds=min(timeout_s, CONNECT_TIMEOUT_S))
    before = open_files()
    try:
        store = TCPStore(name, int(port), None, False, connect_timeout, wait_for_workers=False)
    except (DistError, OSError, RuntimeError) as error:
        raise RoundStoreError(str(error)) from error
    break_when_silent(int(port), before)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store, name, int(port)


def place_for_workers(store: TorchStore, rank: int, address: str) -> RendezvousStoreInfo:
    """Return where the first worker is to host a store for the workers alone: a port that is free on the first node.

    ``rank`` and ``address`` are those of this node, which must have arrived. Raises RoundStoreError.
    """
    try:
        return RendezvousStoreInfo.build(rank, PrefixStore("unicron/workers", store), address)
    except (DistError, OSError, RuntimeError) as error:
        raise RoundStoreError(str(error)) from error


def arrive(store: TorchStore, size: int, is_off: Callable[[], bool], *, came_before: bool = False) -> bool:
    """Waits until all ``size`` agents have come; False as soon as ``is_off`` says that this will not be.

    ``came_before``: another agent of this node has, and is no more. Raises RoundStoreError.
    """
    shared = PrefixStore("unicron", store)
    try:
        count = shared.add(_ARRIVED, 0 if came_before else 1)
        while count < size:
            if is_off():
                return False
            time.sleep(max(_LOOK_S, _LOOK_PER_NODE_S * size))
            count = shared.add(_ARRIVED, 0)
    except (DistError, OSError, RuntimeError) as error:
        raise RoundStoreError(str(error)) from error
    return True
