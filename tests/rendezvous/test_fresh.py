"""A fresh store per round around a handler that, as torch's does, hands out the same one each time."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
from free_port import free_port
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from unicron_elastic.compat.rendezvous import hosts_that_wait
from unicron_elastic.rendezvous.torch.fresh_store import FreshStoreRendezvous

TIMEOUT = timedelta(seconds=20)


class Inner(RendezvousHandler):
    """A node of a meeting whose store outlives the rounds; the keys of each round have a prefix, as torch's have."""

    def __init__(self, shared: TCPStore, rank: int, nodes: int, use_agent_store: bool = True) -> None:
        self._shared = TCPStore("127.0.0.1", shared.port, None, False, TIMEOUT, wait_for_workers=False)
        self.rank, self.nodes, self.round = rank, nodes, 0
        self._use_agent_store = use_agent_store
        self.port = shared.port
        self.calls: list[str] = []

    @property
    def use_agent_store(self) -> bool:
        return self._use_agent_store

    def next_rendezvous(self) -> RendezvousInfo:
        self.round += 1
        store = PrefixStore(f"round {self.round}", self._shared)
        return RendezvousInfo(store, self.rank, self.nodes, RendezvousStoreInfo("127.0.0.1", self.port))

    def get_backend(self) -> str:
        return "c10d"

    def is_closed(self) -> bool:
        return "set_closed" in self.calls

    def set_closed(self) -> None:
        self.calls.append("set_closed")

    def num_nodes_waiting(self) -> int:
        return 3

    def get_run_id(self) -> str:
        return "r1"

    def shutdown(self) -> bool:
        self.calls.append("shutdown")
        return True


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    return TCPStore("127.0.0.1", 0, None, True, TIMEOUT, wait_for_workers=False)


def _meet(handlers: list[FreshStoreRendezvous]) -> list[RendezvousInfo]:
    """All nodes at once, as they come in a real round."""
    barrier = threading.Barrier(len(handlers))

    def come(handler: FreshStoreRendezvous) -> RendezvousInfo:
        barrier.wait(20)
        return handler.next_rendezvous()

    with ThreadPoolExecutor(len(handlers)) as pool:
        return list(pool.map(come, handlers))


def _worker_store(info: RendezvousInfo) -> TCPStore:
    where = info.bootstrap_store_info
    return TCPStore(where.master_addr, where.master_port, None, False, TIMEOUT, wait_for_workers=False)


@pytest.mark.parametrize("nodes", [1, 3])
def test_all_nodes_of_a_round_share_a_store_that_is_new(shared: TCPStore, nodes: int) -> None:
    handlers = [FreshStoreRendezvous(Inner(shared, rank, nodes), "127.0.0.1", 20) for rank in range(nodes)]
    ports = set()
    for _ in range(3):
        infos = _meet(handlers)
        assert [(info.rank, info.world_size) for info in infos] == [(rank, nodes) for rank in range(nodes)]
        stores = [_worker_store(info) for info in infos]
        assert len({info.bootstrap_store_info.master_port for info in infos}) == 1
        assert not stores[0].check(["address of rank 0"])  # nothing of an earlier round is in it
        stores[-1].set("address of rank 0", "x")
        assert stores[0].get("address of rank 0") == b"x"
        ports.add(infos[0].bootstrap_store_info.master_port)
        del stores, infos
    assert shared.port not in ports
    for handler in handlers:
        assert handler.shutdown()


def test_a_node_that_is_first_no_longer_gives_its_store_back(shared: TCPStore) -> None:
    nodes = [Inner(shared, 0, 2), Inner(shared, 1, 2)]
    handlers = [FreshStoreRendezvous(node, "127.0.0.1", 20) for node in nodes]
    old_port = _meet(handlers)[0].bootstrap_store_info.master_port
    nodes[0].rank, nodes[1].rank = 1, 0
    new_port = _meet(handlers)[0].bootstrap_store_info.master_port
    with socket.socket() as old, socket.socket() as new:
        assert old.connect_ex(("127.0.0.1", old_port)) != 0
        assert new.connect_ex(("127.0.0.1", new_port)) == 0


def test_agents_keep_the_store_of_the_meeting(shared: TCPStore) -> None:
    info = FreshStoreRendezvous(Inner(shared, 0, 1), "127.0.0.1").next_rendezvous()
    info.store.set("key", "x")
    assert PrefixStore("round 1", shared).get("key") == b"x"


def test_the_first_node_says_by_which_address_it_is_reached(shared: TCPStore) -> None:
    handlers = [
        FreshStoreRendezvous(Inner(shared, 0, 2), "localhost"),
        FreshStoreRendezvous(Inner(shared, 1, 2), "another"),
    ]
    assert [info.bootstrap_store_info.master_addr for info in _meet(handlers)] == ["localhost", "localhost"]


@pytest.mark.parametrize("off", ["variable", "inner handler"])
def test_it_can_be_told_to_leave_the_store_alone(shared: TCPStore, monkeypatch: pytest.MonkeyPatch, off: str) -> None:
    if off == "variable":
        monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    handler = FreshStoreRendezvous(Inner(shared, 0, 1, use_agent_store=off == "variable"), "127.0.0.1")
    assert handler.next_rendezvous().bootstrap_store_info.master_port == shared.port


def test_everything_else_is_the_inner_handlers(shared: TCPStore) -> None:
    inner = Inner(shared, 0, 1)
    handler = FreshStoreRendezvous(inner, "127.0.0.1")
    assert (handler.get_backend(), handler.get_run_id(), handler.num_nodes_waiting()) == ("c10d", "r1", 3)
    assert handler.use_agent_store
    assert not handler.is_closed()
    handler.set_closed()
    assert handler.is_closed()
    handler.shutdown()
    assert inner.calls == ["set_closed", "shutdown"]


def test_who_left_does_not_close_the_meeting_of_the_others(shared: TCPStore, caplog: pytest.LogCaptureFixture) -> None:
    inner = Inner(shared, 1, 2)
    handler = FreshStoreRendezvous(inner, "127.0.0.1")
    assert handler.why_stay(2) == "torch's c10d rendezvous cannot be left."
    handler.leave()  # this inner handler is not torch's: the others will miss its heartbeat
    assert "the rendezvous could not be told that this node leaves" in caplog.text
    assert handler.shutdown()
    assert inner.calls == []


@pytest.mark.parametrize(("min_nodes", "nodes", "reason"), [(2, 2, "the job needs all 2 of its nodes."), (1, 2, "")])
def test_why_a_node_has_to_stay(shared: TCPStore, min_nodes: int, nodes: int, reason: str) -> None:
    inner = Inner(shared, 1, nodes)
    inner.settings = SimpleNamespace(min_nodes=min_nodes)
    # A client of the store, as every node is but one; its server is in this process, on the port of `shared`.
    inner._state_holder = SimpleNamespace(_backend=SimpleNamespace(_store=SimpleNamespace(port=1)))
    handler = FreshStoreRendezvous(inner, "127.0.0.1")
    assert handler.why_stay(nodes) == reason
    inner._state_holder._backend._store = inner._shared
    assert handler.why_stay(nodes) == (reason or "the job's rendezvous is hosted on it.")


def test_who_waits_for_others_by_torchs_rendezvous_says_who_is_there(caplog: pytest.LogCaptureFixture) -> None:
    port, said = free_port(), "1 of 2 nodes are here: 127.0.0.1."
    handlers = []
    for host in ("127.0.0.1", "localhost"):
        parameters = RendezvousParameters(
            "c10d", f"127.0.0.1:{port}", "r", 2, 2, local_addr=host, is_host=host == "127.0.0.1"
        )
        handlers.append(FreshStoreRendezvous(get_rendezvous_handler(parameters), "127.0.0.1", 20))
        handlers[-1].silent_s = 0.05
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(handlers[0].next_rendezvous)
        end = time.monotonic() + 20
        while said not in caplog.messages:
            assert time.monotonic() < end
            time.sleep(0.01)
        handlers[1]._handler._state_holder.sync()
        assert hosts_that_wait(handlers[1]._handler) == []  # it sees the other, and is not there itself
        assert handlers[1].next_rendezvous().world_size == first.result(20).world_size == 2
    assert caplog.messages.count(said) == 1
    assert not [each for each in threading.enumerate() if each.name == "unicron-waits"]
    for handler in handlers:
        handler.shutdown()
