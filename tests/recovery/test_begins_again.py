"""Workers that could go on in place begin again, as the number of nodes asks for another configuration."""

from __future__ import annotations

from dataclasses import replace

import pytest
from jobs_in_place import ELSEWHERE, InPlace
from scenario import OTHER_RECALLED, Job, none, only

from unicron_elastic.planning.model.configurations import Configuration
from unicron_elastic.recovery.commands import ChangeWorld, MeetNodes, StartWorkers, StopWorkers, WakeAt
from unicron_elastic.recovery.events import OtherNodesLost, StartedWorker, WorkersStarted

CONFIGURATIONS = {
    1: Configuration(replicas=1, pipeline=2),
    2: Configuration(replicas=2, tensor=2),
    3: Configuration(replicas=3, tensor=2, micro_batch=2),
    4: Configuration(replicas=8),
}
ON_ONE = "On 1 node DP 1 x TP 1 x PP 2, micro-batch 1 is best, and it runs with TP 2 x PP 1: "
ON_FOUR = "On 4 nodes DP 8 x TP 1 x PP 1, micro-batch 1 is best, and it runs with TP 2 x PP 1: "
AGAIN = "all workers begin again, from a checkpoint."


def job_on_two_nodes() -> InPlace:
    """Its workers go on in place."""
    job = InPlace(2, elsewhere=ELSEWHERE, configurations=CONFIGURATIONS)
    job.state = replace(job.state, started_on=2)
    return job


def test_it_is_booked_on_how_many_nodes_the_workers_started() -> None:
    job = Job()
    workers = (StartedWorker(local_rank=0, rank=0, pid=1),)
    job.feed(WorkersStarted(at=1.0, restarts_used=0, workers=workers, nodes=3))
    assert job.state.started_on == 3


def test_they_begin_again_for_nodes_that_join() -> None:
    job = job_on_two_nodes()
    stopped = only(job.nodes_wait(2), StopWorkers)
    assert stopped.reason == f"2 nodes wait to join. {ON_FOUR}{AGAIN}"
    start = only(job.terminated(0, 1), StartWorkers)
    assert (start.restarts_used, start.reason) == (0, stopped.reason)
    assert none(job.log, MeetNodes)


def test_they_go_on_if_only_replicas_or_micro_batches_are_others() -> None:
    job = job_on_two_nodes()
    assert only(job.nodes_wait(1), MeetNodes).reason == "1 node waits to join: the nodes meet, and the workers go on."


def test_they_begin_again_for_a_node_that_departs() -> None:
    job = job_on_two_nodes()
    departing = job.departs()
    assert none(departing, ChangeWorld)
    assert only(job.time(only(departing, WakeAt).at), StopWorkers).reason == f"{OTHER_RECALLED} {ON_ONE}{AGAIN}"


def test_they_go_on_without_a_node_that_is_lost() -> None:
    job = job_on_two_nodes()
    event = OtherNodesLost(at=job._at(None), nodes=("n2",), reason="n2 is gone.", generation=job.state.generation)
    assert only(job.feed(event), ChangeWorld).lost == ("0.0#z",)


@pytest.mark.parametrize("nodes_waiting", [5, 2])
def test_they_go_on_if_nobody_knows_a_configuration(nodes_waiting: int) -> None:
    job = job_on_two_nodes()
    if nodes_waiting == 2:
        job.state = replace(job.state, started_on=9)
    only(job.nodes_wait(nodes_waiting), MeetNodes)


def test_once_the_nodes_have_met_others_may_join_in_place() -> None:
    job = job_on_two_nodes()
    job.nodes_wait(2)
    job.terminated(0, 1)
    job.start()
    assert job.state.join is None
