"""What is recorded of a fault, from its first notice to the first step after it."""

from __future__ import annotations

from scenario import KILLED, TERMINATED, Job, only

from unicron_elastic.base.incident import PHASES
from unicron_elastic.recovery.commands import (
    FinishJob,
    RecordIncident,
    StartWorkers,
    StopWorkers,
    TellPeers,
    WakeAt,
)
from unicron_elastic.recovery.state import Phase


def test_a_killed_worker_costs_one_restart_and_one_incident() -> None:
    job = Job()
    job.start()
    job.stepped(0)
    job.stepped(1)
    noticed = job.exited(1, KILLED, at=200.005, ended_at=200.0, step=17)
    assert only(noticed, StopWorkers).local_ranks == (0,)
    assert only(noticed, StopWorkers).reason.startswith("rank 5 was killed by signal 9 (SIGKILL)")
    assert only(noticed, TellPeers).reason == only(noticed, StopWorkers).reason
    assert only(noticed, WakeAt).at == 200.005 + 30.0
    assert job.state.phase is Phase.STOPPING

    stopped = job.exited(0, TERMINATED, at=200.2)
    start = only(stopped, StartWorkers)
    assert start.restarts_used == 1
    assert start.reason == "Restart 1 of 3."  # what happened was said when the workers were stopped
    incident = only(stopped, RecordIncident).incident
    assert (incident.number, incident.generation, incident.rank, incident.exit_code) == (1, 1, 5, KILLED)
    assert (incident.run_id, incident.job, incident.host) == ("r1", "train.py", "n1")
    assert (incident.status, incident.severity, incident.step) == ("killed by signal", 2, 17)
    assert (incident.method, incident.action, incident.decision) == (
        "process supervision",
        "restart",
        "Restart 1 of 3.",
    )
    assert (incident.occurred_at, incident.noticed_at, incident.stopped_at) == (200.0, 200.005, 200.2)
    assert incident.regrouped_at is None
    assert incident.consequences == ()
    assert job.state.phase is Phase.IDLE

    regrouped = only(job.start(1, at=200.5), RecordIncident).incident
    assert (regrouped.number, regrouped.regrouped_at, regrouped.restarts_used) == (1, 200.5, 1)
    assert job.stepped(0) == []
    closed = only(job.stepped(1), RecordIncident).incident
    assert closed.number == 1
    assert closed.first_step_at == job.now
    assert [closed.phase_ms(phase) is not None for phase in PHASES] == [False, True, True, True, True]
    assert job.stepped(0) == []  # the incident is closed
    assert job.state.incident is None
    job.exited(0)
    assert only(job.exited(1), FinishJob)


def test_first_step_of_those_that_live_closes_the_incident() -> None:
    job = Job()
    job.fail_once(KILLED)
    job.start(1)
    job.exited(0, 0)
    assert only(job.stepped(1), RecordIncident).incident.first_step_at == job.now


def test_an_incident_stays_open_over_a_membership_change() -> None:
    job = Job()
    job.fail_once(KILLED)
    job.start(1, at=300.0)
    job.nodes_wait()
    job.terminated(0, 1)
    assert job.start(1, at=310.0) == []  # the job had regrouped before; the step is what it still waits for
    job.stepped(0)
    closed = only(job.stepped(1), RecordIncident).incident
    assert (closed.number, closed.regrouped_at, closed.first_step_at) == (1, 300.0, job.now)
