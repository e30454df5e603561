"""A worker that fails again and again where the others can go on in place: nobody loses work for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from jobs_in_place import ELSEWHERE, InPlace, TwoLogs
from scenario import KILLED, none, only

from unicron_elastic.planning.model.configurations import Configuration
from unicron_elastic.recovery.commands import (
    AskToLeave,
    ChangeWorld,
    Command,
    LeaveJob,
    ReplaceWorker,
    StopWorkers,
)
from unicron_elastic.recovery.departure import LEFT_OUT_WITHIN_S
from unicron_elastic.recovery.worker_loss import REPLACE_AFTER_S

THRICE = "Worker 1 has failed 3 times within 60 min."
NEEDED = "the job needs all 2 of its nodes."


def job_of(workers: int = 2, *, is_alone: bool = False, **policy: Any) -> InPlace:
    return InPlace(workers, elsewhere=() if is_alone else ELSEWHERE, **{"max_restarts": 9, **policy})


def loses(job: InPlace, local_rank: int) -> list[Command]:
    return job.exited(local_rank, KILLED)


def comes_back(job: InPlace, local_rank: int) -> None:
    assert only(job.later(REPLACE_AFTER_S), ReplaceWorker).local_rank == local_rank
    job.entered(local_rank)
    job.fetched(local_rank)


def loses_thrice(job: InPlace, local_rank: int = 1) -> list[Command]:
    """What is done at the third loss of one worker."""
    for _ in range(2):
        loses(job, local_rank)
        comes_back(job, local_rank)
    return loses(job, local_rank)


def test_if_the_others_have_not_made_their_world_yet_its_worker_is_not_replaced_meanwhile() -> None:
    job = TwoLogs(1)
    for _ in range(2):
        job.written(only(loses(job, 0), ChangeWorld))
        job.later(REPLACE_AFTER_S)
        job.entered(0)
        job.written(only(job.fetched(0), ChangeWorld))
    only(loses(job, 0), AskToLeave)
    job.may_leave()
    assert none(job.later(REPLACE_AFTER_S), LeaveJob, ReplaceWorker)
    only(job.later(LEFT_OUT_WITHIN_S), LeaveJob)


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ({"isolates": False}, "--unicron-on-fault is observe."),
        (
            {"configurations": {1: Configuration(replicas=1, pipeline=2), 2: Configuration(replicas=2, tensor=2)}},
            "without it the others could not go on in place.",
        ),
    ],
)
def test_it_does_not_ask_where_that_would_be_no_use(policy: dict[str, Any], why: str) -> None:
    job = job_of(**policy)
    job.state = replace(job.state, started_on=2)
    said = only(loses_thrice(job), ChangeWorld).reason
    assert said.endswith(f"{THRICE} The node stays: {why}")
    assert none(job.log, AskToLeave)


def test_a_bug_of_the_script_is_none_of_the_node() -> None:
    job = job_of(is_alone=True, same_failure_limit=0)
    for _ in range(4):
        job.raised(1, "bad input", step=7)
        job.exited(1, 1)
        comes_back(job, 1)
    assert none(job.log, AskToLeave, StopWorkers)
