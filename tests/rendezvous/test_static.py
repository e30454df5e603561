"""Nodes that are counted beforehand meet anew for each generation, in real stores."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from torch.distributed import TCPStore

from unicron_elastic.compat.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from unicron_elastic.rendezvous.torch.choose import rendezvous_handler

DEADLINE_S = 20.0


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Callable[..., RendezvousHandler]:
    """Agents of one job of two nodes, by rank."""
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"

    def make(rank: int, timeout: float = DEADLINE_S) -> RendezvousHandler:
        return rendezvous_handler(RendezvousParameters("static", endpoint, "r", 2, 2, rank=rank, timeout=timeout))

    return make


def meet(pool: ThreadPoolExecutor, *nodes: RendezvousHandler) -> list[RendezvousInfo]:
    coming = [pool.submit(each.next_rendezvous) for each in nodes]
    return [each.result(DEADLINE_S) for each in coming]


def until(is_so: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_first_round_is_as_torch_has_it_and_each_later_one_has_a_store_of_its_own(
    pool: ThreadPoolExecutor, node: Callable[..., RendezvousHandler]
) -> None:
    nodes = [node(0), node(1)]
    ports = []
    for number in range(3):
        infos = meet(pool, *nodes)
        assert [(info.rank, info.world_size) for info in infos] == [(0, 2), (1, 2)]
        assert not infos[1].store.check(["of the round"]), number
        infos[0].store.set("of the round", "")
        places = [each.store_of_workers for each in nodes]
        assert places[0] == places[1]
        host, port = places[0]
        store = TCPStore(host, port, None, False, wait_for_workers=False)
        assert not store.check(["address of rank 0"]), number
        store.set("address of rank 0", "")
        ports.append(port)
    assert len(set(ports)) == 3
    assert ports[0] == int(nodes[0]._handler.master_port), "--master-port"


def test_a_node_waits_for_the_others_who_learn_that_it_does(
    pool: ThreadPoolExecutor, node: Callable[..., RendezvousHandler], caplog: pytest.LogCaptureFixture
) -> None:
    nodes = [node(0), node(1)]
    meet(pool, *nodes)
    assert [each.num_nodes_waiting() for each in nodes] == [0, 0]
    nodes[1].silent_s = 0.05
    waits: Future[RendezvousInfo] = pool.submit(nodes[1].next_rendezvous)
    until(nodes[0].num_nodes_waiting)
    said = "This node, of rank 1, waits for 1 node of rank 0: all start their workers again together."
    until(lambda: said in caplog.messages)
    assert not waits.done()
    nodes[0].next_rendezvous()
    waits.result(DEADLINE_S)
    assert [each.num_nodes_waiting() for each in nodes] == [0, 0]


@pytest.mark.parametrize("rounds", [1, 2])
def test_an_agent_that_was_started_anew_comes_to_the_next_round_of_the_others(
    pool: ThreadPoolExecutor, node: Callable[..., RendezvousHandler], rounds: int
) -> None:
    nodes = [node(0), node(1)]
    for _ in range(rounds):
        meet(pool, *nodes)
    another = node(1)
    waits = pool.submit(another.next_rendezvous)
    until(nodes[0].num_nodes_waiting)
    port = nodes[0].next_rendezvous().bootstrap_store_info.master_port
    assert waits.result(DEADLINE_S).bootstrap_store_info.master_port == port


def test_a_node_whose_agent_is_started_anew_while_it_waits_is_one_node(
    pool: ThreadPoolExecutor, node: Callable[..., RendezvousHandler]
) -> None:
    nodes = [node(0), node(1, timeout=1)]
    meet(pool, *nodes)
    with pytest.raises(RendezvousTimeoutError):
        nodes[1].next_rendezvous()
    another = node(1)
    waits = pool.submit(another.next_rendezvous)
    until(lambda: int(another._shared.add("unicron/round/2/1", 0)) == 2 if another._shared else False)
    assert not waits.done()
    nodes[0].next_rendezvous()
    waits.result(DEADLINE_S)


def test_who_ends_does_not_wait_for_a_store_that_is_silent(
    pool: ThreadPoolExecutor, node: Callable[..., RendezvousHandler]
) -> None:
    nodes = [node(0), node(1)]
    meet(pool, *nodes)
    comes = threading.Event()
    nodes[1]._shared = SimpleNamespace(compare_set=lambda *_: comes.wait(DEADLINE_S))
    began = time.monotonic()
    try:
        assert nodes[1].shutdown()
        assert time.monotonic() - began < DEADLINE_S / 2
    finally:
        comes.set()


def test_who_waits_in_vain_says_for_whom(pool: ThreadPoolExecutor, node: Callable[..., RendezvousHandler]) -> None:
    nodes = [node(0), node(1, timeout=1)]
    meet(pool, *nodes)
    with pytest.raises(RendezvousTimeoutError, match="of rank 1, waits for 1 node of rank 0"):
        nodes[1].next_rendezvous()


def test_who_waits_for_a_node_that_has_ended_the_job_ends(
    pool: ThreadPoolExecutor, node: Callable[..., RendezvousHandler]
) -> None:
    nodes = [node(0), node(1)]
    meet(pool, *nodes)
    waits = pool.submit(nodes[0].next_rendezvous)
    until(nodes[1].num_nodes_waiting)
    assert not nodes[0].is_closed()
    nodes[1].shutdown()
    with pytest.raises(RendezvousClosedError, match=r"^The job has ended on another node\.$"):
        waits.result(DEADLINE_S)
    assert nodes[0].is_closed()


def test_who_waits_for_a_node_that_was_told_to_end_ends_too(
    pool: ThreadPoolExecutor, node: Callable[..., RendezvousHandler]
) -> None:
    nodes = [node(0), node(1)]
    meet(pool, *nodes)
    nodes[1].leave()
    nodes[1].shutdown()
    with pytest.raises(
        RendezvousClosedError, match=r"^The launcher of node 1 was told to end, and the job needs all 2 nodes\.$"
    ):
        nodes[0].next_rendezvous()
