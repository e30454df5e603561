"""A worker that left out a collective."""

from __future__ import annotations

from scenario import LEFT_OUT, TERMINATED, Job, none, only

from unicron_elastic.recovery.commands import KillWorkers, RecordIncident, StartWorkers, StopWorkers, Tell
from unicron_elastic.recovery.machine import Phase


def test_all_start_again_from_where_they_were_in_step() -> None:
    job = Job(max_restarts=1)
    job.start()
    commands = job.out_of_step(1)
    stop = only(commands, StopWorkers)
    assert (stop.local_ranks, stop.reason) == ((0, 1), LEFT_OUT)
    assert none(commands, KillWorkers)
    job.exited(0, TERMINATED)
    commands = job.exited(1, TERMINATED)
    incident = only(commands, RecordIncident).incident
    assert (incident.rank, incident.status, incident.severity) == (5, "other software error", 2)
    assert (incident.method, incident.action, incident.reason) == ("online statistics", "restart", LEFT_OUT)
    assert only(commands, StartWorkers).restarts_used == 1


def test_without_a_restart_the_job_goes_on_and_people_know() -> None:
    job = Job(max_restarts=0)
    job.start()
    commands = job.out_of_step(1)
    assert job.state.phase is Phase.RUNNING
    assert none(commands, StopWorkers)
    incident = only(commands, RecordIncident).incident
    assert (incident.action, incident.rank) == ("observe", 5)
    assert only(commands, Tell).reason == (
        f"{LEFT_OUT} No restart: --max-restarts is 0. The job goes on, and its numbers are not to be trusted."
    )


def test_who_only_observes_lets_it_go_on() -> None:
    job = Job(max_restarts=3, acts_on_hangs=False)
    job.start()
    commands = job.out_of_step(1)
    assert none(commands, StopWorkers)
    assert "only observed" in only(commands, RecordIncident).incident.decision


def test_of_an_earlier_generation_or_after_the_end_it_is_nothing() -> None:
    job = Job()
    job.start()
    assert job.out_of_step(1, generation=0) == []
    assert job.out_of_step(7) == []
    job.exited(1, 0)
    assert job.out_of_step(1) == []
