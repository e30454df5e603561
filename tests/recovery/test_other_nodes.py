"""What other nodes ask of this one, and what is heard too late."""

from __future__ import annotations

import pytest
from scenario import CRASHED, GLOO_CLOSED, KILLED, PEERS_FAULT, TERMINATED, Job, none, only

from unicron_elastic.recovery.commands import FailJob, StartWorkers, StopWorkers, TellPeers, WakeAt
from unicron_elastic.recovery.events import MembershipChanged, TimePassed
from unicron_elastic.recovery.joins import JOIN_DELAY_S


def test_a_membership_change_restarts_without_counting() -> None:
    job = Job(max_restarts=0)
    job.start()
    commands = job.nodes_wait(2, at=10.0)
    stop = only(commands, StopWorkers)
    assert stop.local_ranks == (0, 1)
    assert stop.reason == "2 nodes wait to join: all workers restart with the new membership."
    assert only(commands, WakeAt).at == 40.0 + JOIN_DELAY_S
    job.exited(0, TERMINATED)
    commands = job.exited(1, 1)  # what a script does with SIGTERM is its own affair
    assert commands == [StartWorkers(restarts_used=0, reason=stop.reason)]
    assert job.start(0) == []


def test_a_peers_fault_counts() -> None:
    job = Job(max_restarts=1)
    job.start()
    assert only(job.peer_failed(at=10.0), StopWorkers).reason == PEERS_FAULT
    assert only(job.terminated(0, 1), StartWorkers) == StartWorkers(restarts_used=1, reason=PEERS_FAULT)
    job.start(1)
    job.peer_failed(at=20.0)
    job.exited(0, TERMINATED)
    failed = only(job.exited(1, TERMINATED), FailJob)
    assert failed == FailJob(cause=None, reason=f"{PEERS_FAULT} No restart: the only restart is used.")


def test_a_peers_fault_and_ones_own_are_one_restart() -> None:
    job = Job()
    job.start()
    job.exited(0, KILLED)
    assert job.peer_failed() == []
    assert only(job.exited(1, TERMINATED), StartWorkers).restarts_used == 1


def test_a_membership_change_after_a_peers_fault_still_counts() -> None:
    job = Job()
    job.start()
    job.peer_failed(at=10.0)
    assert job.nodes_wait(at=10.1) == []
    assert only(job.terminated(0, 1), StartWorkers).restarts_used == 1


def test_a_peers_fault_while_stopping_for_a_membership_change_counts() -> None:
    job = Job()
    job.start()
    job.nodes_wait(at=10.0)
    job.peer_failed(at=10.1)
    assert only(job.terminated(0, 1), StartWorkers) == StartWorkers(restarts_used=1, reason=PEERS_FAULT)
    job.start(1)
    job.nodes_wait()
    assert only(job.terminated(0, 1), StartWorkers).restarts_used == 1  # the next one does not


def test_without_restarts_a_peers_fault_ends_the_job() -> None:
    job = Job(max_restarts=0)
    job.start()
    job.peer_failed()
    failed = only(job.terminated(0, 1), FailJob)
    assert failed == FailJob(cause=None, reason=f"{PEERS_FAULT} No restart: --max-restarts is 0.")


def test_the_steps_of_a_healthy_node_count_as_progress() -> None:
    # The job's count is the greatest that any node knows: if this one kept it, it would never be forgotten.
    job = Job(max_restarts=2, reset_after_steps=50)
    job.start(2)
    job.peer_failed()
    job.exited(0, TERMINATED, step=50)
    assert only(job.exited(1, TERMINATED, step=50), StartWorkers).restarts_used == 1


def test_late_events_of_an_old_generation_change_nothing() -> None:
    job = Job()
    job.fail_once(KILLED)
    idle = job.state
    assert job.raised(0, pid=job.pid(0, 1)) == []
    assert job.exited(0, KILLED) == []
    assert job.stepped(0) == []
    assert job.nodes_wait(at=1e6) == []
    assert job.peer_failed(at=1e6) == []
    assert job.state == idle
    job.start(1)
    running = job.state
    assert job.raised(0, pid=job.pid(0, 1)) == []
    assert job.exited(0, KILLED, generation=1) == []
    assert job.stepped(0, generation=1) == []
    assert job.nodes_wait(generation=1) == []
    assert job.peer_failed(generation=1) == []
    assert job.state == running
    assert only(job.peer_failed(generation=2), StopWorkers)


def test_our_own_sigkill_is_no_fault() -> None:
    job = Job(max_restarts=0)
    job.start()
    job.nodes_wait(at=10.0)
    job.feed(TimePassed(at=40.0 + JOIN_DELAY_S))
    job.exited(0, KILLED)
    assert only(job.exited(1, KILLED), StartWorkers).restarts_used == 0


def test_the_other_nodes_are_told_of_faults_here_and_of_nothing_else() -> None:
    job = Job()
    job.start()
    assert none(job.peer_failed(at=10.0), TellPeers)
    job.terminated(0, 1)
    job.start(1)
    assert none(job.nodes_wait(at=20.0), TellPeers)
    assert only(job.exited(0, CRASHED), TellPeers).reason.startswith("rank 4 was killed by signal 11")


def test_who_was_told_of_a_fault_does_not_tell_of_it() -> None:
    job = Job()
    job.start()
    job.peer_failed(at=10.0)
    assert none(job.raised(0, GLOO_CLOSED, at=10.1, said_at=9.99), TellPeers)


@pytest.mark.parametrize(("nodes_waiting", "who"), [(1, "1 node waits"), (3, "3 nodes wait")])
def test_how_many_wait_is_good_english(nodes_waiting: int, who: str) -> None:
    job = Job()
    job.start()
    stop = only(job.nodes_wait(nodes_waiting), StopWorkers)
    assert stop.reason == f"{who} to join: all workers restart with the new membership."


def test_the_end_of_a_peer_that_stopped_for_a_newcomer_costs_no_restart() -> None:
    # The other node heard of it a moment before this one, and its workers' connections closed.
    job = Job(max_restarts=0)
    job.start()
    assert job.feed(MembershipChanged(at=10.0, nodes_waiting=1)) == [WakeAt(at=10.0 + JOIN_DELAY_S)]
    commands = job.raised(0, GLOO_CLOSED, at=10.1)
    assert only(commands, StopWorkers).reason == "1 node waits to join: all workers restart with the new membership."
    assert none(commands, TellPeers)
    job.exited(0, 1)
    assert only(job.exited(1, TERMINATED), StartWorkers).restarts_used == 0


def test_a_fault_of_its_own_counts_although_somebody_waits() -> None:
    job = Job()
    job.start()
    job.feed(MembershipChanged(at=10.0, nodes_waiting=1))
    assert only(job.exited(0, KILLED, at=10.1), TellPeers).reason
    assert only(job.exited(1, TERMINATED), StartWorkers).restarts_used == 1
