"""The wait for the other nodes at the end, with torch's own barrier and store."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import DistStoreError, TCPStore
from torch.distributed.elastic.utils.store import barrier

from unicron_elastic.launcher.last_barrier import StoreUntil

DEADLINE_S = 30.0


def new_store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)


def test_all_go_on_together() -> None:
    store = new_store()
    client = TCPStore("127.0.0.1", store.port, None, is_master=False)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(barrier, StoreUntil(store, lambda: False), 2, "end", DEADLINE_S)
        barrier(StoreUntil(client, lambda: False), 2, "end", DEADLINE_S)
        first.result(DEADLINE_S)


def test_a_node_that_is_lost_meanwhile_is_not_waited_for() -> None:
    store = new_store()
    is_lost = threading.Event()
    threading.Timer(0.2, is_lost.set).start()
    barrier(StoreUntil(store, is_lost.is_set), 2, "end", DEADLINE_S)
    assert is_lost.is_set()


def test_a_node_that_does_not_come_is_waited_for_as_long_as_is_said() -> None:
    store = new_store()
    began = time.monotonic()
    with pytest.raises(DistStoreError, match=r"did not end within 0\.5 s"):
        barrier(StoreUntil(store, lambda: False), 2, "end", 0.5)
    assert time.monotonic() - began >= 0.5


def test_the_store_of_a_node_that_has_ended_means_that_all_have() -> None:
    store = new_store()
    client = TCPStore("127.0.0.1", store.port, None, is_master=False, timeout=timedelta(seconds=DEADLINE_S))
    is_asked = threading.Event()

    def ask() -> bool:
        is_asked.set()
        return False

    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(StoreUntil(client, ask).wait, ["end"])
        assert is_asked.wait(DEADLINE_S)
        del store
        waiting.result(DEADLINE_S)
