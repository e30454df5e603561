"""Who waits in a store for a key stops when a newer world comes, or in time."""

from __future__ import annotations

from datetime import timedelta

import pytest
from torch.distributed import DistStoreError, HashStore

from unicron_elastic.engine.transport.interruptible_store import InterruptibleStore
from unicron_elastic.engine.transport.superseded import Superseded


def test_who_waits_in_the_store_for_a_peer_stops_too() -> None:
    store = InterruptibleStore(HashStore(), lambda: True)
    with pytest.raises(Superseded):
        store.get("address")
    store.set("address", "here")
    assert store.get("address") == b"here"
    assert store.check(["address"])
    assert not store.check(["other"])
    assert store.add("count", 2) == 2


def test_waiting_in_the_store_ends_in_time() -> None:
    store = InterruptibleStore(HashStore(), lambda: False)
    with pytest.raises(DistStoreError, match=r"a, b did not come within 0\.05 s"):
        store.wait(["a", "b"], timedelta(seconds=0.05))
