"""Which nodes of a round are silent: by their signs of life and this host's clock, whatever others' clocks say."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from unicron_elastic.compat.rendezvous import SignsOfLife, signs_of_life
from unicron_elastic.rendezvous.job.silent_nodes import SilentNodes
from unicron_elastic.rendezvous.torch.choose import rendezvous_handler
from unicron_elastic.rendezvous.torch.fresh_store import FreshStoreRendezvous

DEADLINE_S = 30.0


class Round:
    """`Round` is one of three nodes, as the first of them sees it; a node whose sign is None has taken it away."""

    def __init__(self) -> None:
        self.now = 100.0
        self.signs: dict[str, object] = {"a": 1, "b": 1, "c": 1}
        self.ranks = {"b": 1, "c": 2}
        self.silent = SilentNodes(lambda: self.now)

    def after(self, seconds: float, **signs: object) -> tuple[int, ...]:
        self.now += seconds
        self.signs |= signs
        there = {node: sign for node, sign in self.signs.items() if sign is not None}
        ranks = {node: rank for node, rank in self.ranks.items() if node in there}
        return self.silent.look(SignsOfLife(there, ranks, 15.0))


@pytest.fixture
def seen() -> Round:
    made = Round()
    assert made.after(0) == ()
    return made


def test_who_gives_no_new_sign_for_long_is_silent_until_it_does(seen: Round) -> None:
    assert seen.after(10, b=2) == ()
    assert seen.after(5, b=3) == (2,)
    assert seen.after(15) == (1, 2)
    assert seen.after(1, b=4, c=2) == ()


def test_who_was_taken_out_is_silent_in_its_time_however_late_its_last_sign_was_seen(seen: Round) -> None:
    assert seen.after(14.9, b=2) == ()
    assert seen.after(0.05, c=None) == ()
    assert seen.after(0.05) == (2,)
    assert seen.after(10, b=3, c=2) == ()
    assert seen.after(1, c=None) == ()
    assert seen.after(13.9, b=4) == ()
    assert seen.after(0.1) == (2,)


def test_who_left_to_join_again_gives_signs_as_before(seen: Round) -> None:
    assert seen.after(5, b=2, c=None) == ()
    del seen.ranks["c"]
    assert seen.after(1, c=3) == ()
    assert seen.after(14, b=3, c=4) == ()


def test_this_node_and_those_that_only_wait_are_never_silent(seen: Round) -> None:
    assert seen.after(10, b=2, c=2, d=1) == ()
    assert seen.after(10, b=3, c=3) == ()


def test_torchs_dynamic_rendezvous_tells_of_its_signs_and_others_of_none() -> None:
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    met: list[Any] = []
    nodes = [
        RendezvousParameters(
            "c10d", f"localhost:{port}", "job", 2, 2, is_host=is_host, keep_alive_interval=2, local_addr="localhost"
        )
        for is_host in (True, False)
    ]
    handlers: list[Any] = [rendezvous_handler(node) for node in nodes]
    assert all(isinstance(each, FreshStoreRendezvous) for each in handlers)
    assert signs_of_life(handlers[0]) is None
    other = threading.Thread(target=lambda: met.append(handlers[1].next_rendezvous()), daemon=True)
    other.start()
    own = handlers[0].next_rendezvous()
    other.join(DEADLINE_S)
    handlers[0].num_nodes_waiting()
    signs = signs_of_life(handlers[0]._handler)
    assert signs is not None
    assert (list(signs.ranks.values()), signs.patience_s) == ([1 - own.rank], 6.0)
    assert len(signs.latest) == 2
    assert handlers[0].silent_ranks() == ()
    for each in reversed(handlers):
        each.shutdown()
