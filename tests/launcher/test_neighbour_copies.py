"""Copies of a neighbour's snapshots: with real files and servers, from agent to agent."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from unicron_elastic.launcher.agent.worlds.neighbour_copies import NeighbourCopies
from unicron_elastic.launcher.agent.worlds.snapshots import Snapshots
from unicron_elastic.launcher.common.loop import Loop
from unicron_elastic.state.layout import flatten
from unicron_elastic.state.snapshot.file import SnapshotFile
from unicron_elastic.state.snapshot.header import Header
from unicron_elastic.state.snapshot.newest_common import outdated
from unicron_elastic.worker.notices import SnapshotMade

DEADLINE_S = 20.0
HEADER = Header(
    step=1, lineage=7, rank=0, world_size=4, is_replicated=False, has_own_parts=True, is_for_peer=True,
    layout_bytes=1, layout_sum="0" * 32, data_at=8192, data_bytes=4, data_sum="0" * 32,
)  # fmt: skip


def held(**steps: list[int]) -> dict[int, list[Header]]:
    """r0=[1, 2]: of rank 0 the copies of steps 1 and 2."""
    return {int(name[1:]): [replace(HEADER, rank=int(name[1:]), step=step) for step in steps[name]] for name in steps}


@pytest.mark.parametrize(
    ("copies", "ranks", "expected"),
    [
        (held(r1=[10, 20], r2=[30, 40]), {2}, [(1, 10), (1, 20)]),
        (held(r1=[10, 30], r2=[30, 40]), {2}, [(1, 10)]),  # what its own neighbour may not have copied yet
        (held(r1=[10, 20], r2=[30]), {2}, []),  # one is not enough
        (held(r1=[10], r2=[30, 40], r3=[20, 30]), {2, 3}, [(1, 10)]),
        (held(r1=[25], r2=[30, 40], r3=[20, 30]), {2, 3}, []),
        (held(r1=[10], r2=[30, 40]), {2, 3}, []),  # of rank 3 there is none yet
        (held(r1=[10, 20]), {1}, []),
        (held(r1=[10, 20]), set(), []),
    ],
)
def test_copies_of_neighbours_before_go_when_two_newer_ones_are_there(
    copies: dict[int, list[Header]], ranks: set[int], expected: list[tuple[int, int]]
) -> None:
    assert [(header.rank, header.step) for header in outdated(copies, ranks)] == expected


class Node:
    """An agent with one worker, whose snapshots it makes."""

    def __init__(self, loop: Loop) -> None:
        self.shelf = Snapshots(loop, pytest.fail)
        self.worker: Any = SimpleNamespace(local_rank=0, tell=lambda _order: False)
        self.slots: dict[int, SnapshotFile] = {}

    def snapshot(self, step: int, rank: int, world_size: int) -> None:
        """For the neighbour, into one of two files in turn."""
        slot = step % 2
        is_new = slot not in self.slots
        if is_new:
            self.slots[slot] = SnapshotFile.create()
        layout, tensors = flatten({"weight": torch.full((64,), float(step))})
        more = {
            "rank": rank,
            "world_size": world_size,
            "is_replicated": True,
            "has_own_parts": True,
            "is_for_peer": True,
            "lineage": 1,
        }
        self.slots[slot].write(layout, tensors, step=step, **more)
        fds = (os.dup(self.slots[slot].fd),) if is_new else ()
        self.shelf.made(self.worker, SnapshotMade(slot=slot, is_for_peer=True, fds=fds))

    def copies(self) -> list[tuple[int, int]]:
        """Rank and step of each that is whole."""
        headers = [file.header() for file in self.shelf._copies.files()]
        return sorted((header.rank, header.step) for header in headers if header is not None)

    def close(self) -> None:
        self.shelf.close()
        for file in (*self.slots.values(), *self.shelf._copies.files()):
            file.close()


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture
def nodes(loop: Loop) -> Iterator[list[Node]]:
    made = [Node(loop) for _ in range(3)]
    yield made
    for each in made:
        each.close()


def meet(*nodes: Node) -> None:
    """They train on, in another round."""
    store = HashStore()
    for rank, node in enumerate(nodes):
        node.shelf.meet(store, rank, len(nodes), "127.0.0.1")


def until(loop: Loop, condition: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end
        loop.run_until(lambda: bool(condition()), time.monotonic() + 0.05)


def test_who_meets_another_neighbour_copies_it_at_once_and_forgets_the_one_before(
    loop: Loop, nodes: list[Node]
) -> None:
    a, b, c = nodes
    meet(a, b, c)
    for step in (1, 2):
        for rank, node in enumerate((a, b, c)):
            node.snapshot(step, rank, 3)
        until(loop, lambda step=step: (1, step) in a.copies())
    assert a.copies() == [(1, 1), (1, 2)]
    meet(a, c)  # b is lost
    until(loop, lambda: (2, 2) in a.copies())  # nobody has made another one
    for step in (3, 4):
        assert (2, 2) in a.copies()
        for rank, node in enumerate((a, c)):
            node.snapshot(step, rank, 2)
        until(loop, lambda step=step: (1, step) in a.copies())
    until(loop, lambda: a.copies() == [(1, 3), (1, 4)])
    assert len(a.shelf._copies.files()) == 2


def test_a_worker_that_asks_is_copied_for_before_it_has_made_a_snapshot(loop: Loop, nodes: list[Node]) -> None:
    old, new, _ = nodes
    store = HashStore()
    new.shelf.begin(store, 0, 2, "127.0.0.1")
    new.shelf.wanted(new.worker, rank=0, world_size=2)
    old.shelf.meet(store, 1, 2, "127.0.0.1")
    old.snapshot(1, 1, 2)
    until(loop, lambda: new.copies() == [(1, 1)])


@pytest.fixture
def copies() -> Iterator[NeighbourCopies]:
    made = NeighbourCopies()
    yield made
    made._busy.clear()
    for file in made.files():
        file.close()


def copied(copies: NeighbourCopies, rank: int, step: int) -> SnapshotFile:
    """As ``take`` does, without another node."""
    file = copies._begin(rank)
    layout, tensors = flatten({"weight": torch.zeros(4)})
    about = {"is_replicated": True, "has_own_parts": True, "is_for_peer": True}
    file.write(layout, tensors, step=step, lineage=1, rank=rank, world_size=3, **about)
    copies._busy.discard(file)
    return file


def test_who_is_written_is_neither_offered_nor_taken_out(copies: NeighbourCopies) -> None:
    whole = copied(copies, 1, 10)
    half = copies._begin(1)
    assert copies.files() == [whole]
    assert copies.outdated({2}) == []
    copies._busy.discard(half)
    assert copies.outdated({2}) == [half]  # its source was lost on the way
    half.close()


def test_the_whole_copy_stays_while_two_threads_write(copies: NeighbourCopies) -> None:
    files = [copied(copies, 1, step) for step in (10, 20)]
    assert copies._begin(1) is files[0]
    third = copies._begin(1)
    assert third not in files
    assert copies.files() == [files[1]]
