"""What a node tells the others of where members meet."""

from __future__ import annotations

import socket

import pytest
from torch.distributed import PrefixStore, TCPStore

from unicron_elastic.launcher.agent.worlds.worlds import AgentMeeting, Worlds, _own_address
from unicron_elastic.launcher.common.loop import Loop


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("0.0.0.0", 0, None, True, wait_for_workers=False)


def test_who_hosts_the_rounds_store_is_where_the_others_found_it_and_not_on_their_own_host(store: TCPStore) -> None:
    found = AgentMeeting(rank=0, size=2, node="a", store=PrefixStore("below", store), master="198.18.1.2")
    assert _own_address(found) == "198.18.1.2"


def test_others_are_where_their_packets_to_that_store_come_from(store: TCPStore) -> None:
    visitor = TCPStore(socket.gethostbyname("localhost"), store.port, None, False, wait_for_workers=False)
    assert _own_address(AgentMeeting(rank=1, size=2, node="b", store=visitor, master="198.18.1.2")) == "127.0.0.1"


def test_a_node_that_was_alone_can_be_reached_by_those_who_join_it(store: TCPStore) -> None:
    loop = Loop()
    worlds = Worlds(loop, lambda _event: None, pytest.fail)
    worlds._round = AgentMeeting(rank=0, size=1, node="a", store=store)
    alone = worlds._address()
    assert alone.startswith("127.0.0.1:")
    worlds._round = AgentMeeting(rank=0, size=2, node="a", store=store, master="127.0.0.2")
    host, _, port = worlds._address().partition(":")
    assert host == "127.0.0.2"
    TCPStore(host, int(port), None, False, wait_for_workers=False).set("a newcomer", "is here")
    assert worlds._address() == f"{host}:{port}"
    TCPStore(
        "127.0.0.1", int(alone.rpartition(":")[2]), None, False, wait_for_workers=False
    )  # of who still meets there
    worlds.close()
    loop.close()
