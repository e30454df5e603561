"""A replacement that never comes to train: the others, who make progress, train on without it."""

from __future__ import annotations

from typing import Any

from jobs_in_place import InPlace
from scenario import KILLED, none, only

from unicron_elastic.base.world import Member
from unicron_elastic.engine.protocol.agreement import NoStateLeft
from unicron_elastic.recovery.commands import (
    AskToLeave,
    ChangeWorld,
    Command,
    FailJob,
    FinishJob,
    RecordIncident,
    ReplaceWorker,
    StartWorkers,
    TellPeers,
    WakeAt,
)
from unicron_elastic.recovery.node import NOT_TAKEN
from unicron_elastic.recovery.policy import ODD_REPLICA
from unicron_elastic.recovery.state import Part
from unicron_elastic.recovery.storms import FRUITLESS_MAX
from unicron_elastic.recovery.worker_loss import NO_STATE_LEFT, REPLACE_AFTER_S
from unicron_elastic.training.group.handover import NotTakenError
from unicron_elastic.training.step.comparison import OddReplicaError

ELSEWHERE = Member(name="0.0#z", node="n2#z", local_rank=0)
NOT_REPLACED = "2 ranks train on: rank 5 is not replaced any more."
STARTED_AGAIN = "2 ranks train on: rank 5 is started again, which counts as no restart."


def lost_once(**policy: Any) -> InPlace:
    """A job whose worker 1 is replaced."""
    job = InPlace(3, **policy)
    job.exited(1, KILLED)
    job.later(REPLACE_AFTER_S)
    return job


def fails(job: InPlace) -> list[Command]:
    """Its replacement fails before it asks for a part, and is replaced if it is to be."""
    raised = job.raised(1, "No space left on device", step=0)
    return [*raised, *job.exited(1, 1, step=0), *job.later(REPLACE_AFTER_S)]


def does_not_fit(job: InPlace, local_rank: int = 1) -> list[Command]:
    """Its replacement says that it cannot take the others' state."""
    return job.raised(local_rank, "does not fit", kind=f"unicron_elastic.{NOT_TAKEN}", step=0)


def decision(job: InPlace) -> str:
    return [each for each in job.log if isinstance(each, RecordIncident)][-1].incident.decision


def test_a_replacement_that_fails_again_and_again_is_tried_less_often_and_then_given_up() -> None:
    job = lost_once(max_restarts=1, same_failure_limit=3)
    waits = []
    for _ in range(FRUITLESS_MAX - 2):
        began = job.now
        fails(job)
        assert decision(job).startswith(STARTED_AGAIN)
        while not job.state.find(1) or job.part(1) is not Part.NONE:
            job.time(min(each.at for each in job.log if isinstance(each, WakeAt) and each.at > job.now))
        waits.append(round(job.now - began))
    assert waits == [0, 0, 0, 1, 2, 4, 8, 16]
    fails(job)
    assert decision(job) == NOT_REPLACED
    assert job.state.restarts_used == 1
    assert none(job.later(400.0), ReplaceWorker)


def test_whoever_is_lost_after_that_has_its_own_restart() -> None:
    job = lost_once(max_restarts=2)
    for _ in range(3):
        fails(job)
    job.exited(2, KILLED)
    assert decision(job) == "1 rank goes on from the failed step. Restart 2 of 2."


def test_a_replacement_that_the_state_does_not_fit_is_given_up_at_once() -> None:
    job = lost_once(max_restarts=9)
    job.entered(1)
    told = only(does_not_fit(job), ChangeWorld)
    assert not told.lost  # it had no part in the world yet
    assert told.reason.endswith(NOT_REPLACED)
    job.exited(1, 1)
    assert none(job.later(REPLACE_AFTER_S), ReplaceWorker)
    assert job.state.restarts_used == 1


def test_the_job_ends_well_without_it() -> None:
    job = lost_once(max_restarts=1)
    does_not_fit(job)
    job.exited(1, 1)
    for local_rank in (0, 2):
        assert job.state.world is not None
        job.parted(local_rank, job.state.world.number)
    assert none(job.exited(0), FinishJob)
    assert only(job.exited(2), FinishJob)


def test_one_that_does_not_fit_when_it_is_in_the_world_already_leaves_it() -> None:
    job = lost_once(max_restarts=9)
    job.entered(1)
    job.fetched(1)
    assert job.part(1) is Part.MEMBER
    told = only(does_not_fit(job), ChangeWorld)
    assert told.lost
    assert told.reason.endswith(NOT_REPLACED)
    assert job.state.restarts_used == 1


def test_a_node_where_nobody_trains_leaves_for_one_that_does_not_fit() -> None:
    job = InPlace(1, elsewhere=(ELSEWHERE,), max_restarts=9)
    job.exited(0, KILLED)
    job.later(REPLACE_AFTER_S)
    assert only(does_not_fit(job, 0), AskToLeave).is_departure
    assert none(job.log, FailJob, TellPeers)


def test_where_it_may_not_leave_all_begin_again() -> None:
    job = InPlace(1, elsewhere=(ELSEWHERE,), max_restarts=9)
    job.exited(0, KILLED)
    job.later(REPLACE_AFTER_S)
    does_not_fit(job, 0)
    job.exited(0, 1)
    assert only(job.may_leave("the job needs all 2 of its nodes."), StartWorkers).restarts_used == 2


def test_a_script_that_fails_in_its_step_again_and_again_still_ends_the_job() -> None:
    job = lost_once(max_restarts=1)
    job.entered(1)
    job.fetched(1)
    assert job.part(1) is Part.MEMBER
    job.raised(1, step=7)
    job.exited(1, 1, step=7)
    job.terminated(0)
    assert only(job.terminated(2), FailJob)


def test_exceptions_are_known_by_the_names_that_training_gives_them() -> None:
    assert (NoStateLeft.__name__, NotTakenError.__name__) == (NO_STATE_LEFT, NOT_TAKEN)
    assert OddReplicaError.__name__ == ODD_REPLICA
