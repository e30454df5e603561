"""A node is lost, and the workers of this one cannot go on without it: what is told, recorded and counted."""

from __future__ import annotations

from typing import Any

import pytest
from scenario import CRASHED, GLOO_CLOSED, KILLED, TERMINATED, Job, none, only

from unicron_elastic.base.incident import Incident
from unicron_elastic.recovery.commands import Command, FailJob, RecordIncident, StartWorkers, StopWorkers, Tell
from unicron_elastic.recovery.events import OtherNodesLost
from unicron_elastic.recovery.state import Phase

LOST = "n2 is lost: its process has ended."
BOTH_LOST = f"{LOST} n3 is lost: its lease has run out."


def loses(job: Job, *nodes: str, reason: str = LOST) -> list[Command]:
    generation = job.state.generation
    return job.feed(OtherNodesLost(at=job._at(None), nodes=nodes or ("n2",), reason=reason, generation=generation))


def started(**policy: Any) -> Job:
    job = Job(**policy)
    job.start(why_stay="")
    return job


def recorded(commands: list[Command]) -> Incident:
    return only(commands, RecordIncident).incident


def test_the_incident_names_the_node_and_ends_with_the_first_step() -> None:
    job = started()
    assert only(loses(job), StopWorkers).reason == LOST
    ended = job.exited(0, TERMINATED) + job.exited(1, TERMINATED)
    incident = recorded(ended)
    assert (incident.reason, incident.status, incident.rank) == (LOST, "lost connection", None)
    assert (incident.action, incident.decision) == ("restart", "Restart 1 of 3.")
    assert only(ended, StartWorkers).restarts_used == 1
    assert recorded(job.start(1)).regrouped_at is not None
    job.stepped(0)
    assert recorded(job.stepped(1)).first_step_at is not None


@pytest.mark.parametrize("is_late", [False, True])
def test_what_workers_raise_for_it_is_its_consequence_and_no_failure_of_theirs(is_late: bool) -> None:
    job = started()
    if is_late:
        loses(job)
    raised = job.raised(0, GLOO_CLOSED, kind="RuntimeError", said_at=job.now - 0.02 if is_late else None)
    if not is_late:
        only(raised, StopWorkers)
        assert only(loses(job), Tell).reason == LOST
    ended = job.exited(0, 1) + job.exited(1, TERMINATED)
    incident = recorded(ended)
    assert (incident.reason, incident.exception_type, incident.decision) == (LOST, None, "Restart 1 of 3.")
    (consequence,) = incident.consequences
    assert "Connection closed by peer" in consequence
    assert only(ended, StartWorkers).reason == LOST
    assert job.state.attempts == ()  # this node is not put out for it one day


@pytest.mark.parametrize("code", [CRASHED, KILLED])
def test_a_worker_that_fails_by_itself_is_the_cause(code: int) -> None:
    job = started()
    job.exited(0, code)
    assert none(loses(job), Tell)
    incident = recorded(job.exited(1, TERMINATED))
    assert incident.rank == 4
    assert incident.exit_code == code


def test_more_nodes_are_lost_meanwhile() -> None:
    job = started()
    loses(job)
    loses(job, "n2", "n3", reason=BOTH_LOST)
    assert recorded(job.exited(0, TERMINATED) + job.exited(1, TERMINATED)).reason == BOTH_LOST


def test_without_a_restart_left_the_job_fails_for_it() -> None:
    job = started(max_restarts=0)
    loses(job)
    ended = job.exited(0, TERMINATED) + job.exited(1, TERMINATED)
    assert recorded(ended).action == "fail"
    assert only(ended, FailJob).reason.startswith(LOST)
    assert (job.state.phase, job.state.incident) == (Phase.FINISHED, None)


def test_of_a_node_that_was_lost_for_those_who_wait_anyway_nothing_is_counted_twice() -> None:
    job = started()
    job.nodes_wait()
    loses(job)
    ended = job.exited(0, TERMINATED) + job.exited(1, TERMINATED)
    assert only(ended, StartWorkers).restarts_used == 1
