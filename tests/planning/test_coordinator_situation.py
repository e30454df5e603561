"""What has happened since the plan: single events as the table knows them, and everything else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_cluster import FakeCluster, job, two_jobs

from unicron_elastic.planning.allocate.cluster import (
    Cluster,
    Event,
    NodesJoined,
    NodesLost,
    NothingChanged,
    TaskFinished,
    TaskSubmitted,
    after,
)
from unicron_elastic.planning.coordinate.node_status import Health, NodeState, NodeStatus
from unicron_elastic.planning.coordinate.proposal import propose
from unicron_elastic.planning.coordinate.situation import Bounds, changes_of, situation_of
from unicron_elastic.planning.coordinate.snapshot import JobPhase


def seen(cluster: FakeCluster) -> tuple[Cluster, Event]:
    snapshot = cluster.snapshot()
    return situation_of(snapshot, changes_of(snapshot), Bounds())


def held(cluster: Cluster) -> dict[str, int]:
    return {task.name: task.held_nodes for task in cluster.tasks}


def test_without_a_change_there_is_no_event() -> None:
    before, event = seen(two_jobs())
    assert event == NothingChanged()
    assert held(before) == {"a": 3, "b": 3}


def test_single_events_are_told_apart() -> None:
    settled, _ = seen(two_jobs())
    cluster = two_jobs()
    cluster.lose(cluster.node_of("a"))
    assert seen(cluster) == (settled, NodesLost(("a",)))
    cluster = two_jobs()
    cluster.lose(cluster.node_of("a"))
    cluster.lose(cluster.node_of("b"))
    assert seen(cluster) == (settled, NodesLost(("a", "b")))
    cluster = two_jobs()
    cluster.start("new")
    assert seen(cluster) == (settled, NodesJoined())
    cluster = two_jobs()
    cluster.end("a", JobPhase.FINISHED)
    assert seen(cluster) == (settled, TaskFinished("a"))
    cluster = two_jobs()
    cluster.submit(job("c", [0, 1]))
    before, event = seen(cluster)
    assert before == settled
    assert isinstance(event, TaskSubmitted)


def test_an_idle_node_is_lost() -> None:
    cluster = FakeCluster()
    for place in range(3):
        cluster.start(f"h{place}")
    cluster.submit(job("a", [0, 1, 2], max_nodes=2))
    cluster.settle()
    cluster.lose(next(node.node_id for node in cluster.nodes.values() if not node.job))
    assert seen(cluster)[1] == NodesLost(idle=1)


@pytest.mark.parametrize("health", [Health.DRAINING, Health.BROKEN])
def test_a_node_that_may_not_work_counts_as_lost_and_once(health: Health) -> None:
    cluster = two_jobs()
    name = cluster.node_of("a")
    cluster.nodes[name] = replace(cluster.nodes[name], health=health)
    assert seen(cluster)[1] == NodesLost(("a",))
    cluster.settle()
    assert seen(cluster)[1] == NothingChanged()
    assert cluster.nodes[name].state is NodeState.IDLE
    cluster.nodes[name] = replace(cluster.nodes[name], health=Health.OK)
    assert seen(cluster)[1] == NodesJoined()


def test_several_events_at_once_are_planned_for_as_they_stand() -> None:
    cluster = two_jobs()
    cluster.lose(cluster.node_of("a"))
    cluster.start("new")
    before, event = seen(cluster)
    assert event == NothingChanged()
    assert (before.nodes, before.task("a").nodes, before.task("a").lost_nodes) == (6, 3, 1)


def test_a_job_that_is_forgotten_with_its_end_has_ended() -> None:
    cluster = two_jobs()
    del cluster.jobs["a"]
    before, event = seen(cluster)
    assert (event, held(before)) == (NothingChanged(), {"b": 3})
    assert before.nodes == 3  # those of the others are not known to be free
    assert propose(cluster.snapshot(), cluster.wall).reason.startswith("Since the last plan: 3 lost nodes, 1 ended job")
    del cluster.jobs["b"]
    assert held(seen(cluster)[0]) == {}


def test_nodes_that_come_with_a_job_are_its_own() -> None:
    cluster = two_jobs()
    cluster.nodes["x"] = NodeStatus(node_id="x", host="x", state=NodeState.JOINING, job="a")
    before, event = seen(cluster)
    assert (event, held(before)) == (NothingChanged(), {"a": 4, "b": 3})
    cluster.submit(job("c", [0, 1]))
    cluster.nodes["y"] = NodeStatus(node_id="y", host="y", state=NodeState.JOINING, job="c")
    assert held(seen(cluster)[0]) == {"a": 4, "b": 3, "c": 1}


def test_nodes_that_make_no_whole_unit_are_not_the_jobs() -> None:
    cluster = FakeCluster()
    for place in range(5):
        cluster.start(f"h{place}")
    cluster.submit(job("c", [0, 4, 7], unit_nodes=2))
    cluster.settle()
    assert cluster.held() == {"c": 4}
    settled, _ = seen(cluster)
    cluster.lose(cluster.node_of("c"))
    assert seen(cluster) == (settled, NodesLost(("c",)))
    assert propose(cluster.snapshot(), cluster.wall).plan.counts == {"c": 4}  # with the idle one
    idle = next(node.node_id for node in cluster.nodes.values() if not node.job)
    cluster.lose(idle)
    before, event = seen(cluster)
    assert after(before, event).task("c").held_nodes == 3
    assert propose(cluster.snapshot(), cluster.wall).plan.counts == {"c": 2}


def test_a_job_may_need_more_than_there_is() -> None:
    cluster = two_jobs()
    cluster.submit(job("c", [0] * 9 + [5], min_nodes=9))
    before, event = seen(cluster)
    assert isinstance(event, TaskSubmitted)
    assert before.size == 9
    (wait,) = propose(cluster.snapshot(), cluster.wall).plan.waits
    assert wait.reason == "c waits: it needs at least 9 nodes, and there are 6."
