"""Members of a world hear each other, unless a newer world comes."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from torch.distributed import DistStoreError, HashStore

from unicron_elastic.training.meeting import Meeting, Superseded, _Interruptible
from unicron_elastic.world import Member, World

DEADLINE_S = 10.0


def _world(size: int, number: int = 1) -> World:
    members = tuple(Member(name=str(rank), node="n", local_rank=rank) for rank in range(size))
    return World(number=number, members=members, store="h:1")


def _never() -> bool:
    return False


def test_each_hears_all_by_rank_in_every_round() -> None:
    store, heard = HashStore(), dict[int, list[list[str]]]()

    def member(rank: int) -> None:
        meeting = Meeting(store, _world(3), rank, _never)
        heard[rank] = [meeting.exchange(f"{rank} in {round_}") for round_ in range(2)]

    threads = [threading.Thread(target=member, args=(rank,), daemon=True) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    said = [[f"{rank} in {round_}" for rank in range(3)] for round_ in range(2)]
    assert heard == {0: said, 1: said, 2: said}


def test_worlds_do_not_hear_each_other() -> None:
    store = HashStore()
    assert Meeting(store, _world(1, 1), 0, _never).exchange("old") == ["old"]
    assert Meeting(store, _world(1, 2), 0, _never).exchange("new") == ["new"]


def test_who_waits_for_others_stops_when_a_newer_world_comes() -> None:
    came = threading.Event()
    threading.Timer(0.05, came.set).start()
    with pytest.raises(Superseded):
        Meeting(HashStore(), _world(2), 0, came.is_set).exchange("hello")
    assert came.is_set()


def test_who_waits_in_the_store_for_a_peer_stops_too() -> None:
    store = _Interruptible(HashStore(), lambda: True)
    with pytest.raises(Superseded):
        store.get("address")
    store.set("address", "here")
    assert store.get("address") == b"here"
    assert store.check(["address"])
    assert not store.check(["other"])
    assert store.add("count", 2) == 2


def test_waiting_in_the_store_ends_in_time() -> None:
    store = _Interruptible(HashStore(), _never)
    with pytest.raises(DistStoreError, match=r"a, b did not come within 0\.05 s"):
        store.wait(["a", "b"], timedelta(seconds=0.05))
