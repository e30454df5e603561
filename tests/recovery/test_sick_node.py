"""A node on which something is broken, and one whose workers fail again and again."""

from __future__ import annotations

from scenario import FELL_OFF, KILLED, TERMINATED, Job, none, only

from unicron_elastic.faults import Severity, Status
from unicron_elastic.recovery.commands import (
    AskToLeave,
    FailJob,
    LeaveJob,
    RecordIncident,
    StartWorkers,
    StopWorkers,
    TellPeers,
)
from unicron_elastic.recovery.state import Phase

ONLY_NODE = "it is the only node of the job."


def test_a_broken_gpu_takes_its_node_out_of_a_job_that_goes_on_without_it() -> None:
    job = Job()
    job.start(why_stay="")
    found = job.finds()
    assert [type(command) for command in found if isinstance(command, StopWorkers | TellPeers)] == [
        StopWorkers, TellPeers
    ]  # fmt: skip
    assert only(found, StopWorkers).local_ranks == (0, 1)
    assert only(found, StopWorkers).reason == only(found, TellPeers).reason == FELL_OFF
    assert only(job.terminated(0, 1), AskToLeave).reason == FELL_OFF
    left = only(job.may_leave(), LeaveJob)
    assert left.reason == f"{FELL_OFF} This node leaves the job."
    assert left.quarantine_s is None  # a broken GPU does not mend itself
    assert job.state.phase is Phase.FINISHED
    incident = job.records()[-1]
    assert (incident.number, incident.rank, incident.severity, incident.status) == (1, None, 1, "GPU driver error")
    assert (incident.action, incident.method, incident.reason) == ("isolate", "node health", FELL_OFF)
    assert incident.phase_ms("stopped") is not None


def test_workers_that_fail_while_their_node_leaves_are_consequences() -> None:
    job = Job()
    job.start(why_stay="")
    job.finds()
    job.exited(0, KILLED, at=200.0, ended_at=99.0)
    only(job.exited(1, TERMINATED), AskToLeave)
    commands = job.may_leave()
    only(commands, LeaveJob)
    incident = only(commands, RecordIncident).incident
    assert job.state.incidents == incident.number == 1
    assert [reason.partition(" (")[0] for reason in incident.consequences] == ["rank 4 was killed by signal 9"]


def test_the_only_node_goes_on_and_says_why() -> None:
    job = Job()
    job.start()
    found = job.finds()
    assert none(found, StopWorkers, TellPeers)
    incident = only(found, RecordIncident).incident
    assert (incident.action, incident.decision) == ("observe", f"The node stays: {ONLY_NODE}")
    assert job.finds(reason="GPU 4 has fallen off the bus.") == []  # one incident for all of them
    assert job.state.phase is Phase.RUNNING


def test_a_failure_that_follows_a_finding_is_the_same_incident() -> None:
    job = Job()
    job.start()
    job.finds(at=100.0)
    job.exited(0, KILLED, at=101.0)
    commands = job.terminated(1)
    incident = only(commands, RecordIncident).incident
    assert (incident.number, incident.rank) == (1, 4)
    assert (incident.status, incident.severity, incident.action) == ("GPU driver error", 1, "restart")
    assert incident.reason.startswith(FELL_OFF.rstrip(".") + "; rank 4 was killed by signal 9 (SIGKILL)")
    assert incident.decision == f"Restart 1 of 3. The node stays: {ONLY_NODE}"
    assert (incident.occurred_at, incident.noticed_at, incident.method) == (100.0, 100.0, "node health")
    assert only(commands, StartWorkers).restarts_used == 1


def test_a_failure_long_after_a_finding_has_its_own_cause() -> None:
    job = Job()
    job.start()
    job.finds(at=100.0)
    job.exited(0, KILLED, at=131.0)
    incident = only(job.terminated(1), RecordIncident).incident
    assert (incident.number, incident.status, incident.severity) == (2, "killed by signal", 2)


def test_a_finding_that_comes_with_the_failure_explains_it() -> None:
    job = Job()
    job.start(why_stay="")
    job.raised(0, "CUDA error: unspecified launch failure", kind="torch.AcceleratorError")
    assert none(job.finds(), StopWorkers, RecordIncident)
    job.exited(0, 1)
    assert none(job.terminated(1), RecordIncident)
    commands = job.may_leave()
    left = only(commands, LeaveJob)
    assert left.cause is not None
    assert left.cause.fault.status is Status.GPU_DRIVER_ERROR
    assert left.quarantine_s is None
    assert only(commands, RecordIncident).incident.exception_type == "torch.AcceleratorError"


def test_a_milder_finding_explains_what_is_vague_and_costs_nobody_the_node() -> None:
    job = Job()
    job.start(why_stay="")
    memory = Status.ILLEGAL_MEMORY_ACCESS
    assert job.finds(status=memory, severity=Severity.SEV2, reason="GPU 3 met a page fault (XID 31).") == []
    job.exited(0, KILLED)
    incident = only(job.terminated(1), RecordIncident).incident
    assert (incident.status, incident.severity, incident.action) == (memory.value, 2, "restart")
    job.start(1, why_stay="")
    job.raised(1, "bad input")  # says more than the GPU does
    job.exited(1, 1)
    assert "XID 31" not in only(job.terminated(0), RecordIncident).incident.reason


def test_the_third_failure_of_a_worker_isolates_a_node_that_may_leave() -> None:
    job = Job(max_restarts=9)
    for used in range(2):
        job.start(used, why_stay="")
        job.exited(0, KILLED, step=used)
        only(job.terminated(1), StartWorkers)
    job.start(2, why_stay="")
    job.exited(0, KILLED, step=7)
    only(job.terminated(1), AskToLeave)
    commands = job.may_leave()
    left = only(commands, LeaveJob)
    assert left.reason.endswith(" Worker 0 has failed 3 times within 60 min. This node leaves the job.")
    assert left.quarantine_s == 3600.0  # it may not be the node's fault
    incident = only(commands, RecordIncident).incident
    assert (incident.severity, incident.action, incident.status) == (1, "isolate", "killed by signal")


def test_it_stays_if_it_must_and_restarts_go_on() -> None:
    job = Job(max_restarts=9)
    for used in range(4):
        job.start(used)
        job.exited(0, KILLED, step=used)
        start = only(job.terminated(1), StartWorkers)
    assert start.reason == f"Restart 4 of 9. Worker 0 has failed 4 times within 60 min. The node stays: {ONLY_NODE}"


def test_observing_isolates_nobody() -> None:
    job = Job(isolates=False)
    job.start(why_stay="")
    incident = only(job.finds(), RecordIncident).incident
    assert (incident.action, incident.decision) == ("observe", "The node stays: --unicron-on-fault is observe.")
    job.exited(0, KILLED)
    assert none(job.terminated(1), AskToLeave)


def test_the_users_count_of_restarts_comes_first() -> None:
    job = Job(max_restarts=0)
    job.start(why_stay="")
    job.raised(0, "CUDA error: uncorrectable ECC error encountered", kind="RuntimeError")
    job.exited(0, 1)
    assert "--max-restarts is 0" in only(job.terminated(1), FailJob).reason


def test_a_node_stays_if_its_end_would_be_the_end_of_the_job() -> None:
    job = Job(max_restarts=1)
    job.start(1, why_stay="")
    incident = only(job.finds(), RecordIncident).incident
    assert incident.action == "observe"
    assert incident.decision == "The node stays: the other nodes have no restart left to go on without it."


def test_who_stops_for_a_peer_and_is_sick_leaves() -> None:
    job = Job()
    job.start(why_stay="")
    job.peer_failed()
    assert none(job.finds(), StopWorkers)  # they stop already
    only(job.terminated(0, 1), AskToLeave)
    only(job.may_leave(), LeaveJob)


def test_a_finding_between_two_generations_explains_the_next_failure() -> None:
    job = Job()
    job.start()
    job.exited(0, KILLED)
    job.terminated(1)
    assert job.finds() == []
    job.start(1)
    job.exited(0, KILLED)
    assert only(job.terminated(1), RecordIncident).incident.status == "GPU driver error"


def test_of_several_that_would_leave_only_as_many_do_as_the_job_can_spare() -> None:
    job = Job()
    job.start(why_stay="")
    job.finds()
    job.terminated(0, 1)
    commands = job.may_leave("other nodes leave already, and the job needs the rest.")
    start = only(commands, StartWorkers)
    decision = "Restart 1 of 3. The node stays: other nodes leave already, and the job needs the rest."
    assert (start.restarts_used, start.reason) == (1, f"{FELL_OFF} {decision}")
    incident = only(commands, RecordIncident).incident
    assert (incident.action, incident.decision) == ("restart", decision)
    assert job.may_leave() == []  # it was answered


def test_a_suspect_node_that_may_not_leave_restarts() -> None:
    job = Job(isolate_after=1)
    job.start(why_stay="")
    job.exited(0, KILLED)
    job.terminated(1)
    commands = job.may_leave("it cannot be spared.")
    expected = "Restart 1 of 3. Worker 0 has failed once within 60 min. The node stays: it cannot be spared."
    assert only(commands, RecordIncident).incident.decision == expected
    assert only(commands, StartWorkers).restarts_used == 1
    only(job.start(1), RecordIncident)
    assert none(job.stepped(0), RecordIncident)
    assert only(job.stepped(1), RecordIncident).incident.total_ms is not None


def test_a_broken_node_leaves_as_soon_as_it_may() -> None:
    job = Job()
    job.start()
    job.finds()
    job.nodes_wait()
    only(job.terminated(0, 1), StartWorkers)
    assert only(job.start(why_stay=""), StopWorkers).reason == FELL_OFF
    only(job.terminated(0, 1), AskToLeave)


def test_a_finding_does_not_cut_short_the_incident_that_waits_for_its_first_step() -> None:
    job = Job()
    job.start()
    job.exited(0, KILLED)
    job.terminated(1)
    job.start(1)
    assert job.finds() == []
    job.stepped(0)
    (closed,) = [command for command in job.stepped(1) if isinstance(command, RecordIncident)]
    assert (closed.incident.number, closed.incident.superseded_by) == (1, None)
    assert closed.incident.total_ms is not None


def test_a_job_that_ends_well_is_let_end() -> None:
    job = Job()
    job.start(why_stay="")
    job.exited(0)
    incident = only(job.finds(), RecordIncident).incident
    assert incident.decision == "The node stays: its part of the job is ending."


def test_workers_are_freed_from_collectives_only_if_somebody_is_gone() -> None:
    for happens, is_anyone_gone in (
        (lambda job: job.exited(0, KILLED), True),
        (lambda job: job.peer_failed(), True),
        (lambda job: job.nodes_wait(), False),
        (lambda job: job.finds(), False),
    ):
        job = Job()
        job.start(why_stay="")
        assert only(happens(job), StopWorkers).is_anyone_gone is is_anyone_gone
