"""Workers that hang: evidence first, then their end, unless they go on or nothing is to be done."""

from __future__ import annotations

import pytest
from scenario import GO_ON, HANGS, KILLED, TERMINATED, Job, none, only

from unicron_elastic.faults import HangKind
from unicron_elastic.recovery.commands import (
    Command,
    FinishJob,
    GatherEvidence,
    KillWorkers,
    RecordIncident,
    StartWorkers,
    StopWorkers,
    Tell,
    TellPeers,
    WakeAt,
)
from unicron_elastic.recovery.state import Phase


def started(**policy: object) -> Job:
    job = Job(**policy)  # type: ignore[arg-type]
    job.start()
    return job


def wakes(commands: list[Command]) -> list[float]:
    return [command.at for command in commands if isinstance(command, WakeAt)]


def test_nothing_is_killed_before_there_is_evidence() -> None:
    job = started()
    commands = job.hung(1, at=200.0)
    gather = only(commands, GatherEvidence)
    assert (gather.local_ranks, gather.reason) == ((0, 1), HANGS)
    assert none(commands, StopWorkers, KillWorkers, TellPeers)
    assert only(commands, Tell).reason == HANGS
    assert wakes(commands) == [203.0]
    assert none(job.time(200.0), StopWorkers, KillWorkers)

    commands = job.evidence(0, 1, at=200.4)
    assert only(commands, KillWorkers).local_ranks == (1,)
    assert only(commands, StopWorkers).local_ranks == (0, 1)
    assert only(commands, TellPeers).reason == HANGS
    assert job.state.phase is Phase.STOPPING

    job.exited(1, KILLED)
    incident = only(ended := job.exited(0, TERMINATED), RecordIncident).incident
    assert (incident.rank, incident.status, incident.severity, incident.reason) == (5, "task hang", 2, HANGS)
    assert (incident.method, incident.evidence, incident.stack) == (
        "online statistics",
        "/logs/evidence.txt",
        "stack of 1",
    )
    assert (incident.occurred_at, incident.noticed_at) == (199.9, 200.0)
    assert incident.exit_code is None  # how it ended was our doing
    assert incident.consequences == ()
    assert only(ended, StartWorkers).restarts_used == 1


def test_evidence_is_not_waited_for_for_ever() -> None:
    job = started()
    job.hung(1, at=200.0)
    assert only(job.time(203.0), KillWorkers).local_ranks == (1,)
    job.evidence(1, at=203.5)  # late, but not lost
    job.exited(1, KILLED)
    incident = only(job.exited(0, TERMINATED), RecordIncident).incident
    assert (incident.evidence, incident.stack) == ("/logs/evidence.txt", None)


@pytest.mark.parametrize(("kind", "act_at"), [(HangKind.DEADLOCKED, 230.0), (HangKind.AWAITED, 500.0)])
def test_what_may_end_by_itself_has_to_last(kind: HangKind, act_at: float) -> None:
    job = started(hang_patience_s=30.0)
    assert act_at in wakes(job.hung(1, at=200.0, kind=kind))
    assert job.evidence(1, at=200.4) == []
    assert job.time(203.0) == []
    assert job.time(205.0) == [Tell(reason=HANGS)]
    assert job.time(act_at - 0.1) == []
    commands = job.time(act_at)
    assert only(commands, KillWorkers).local_ranks == (1,)
    assert only(commands, StopWorkers).reason == f"Nothing has moved for {act_at - 199.9:.0f} s: all workers stop."


def test_with_little_patience_it_is_told_when_it_is_acted_upon() -> None:
    job = started(hang_patience_s=1.0)
    job.hung(1, at=200.0, kind=HangKind.DEADLOCKED)
    job.evidence(1, at=200.4)
    commands = job.time(201.0)
    assert isinstance(commands[0], Tell)
    only(commands, KillWorkers)


def test_who_keeps_nobody_waiting_is_never_killed() -> None:
    job = started()
    job.hung(1, at=200.0, kind=HangKind.UNCLEAR)
    job.evidence(1, at=200.4)
    assert job.time(259.0) == []
    assert job.time(260.0) == [Tell(reason=HANGS)]
    assert job.time(90_000.0) == []
    assert job.state.incidents == 0


def test_a_hang_that_gets_surer_is_answered_accordingly() -> None:
    job = started()
    job.hung(1, at=200.0, kind=HangKind.UNCLEAR)
    job.evidence(0, 1, at=200.4)
    commands = job.hung(1, at=201.0, kind=HangKind.AWAITED)
    assert none(commands, GatherEvidence)  # it is there
    assert wakes(commands) == [204.0, 206.0, 501.0]
    assert job.hung(1, at=202.0, kind=HangKind.UNCLEAR) == []
    commands = job.hung(1, at=203.0)
    assert only(commands, Tell).reason == HANGS
    only(job.time(203.0), KillWorkers)
    job.exited(1, KILLED)
    incident = only(job.exited(0, TERMINATED), RecordIncident).incident
    assert (incident.noticed_at, incident.evidence) == (200.0, "/logs/evidence.txt")


def test_who_goes_on_is_let_go() -> None:
    job = started()
    job.hung(1, at=200.0, kind=HangKind.AWAITED)
    job.evidence(1, at=200.4)
    assert job.goes_on() == []  # nobody had heard of it
    assert job.time(230.0) == []
    assert job.state.incidents == 0
    job.hung(1, at=240.0, kind=HangKind.AWAITED)
    job.time(245.0)
    assert job.goes_on() == [Tell(reason=GO_ON)]
    assert job.state.hang is None


def test_who_hung_in_the_world_before_and_is_not_seen_to_hang_in_this_one_is_let_be() -> None:
    job = started(hang_patience_s=30.0)
    job.hung(1, at=200.0, kind=HangKind.AWAITED)
    job.evidence(1, at=200.4)
    assert job.watched_anew(at=203.0) == []
    assert job.time(206.0) == []  # nobody hears of it
    assert job.time(1000.0) == []
    assert job.state.phase is Phase.RUNNING


def test_who_still_hangs_in_the_new_world_has_no_more_patience_for_it() -> None:
    job = started(hang_patience_s=30.0)
    job.hung(1, at=200.0, kind=HangKind.AWAITED)
    job.evidence(1, at=200.4)
    assert job.time(205.0) == [Tell(reason=HANGS)]
    job.watched_anew(at=300.0)
    commands = job.hung(1, at=360.0, since=199.9, kind=HangKind.AWAITED)
    assert none(commands, GatherEvidence, Tell)  # it is the same hang
    assert 500.0 in wakes(commands)
    assert job.time(499.0) == []
    assert only(job.time(500.0), KillWorkers).local_ranks == (1,)


def test_what_was_due_meanwhile_is_done_when_it_is_seen_again() -> None:
    job = started(hang_patience_s=30.0)
    job.hung(1, at=200.0, kind=HangKind.DEADLOCKED)
    job.evidence(1, at=200.4)
    job.watched_anew(at=203.0)
    assert job.time(231.0) == []
    assert 263.0 in wakes(job.hung(1, at=263.0, since=199.9, kind=HangKind.DEADLOCKED))
    only(job.time(263.0), KillWorkers)


def test_in_a_new_world_it_may_be_less_sure() -> None:
    job = started(hang_patience_s=30.0)
    job.hung(1, at=200.0, kind=HangKind.DEADLOCKED)
    job.watched_anew(at=203.0)
    job.hung(1, at=263.0, since=199.9, kind=HangKind.UNCLEAR)
    assert none(job.time(1000.0), KillWorkers)


def test_a_step_later_it_is_another_hang() -> None:
    job = started(hang_patience_s=30.0)
    job.hung(1, at=200.0, kind=HangKind.AWAITED)
    job.time(205.0)
    job.watched_anew(at=300.0)
    commands = job.hung(1, at=400.0, since=350.0, kind=HangKind.AWAITED)
    only(commands, GatherEvidence)
    assert 700.0 in wakes(commands)
    assert job.time(405.0) == [Tell(reason=HANGS)]


def test_a_hang_that_is_only_observed_is_recorded() -> None:
    job = started(acts_on_hangs=False)
    job.hung(1, at=200.0, kind=HangKind.AWAITED)
    assert none(job.evidence(1, at=200.4), RecordIncident)
    commands = job.time(205.0)
    assert only(commands, Tell).reason == HANGS
    incident = only(commands, RecordIncident).incident
    assert incident.action == "observe"
    assert incident.decision == "Nothing was done: hangs are only observed (--unicron-on-hang, --unicron-on-fault)."
    job.hung(1, at=206.0, kind=HangKind.STOPPED)  # it is surer now, and still one hang
    job.time(206.0)
    (again,) = job.records()[1:]
    assert (again.number, job.state.incidents) == (incident.number, 1)
    assert (incident.evidence, incident.noticed_at) == ("/logs/evidence.txt", 200.0)
    assert job.state.phase is Phase.RUNNING
    assert job.time(900.0) == []
    assert job.goes_on() == [Tell(reason=GO_ON)]
    job.exited(1, KILLED)
    job.exited(0, TERMINATED)
    assert [record.number for record in job.records()] == [1, 1, 2]


def test_all_who_hang_are_one_fault() -> None:
    job = started(workers=3)
    job.hung(1, 2)
    assert only(job.evidence(), KillWorkers).local_ranks == (1, 2)
    for local_rank, code in ((1, KILLED), (2, KILLED), (0, TERMINATED)):
        commands = job.exited(local_rank, code)
    assert only(commands, RecordIncident).incident.consequences == ()


def test_another_fault_meanwhile_takes_those_who_hang_along() -> None:
    job = started(workers=3)
    job.hung(1, kind=HangKind.AWAITED)
    commands = job.exited(2, KILLED)
    assert only(commands, StopWorkers).local_ranks == (0, 1)
    assert only(commands, KillWorkers).local_ranks == (1,)
    assert job.state.hang is None


def test_a_peers_fault_takes_them_along_too() -> None:
    job = started()
    job.hung(1, kind=HangKind.AWAITED)
    assert only(job.peer_failed(), KillWorkers).local_ranks == (1,)


@pytest.mark.parametrize("code", [0, KILLED])
def test_who_ended_meanwhile_does_not_hang(code: int) -> None:
    job = started()
    job.hung(1, kind=HangKind.AWAITED)
    job.exited(1, code)
    assert none(job.evidence(1), KillWorkers)
    assert none(job.time(600.0), GatherEvidence)


def test_the_end_of_all_is_the_end_of_the_hang() -> None:
    job = started()
    job.hung(1, kind=HangKind.AWAITED)
    job.exited(1)
    only(job.exited(0), FinishJob)
    assert job.state.hang is None


def test_nobody_hangs_who_does_not_run() -> None:
    job = started()
    assert job.hung(7) == []
    assert job.hung(1, generation=0) == []
    job.exited(1, KILLED)
    assert job.hung(0) == []


def test_it_is_told_once() -> None:
    job = started()
    job.hung(1, kind=HangKind.AWAITED)
    assert job.hung(0, kind=HangKind.AWAITED) == []


def test_one_that_is_only_observed_is_one_incident_in_all_worlds() -> None:
    job = started(acts_on_hangs=False)
    job.hung(1, at=200.0, kind=HangKind.AWAITED)
    job.evidence(1, at=200.4)
    only(job.time(205.0), RecordIncident)
    job.watched_anew(at=206.0)
    job.hung(1, at=266.0, since=199.9, kind=HangKind.AWAITED)
    incident = only(job.time(271.0), RecordIncident).incident
    assert (incident.number, job.state.incidents) == (1, 1)
