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
    DepartWell,
    FailJob,
    LeaveJob,
    RecordIncident,
    ReplaceWorker,
    StartWorkers,
    StopWorkers,
    Tell,
    TellPeers,
)
from unicron_elastic.recovery.departure import LEFT_OUT_WITHIN_S
from unicron_elastic.recovery.state import Phase
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


def test_alone_the_others_go_on_as_ever_and_people_hear_why_the_node_stays() -> None:
    job = job_of(is_alone=True)
    said = only(loses_thrice(job), ChangeWorld).reason
    assert said.endswith(
        f"1 rank goes on from the failed step. Restart 3 of 9. {THRICE} The node stays: it is the only node of the job."
    )
    assert none(job.log, StopWorkers, StartWorkers, AskToLeave)
    assert (job.records()[-1].action, job.records()[-1].severity) == ("go on", 1)
    comes_back(job, 1)
    assert job.names() == ["4.0", "5.3"]


def test_the_restarts_that_are_left_end_it() -> None:
    job = job_of(is_alone=True, max_restarts=2)
    loses_thrice(job)
    assert only(job.terminated(0), FailJob).reason.endswith("No restart: all 2 restarts are used.")


def test_a_node_that_the_others_can_spare_leaves_and_they_go_on_in_place() -> None:
    job = job_of()
    commands = loses_thrice(job)
    only(commands, ChangeWorld)  # first of all the others go on
    asks = only(commands, AskToLeave)
    records = [command for command in commands if isinstance(command, RecordIncident)]
    assert commands.index(asks) > commands.index(records[-1])  # the answer comes at once
    assert (asks.is_departure, asks.have_state) == (True, ("n2",))
    assert asks.reason == f"Node n1 leaves the job: {THRICE}"
    told = job.may_leave()
    incident = only(told, RecordIncident).incident
    assert (incident.action, incident.severity) == ("isolate", 1)
    assert incident.decision == f"{THRICE} This node leaves the job."
    assert only(job.left_out(), StopWorkers).local_ranks == (0,)
    leaves = only(job.terminated(0), LeaveJob)
    assert (leaves.quarantine_s, leaves.cause is None) == (3600.0, False)
    assert job.state.phase is Phase.FINISHED
    assert len([each for each in job.records() if each.number == incident.number]) == 2
    assert none(job.log, TellPeers, StartWorkers, DepartWell, FailJob)
    assert len(job.replaced) == 2


def test_so_does_one_that_has_lost_its_only_worker() -> None:
    job = job_of(1)
    only(loses_thrice(job, 0), AskToLeave)
    assert only(job.may_leave(), LeaveJob).quarantine_s == 3600.0
    assert len(job.replaced) == 2


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


def test_a_node_that_cannot_be_spared_stays_and_its_worker_comes_back() -> None:
    job = job_of()
    loses_thrice(job)
    assert only(job.may_leave(NEEDED), Tell).reason == f"{THRICE} The node stays: {NEEDED}"
    assert job.state.recall is None
    comes_back(job, 1)
    assert none(job.log, StopWorkers, LeaveJob)
    only(loses(job, 1), AskToLeave)  # once more, when it has failed once more


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
