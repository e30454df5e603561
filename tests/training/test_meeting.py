"""Members of a world hear each other, unless a newer world comes."""

from __future__ import annotations

import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import DistStoreError, HashStore

from unicron_elastic.base.world import Member, World
from unicron_elastic.training.group.meeting import Meeting, MissingError, _Interruptible
from unicron_elastic.training.group.superseded import Superseded

DEADLINE_S = 10.0

# Rank 0 has met in a world before, in which it waited for a peer until the next world came; rank 1 is new.
MEMBER = """
import sys, time
import torch, torch.distributed as dist
from unicron_elastic.training.group.meeting import Meeting, Superseded
from unicron_elastic.base.world import Member, World

rank, path = int(sys.argv[1]), sys.argv[2]
members = tuple(Member(name=str(each), node="n", local_rank=each) for each in range(2))
store = dist.FileStore(path, -1)
if rank == 0:
    until = time.monotonic() + 0.1
    try:
        world = World(number=1, members=members, store="h:1")
        Meeting(store, world, rank, lambda: time.monotonic() > until).connect("gloo", 60.0, None)
    except Superseded:
        print("superseded", end=" ")
Meeting(store, World(number=2, members=members, store="h:1"), rank, lambda: False).connect("gloo", 60.0, None)
total = torch.ones(1)
dist.all_reduce(total)
print(total.item(), flush=True)
"""


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


def test_who_has_given_up_one_world_connects_with_newcomers_in_the_next(warm_launchers: Any, tmp_path: Path) -> None:
    script = tmp_path / "member.py"
    script.write_text(MEMBER)
    said = [tmp_path / f"said-{rank}" for rank in range(2)]
    store = str(tmp_path / "store")
    members = [warm_launchers.begin(said[rank], str(script), str(rank), store) for rank in range(2)]
    try:
        codes = [member.wait(6 * DEADLINE_S) for member in members]
    finally:
        for member in members:
            member.kill()
    told = [each.read_text().splitlines() for each in said]
    assert codes == [0, 0], told
    assert [lines[-1] for lines in told] == ["superseded 2.0", "2.0"], told


def test_an_exception_is_told_once_and_by_the_rank_of_now_however_many_worlds_there_were(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", lambda _kind, error, _trace: print(error, file=sys.stderr))
    store, members = HashStore(), (Member(name="0", node="n", local_rank=0),)
    for number in range(1, 4):
        Meeting(store, World(number=number, members=members, store="h:1"), 0, lambda: False).connect("gloo", 9.0, None)
        dist.destroy_process_group()
    sys.excepthook(ValueError, ValueError("boom"), None)
    assert capsys.readouterr().err == "[rank0]: boom\n"
