"""A replacement that never comes to train: the others, who make progress, train on without it."""

from __future__ import annotations

from typing import Any

from scenario import KILLED, none, only
from test_in_place import InPlace

from unicron_elastic.recovery.commands import ChangeWorld, Command, FailJob, FinishJob, RecordIncident, ReplaceWorker
from unicron_elastic.recovery.state import Part
from unicron_elastic.recovery.worker_loss import NOT_TAKEN, REPLACE_AFTER_S

NOT_REPLACED = "2 ranks go on from the failed step. {why}rank 5 is not replaced any more."


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


def decision(job: InPlace) -> str:
    return [each for each in job.log if isinstance(each, RecordIncident)][-1].incident.decision


def test_a_replacement_that_fails_again_and_again_is_given_up() -> None:
    job = lost_once(max_restarts=9, same_failure_limit=3)
    for _ in range(2):
        assert only(fails(job), ReplaceWorker)
    assert none(fails(job), ReplaceWorker)
    why = "No restart: the same failure came 3 times in a row before the first step, without progress. "
    assert decision(job) == NOT_REPLACED.format(why=why)
    assert job.state.restarts_used == 3
    assert none(job.later(400.0), ReplaceWorker)


def test_a_replacement_for_which_no_restart_is_left_is_given_up() -> None:
    job = lost_once(max_restarts=1)
    fails(job)
    assert decision(job) == NOT_REPLACED.format(why="No restart: the only restart is used. ")
    assert none(job.log, FailJob)


def test_a_replacement_that_the_state_does_not_fit_is_given_up_at_once() -> None:
    job = lost_once(max_restarts=9)
    job.entered(1)
    told = only(job.raised(1, "does not fit", kind=f"unicron_elastic.{NOT_TAKEN}"), ChangeWorld)
    assert not told.lost  # it had no part in the world yet
    assert told.reason.endswith(NOT_REPLACED.format(why=""))
    job.exited(1, 1)
    assert none(job.later(REPLACE_AFTER_S), ReplaceWorker)
    assert job.state.restarts_used == 1


def test_the_job_ends_well_without_it() -> None:
    job = lost_once(max_restarts=1)
    fails(job)
    for local_rank in (0, 2):
        assert job.state.world is not None
        job.parted(local_rank, job.state.world.number)
    assert none(job.exited(0), FinishJob)
    assert only(job.exited(2), FinishJob)


def test_a_script_that_fails_in_its_step_again_and_again_still_ends_the_job() -> None:
    job = lost_once(max_restarts=1)
    job.entered(1)
    job.fetched(1)
    assert job.part(1) is Part.MEMBER
    job.raised(1, step=7)
    job.exited(1, 1, step=7)
    job.terminated(0)
    assert only(job.terminated(2), FailJob)
