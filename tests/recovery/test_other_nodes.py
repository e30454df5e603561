"""What other nodes ask of this one, and what is heard too late."""

from __future__ import annotations

import pytest
from scenario import GLOO_CLOSED, KILLED, PEERS_FAULT, TERMINATED, Job, none, only

from unicron_elastic.recovery.commands import FailJob, StartWorkers, StopWorkers, TellPeers, WakeAt
from unicron_elastic.recovery.departure import JOIN_DELAY_S
from unicron_elastic.recovery.events import MembershipChanged


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


def test_without_restarts_a_peers_fault_ends_the_job() -> None:
    job = Job(max_restarts=0)
    job.start()
    job.peer_failed()
    failed = only(job.terminated(0, 1), FailJob)
    assert failed == FailJob(cause=None, reason=f"{PEERS_FAULT} No restart: --max-restarts is 0.")


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
