"""What is recorded of a fault, from its first notice to the first step after it."""

from __future__ import annotations

from scenario import CRASHED, GLOO_CLOSED, KILLED, TERMINATED, Job, none, only

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


def test_the_cause_wins_over_a_consequence_that_came_first() -> None:
    job = Job()
    job.start()
    job.raised(0, GLOO_CLOSED, kind="RuntimeError", at=10.002, said_at=10.0)
    assert none(job.raised(1, "index 7 is out of range", kind="IndexError", at=10.004, said_at=9.99), StopWorkers)
    job.exited(0, 1)
    commands = job.exited(1, 1)
    incident = only(commands, RecordIncident).incident
    assert (incident.rank, incident.exception_type) == (5, "IndexError")
    assert len(incident.consequences) == 1
    assert incident.consequences[0].startswith("rank 4 raised RuntimeError: Connection closed by peer")
    assert only(commands, StartWorkers).reason.startswith("rank 5 failed first: it raised IndexError")
    assert incident.noticed_at == 10.002  # the incident was noticed by its first report
    assert incident.occurred_at == 9.99  # and began with its cause


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


def test_every_fault_that_costs_a_restart_is_recorded() -> None:
    job = Job()
    job.start()
    job.nodes_wait()
    job.exited(0, TERMINATED)
    commands = job.exited(1, CRASHED)
    assert only(commands, StartWorkers).restarts_used == 1
    assert only(commands, RecordIncident).incident.exit_code == CRASHED


def test_a_later_fault_does_not_overwrite_an_open_incident() -> None:
    job = Job()
    job.start()
    job.exited(0, KILLED)
    job.exited(1, TERMINATED)
    job.start(1)
    job.nodes_wait()  # before the first step: incident 1 is still open
    job.exited(0, TERMINATED)
    job.exited(1, CRASHED)
    first = job.records(1)
    assert {record.exit_code for record in first} == {KILLED}
    assert [record.superseded_by for record in first] == [None, None, 2]
    assert (first[-1].action, first[-1].first_step_at) == ("restart", None)
    assert first[-1].regrouped_at is not None
    (second,) = job.records(2)
    assert (second.generation, second.exit_code, second.restarts_used) == (2, CRASHED, 1)


def test_a_new_fault_before_the_first_step_is_an_incident_of_its_own() -> None:
    job = Job(workers=1)
    job.fail_once(KILLED)
    job.start(1)
    records = [c.incident for c in job.exited(0, 1) if isinstance(c, RecordIncident)]
    assert [(record.number, record.superseded_by) for record in records] == [(1, 2), (2, None)]
    incident = records[-1]
    assert (incident.number, incident.generation, incident.restarts_used) == (2, 2, 1)
    assert incident.regrouped_at is None
    job.start(2)
    assert only(job.stepped(0), RecordIncident).incident.number == 2  # the step is after the second one


def test_workers_are_stopped_before_anything_slow_is_done() -> None:
    job = Job()
    job.fail_once(KILLED)
    job.start(1)
    order = [StopWorkers, WakeAt, TellPeers, RecordIncident]  # the record is of the incident that was open
    assert [type(command) for command in job.exited(0, KILLED)] == order


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


def test_a_fault_heard_of_while_stopping_for_a_peers_fault_is_recorded() -> None:
    job = Job()
    job.start()
    job.peer_failed(at=10.0)
    job.raised(0, GLOO_CLOSED, kind="RuntimeError", at=10.1, said_at=9.9)
    job.exited(0, 1)
    commands = job.exited(1, TERMINATED)
    start = only(commands, StartWorkers)
    assert start.restarts_used == 1
    assert "Connection closed by peer" in start.reason  # nobody has heard it yet
    incident = only(commands, RecordIncident).incident
    assert (incident.number, incident.rank, incident.occurred_at, incident.noticed_at) == (1, 4, 9.9, 10.1)


def test_a_kill_that_the_kernel_told_of_late_began_with_what_was_noticed_first() -> None:
    job = Job()
    job.start()
    job.raised(0, GLOO_CLOSED, kind="RuntimeError", at=10.002, said_at=10.0)
    job.exited(0, 1)
    incident = only(job.exited(1, KILLED, at=10.03, ended_at=10.02), RecordIncident).incident
    assert (incident.rank, incident.exit_code) == (5, KILLED)
    assert incident.occurred_at == 10.0  # a cause is not later than what follows from it
