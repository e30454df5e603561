"""Members of a world hear each other, unless a newer world comes."""

from __future__ import annotations

import threading

import pytest
from torch.distributed import HashStore

from unicron_elastic.base.world import Member, World
from unicron_elastic.engine.transport.superseded import Superseded
from unicron_elastic.training.group.meeting import Meeting, MissingError

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


def test_one_who_leaves_a_round_leaves_it_for_all() -> None:
    store, came = HashStore(), threading.Event()
    first, last = (Meeting(store, _world(2), rank, came.is_set) for rank in range(2))
    first.say("here")
    came.set()
    with pytest.raises(Superseded):
        first.hear()
    came.clear()
    last.say("here, too")
    with pytest.raises(Superseded):
        last.hear()


def test_nobody_leaves_a_round_in_which_all_have_spoken() -> None:
    store, came = HashStore(), threading.Event()
    meetings = [Meeting(store, _world(2), rank, came.is_set) for rank in range(2)]
    for meeting in meetings:
        meeting.say("here")
    came.set()
    assert [meeting.hear() for meeting in meetings] == [["here", "here"]] * 2


def test_a_newcomer_waits_until_one_of_those_comes_who_train() -> None:
    store, has_come = HashStore(), threading.Event()
    new, old = (Meeting(store, _world(2), rank, _never) for rank in range(2))

    def wait() -> None:
        new.wait_for_others(DEADLINE_S)
        has_come.set()

    new.say("new", is_new=True)
    threading.Thread(target=wait, daemon=True).start()
    assert not has_come.wait(0.05)
    old.say("old")
    assert has_come.wait(DEADLINE_S)
    assert new.hear() == old.hear() == ["new", "old"]


def test_a_newcomer_that_has_spoken_and_leaves_is_not_waited_for() -> None:
    store, came = HashStore(), threading.Event()
    new, old = (Meeting(store, _world(2), rank, came.is_set) for rank in range(2))
    new.say("new", is_new=True)
    came.set()
    with pytest.raises(Superseded):
        new.wait_for_others(DEADLINE_S)
    with pytest.raises(Superseded):  # though all have spoken
        old.exchange("old")


def test_who_does_not_come_is_named() -> None:
    members = tuple(Member(name=str(rank), node=f"n{rank}/1#ab", local_rank=0) for rank in range(3))
    meeting = Meeting(HashStore(), World(number=4, members=members, store="h:1"), 1, _never)
    meeting.say("here")
    with pytest.raises(MissingError, match=r"world 4 wait in vain: rank 0 \(n0/1\), rank 2 \(n2/1\) have not come"):
        meeting.hear(0.01)


def test_a_newcomer_says_for_whom_it_waits_and_waits_on(capfd: pytest.CaptureFixture[str]) -> None:
    store = HashStore()
    new, old = (Meeting(store, _world(2), rank, _never) for rank in range(2))
    new.say("new", is_new=True)
    threading.Timer(0.1, lambda: old.say("old")).start()
    new.wait_for_others(0.02)
    said = capfd.readouterr().err.splitlines()
    assert set(said) == {"unicron: this rank waits to train with the others: rank 1 (n) has not come."}


def test_newcomers_without_others_wait_for_one_another() -> None:
    store = HashStore()
    meetings = [Meeting(store, _world(2), rank, _never) for rank in range(2)]
    for meeting in meetings:
        meeting.say("new", is_new=True)
    for meeting in meetings:
        meeting.wait_for_others(DEADLINE_S)
        assert meeting.hear() == ["new", "new"]
