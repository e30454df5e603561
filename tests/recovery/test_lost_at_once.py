"""Losses that meet others on their way: nobody is left, or somebody stays in a world in which it is not any more."""

from __future__ import annotations

from dataclasses import replace

from jobs_in_place import ELSEWHERE, InPlace, LateNode, TwoLogs, short
from scenario import KILLED, none, only

from unicron_elastic.base.world import World
from unicron_elastic.faults import HangKind
from unicron_elastic.recovery.commands import (
    ChangeWorld,
    KillWorkers,
    StopWorkers,
    TellPeers,
)
from unicron_elastic.recovery.state import is_newcomer, living_members


def test_who_has_made_its_last_step_is_not_left_out_for_having_ended() -> None:
    job = TwoLogs(2)
    job.parted(1)
    job.exited(1)
    assert job.state.world is not None
    changed = job.world(2, *job.state.world.members)
    assert all("have ended meanwhile" not in each.reason for each in changed if isinstance(each, ChangeWorld))


def test_those_who_live_are_those_who_are_not_lost() -> None:
    job = TwoLogs(3)
    job.raised(1, "broken", kind="OSError")  # it runs until it has torn down
    job.exited(2, KILLED)
    assert short(living_members(job.state)) == ["4.0"]


# -- a node on its way into a world in which others train ------------------------------------------------------------


def late() -> LateNode:
    """A node that knows of the world of the others before its workers have asked for a part."""
    job = LateNode()
    job.world(7, *job.there)
    assert job.state.came_late
    job.state = replace(job.state, why_stay="")
    return job


def test_what_is_stopped_there_is_a_newcomer_and_replaced() -> None:
    job = late()
    assert all(is_newcomer(job.state, worker) for worker in job.state.workers)
    job.hung(1, kind=HangKind.STOPPED)
    assert only(job.evidence(1), KillWorkers).local_ranks == (1,)
    assert none(job.log, StopWorkers, TellPeers)


def test_before_the_first_world_all_begin_again() -> None:
    job = InPlace(2, entered=False)
    assert only(job.exited(0, KILLED), StopWorkers).local_ranks == (1,)


def test_a_reason_of_many_losses_still_fits_into_a_world() -> None:
    world = World(number=1, members=ELSEWHERE, store="h:1")
    again = world.after(store="h:2", reason="n3 is lost: it does not answer. " * 400)
    assert World.parse(again.to_json()) == again
    assert again.reason.startswith("n3 is lost: it does not answer. n3")
