"""Nodes that wait to join while workers have made their last step, of an epoch or of all."""

from __future__ import annotations

from scenario import GLOO_CLOSED, none, only
from test_in_place import InPlace
from test_recalled import ELSEWHERE, departs

from unicron_elastic.recovery.commands import (
    ChangeWorld,
    Command,
    FinishJob,
    HoldJoins,
    MeetNodes,
    StartWorkers,
    StopWorkers,
)
from unicron_elastic.recovery.events import MembershipChanged
from unicron_elastic.recovery.joins import JOIN_DELAY_S
from unicron_elastic.recovery.state import Phase

WAITS = "1 node waits to join"
HELD = f"{WAITS}: it is let in when all workers train again, as they have made their last step for now."


def job_between() -> InPlace:
    """Its workers have made their last step."""
    job = InPlace(2)
    job.parted(0)
    job.parted(1)
    return job


def waits(job: InPlace) -> list[Command]:
    return job.feed(MembershipChanged(at=job._at(None), nodes_waiting=1, generation=job.state.generation))


def test_it_waits_and_nobody_is_disturbed_until_the_end() -> None:
    job = job_between()
    assert only(waits(job), HoldJoins).reason == HELD
    job.later(600.0)
    job.exited(0)
    assert only(job.exited(1), FinishJob)
    assert none(job.log, StopWorkers, StartWorkers, MeetNodes)


def test_it_is_let_in_when_all_train_again() -> None:
    job = job_between()
    waits(job)
    assert none(job.entered(0), HoldJoins)
    assert only(job.entered(1), HoldJoins).reason == ""
    assert only(job.later(JOIN_DELAY_S), MeetNodes).reason == f"{WAITS}: the nodes meet, and the workers go on."
    assert job.state.phase is Phase.RUNNING
    assert none(job.later(1.0), MeetNodes)


def test_workers_that_part_in_the_moment_before_the_nodes_meet_hold_it_up_too() -> None:
    job = InPlace(2)
    waits(job)
    job.parted(0)
    assert only(job.later(JOIN_DELAY_S), HoldJoins).reason == HELD
    job.parted(1)
    for local_rank in (0, 1):
        job.entered(local_rank)
    only(job.later(JOIN_DELAY_S), MeetNodes)


def test_one_of_them_that_has_ended_holds_it_up_until_the_others_do() -> None:
    job = job_between()
    job.exited(0)
    only(waits(job), HoldJoins)
    job.entered(1)
    assert none(job.later(JOIN_DELAY_S), MeetNodes, StopWorkers)


def test_a_failure_while_a_node_waits_is_not_taken_for_the_stop_of_the_others_for_it() -> None:
    job = job_between()
    waits(job)
    job.raised(0, GLOO_CLOSED, kind="RuntimeError")
    job.exited(0, 1)
    assert only(job.terminated(1), StartWorkers).restarts_used == 1


def test_a_node_that_departs_then_stops_nobody() -> None:
    job = InPlace(2, elsewhere=ELSEWHERE)
    job.parted(0)
    job.parted(1)
    assert only(departs(job), HoldJoins).reason.endswith("The workers go on.")
    assert none(job.later(600.0), StopWorkers, ChangeWorld)
    job.entered(0)
    job.entered(1)
    only(job.later(JOIN_DELAY_S), MeetNodes)
