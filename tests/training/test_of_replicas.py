"""Worlds of processes as worlds of replicas."""

from __future__ import annotations

import pytest

from unicron_elastic.base.world import Member, World
from unicron_elastic.training.shard.of_replicas import of_replicas


def _world(*members: tuple[str, str, int]) -> World:
    made = tuple(Member(name=name, node=node, local_rank=local_rank) for name, node, local_rank in members)
    return World(number=3, members=made, store="here:1", reason="rank 5 was lost.")


WORLD = _world(("0", "a", 0), ("1", "a", 1), ("2.1", "a", 2), ("3.1", "a", 3), ("4", "b", 0), ("5", "b", 1))


def test_a_member_is_a_replica_by_the_name_of_its_first_process() -> None:
    world, number = of_replicas(WORLD, 2, "3.1")
    assert [(each.name, each.node, each.local_rank) for each in world.members] == [
        ("0", "a", 0),
        ("2.1", "a", 1),
        ("4", "b", 0),
    ]
    assert (number, world.number, world.reason) == (1, 3, WORLD.reason)


def test_who_is_in_no_replica_is_not_a_member() -> None:
    assert of_replicas(WORLD, 2, "9")[1] is None


def test_a_replica_that_lacks_a_process_is_none() -> None:
    torn = _world(("0", "a", 0), ("1", "a", 1), ("3", "a", 3))
    with pytest.raises(RuntimeError, match="world 3 has 1 of 2 processes of the replica of 3 on a"):
        of_replicas(torn, 2, "0")


def test_what_breaks_a_world_of_processes_breaks_that_of_replicas() -> None:
    before, _ = of_replicas(WORLD, 2, "0")
    after, _ = of_replicas(WORLD.after(store="here:1", reason="", lost=("4", "5")), 2, "0")
    assert after.breaks(before)
    assert not before.breaks(before)
