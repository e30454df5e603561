"""What keeps the coordinator from the optimum for a while: flaps, dwelling, refusals, drains, and clocks that jump."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_cluster import two_jobs

from unicron_elastic.planning.coordinate.coordinator import (
    CoordinatorState,
    CoordinatorTick,
    PublishPlan,
    SnapshotSeen,
    handle,
)
from unicron_elastic.planning.coordinate.holding import DWELL_S
from unicron_elastic.planning.coordinate.node_status import NodeState, is_within
from unicron_elastic.planning.coordinate.proposal import propose, why_overtaken


def test_a_host_that_flaps_disturbs_one_job() -> None:
    cluster = two_jobs()
    others = {node.node_id for node in cluster.nodes.values() if node.job == "a"}
    lost = cluster.nodes[cluster.node_of("b")]
    for _ in range(3):
        cluster.lose(next(node.node_id for node in cluster.nodes.values() if node.host == lost.host))
        cluster.reasons(60.0)
        assert cluster.held() == {"a": 3, "b": 2}
        cluster.start(lost.host, lost.label)
        cluster.reasons(60.0)
        assert cluster.held() == {"a": 3, "b": 3}
    assert {node.node_id for node in cluster.nodes.values() if node.job == "a"} == others


def test_a_drained_node_is_not_called_lost() -> None:
    cluster = two_jobs()
    drained = cluster.nodes[cluster.node_of("b")]
    cluster.drain(drained.node_id)
    proposal = propose(cluster.snapshot(), cluster.wall)
    assert proposal.plan.reason.startswith(
        f"Node {drained.host} of job b is drained; b goes on with 2 of its 3 nodes: "
    )
    with_table = propose(cluster.snapshot(), cluster.wall, cluster.state.table)
    assert with_table == proposal
    cluster.lose(cluster.node_of("a"))
    both = propose(cluster.snapshot(), cluster.wall).plan.reason
    assert both.startswith(f"Job a lost a node and node {drained.host} of job b is drained; ")


def test_a_clock_that_is_set_back_holds_nothing_up() -> None:
    assert is_within(100.0, 100.0, 10.0)
    assert not is_within(100.0, 90.0, 10.0)
    assert not is_within(100.0, 100.1, 10.0)
    cluster = two_jobs()
    cluster.lose(cluster.node_of("b"))
    cluster.reasons(60.0)
    assert why_overtaken(cluster.snapshot(), cluster.wall) == ""
    cluster.skew_s = -1e6
    assert why_overtaken(cluster.snapshot(), cluster.wall) == "The last plan was to be looked at again about now."
    assert cluster.reasons(DWELL_S / 2) == []  # it still is the best
    cluster.lose(cluster.node_of("b"))
    assert len(cluster.reasons(60.0)) == 1


def test_a_plan_that_still_is_the_best_stays_and_is_looked_at_once_in_a_while() -> None:
    cluster = two_jobs()
    cluster.lose(cluster.node_of("b"))
    cluster.reasons(60.0)
    snapshot = cluster.snapshot()
    assert snapshot.published is not None
    due = snapshot.published.look_again_unix_s
    assert due is not None
    state, commands = handle(CoordinatorState(), SnapshotSeen(due, snapshot))
    assert not any(isinstance(each, PublishPlan) for each in commands)
    assert state.looked is not None
    assert state.looked.plan_revision == snapshot.plan_revision
    assert why_overtaken(snapshot, due + 1.0, state.looked) == ""
    later, _ = handle(state, CoordinatorTick(due + 1.0))
    assert later.looked == state.looked
    another = replace(snapshot, published=snapshot.published.at_revision(snapshot.plan_revision + 1))
    assert why_overtaken(another, due + 1.0, state.looked) != ""  # what is known of one plan says nothing of the next


def test_moments_are_written_so_that_a_look_is_not_due_at_once() -> None:
    cluster = two_jobs()
    cluster.lose(cluster.node_of("b"))
    for place in range(200):
        cluster.skew_s = place * 0.1234567
        snapshot = cluster.snapshot()
        found = replace(snapshot, published=replace(propose(snapshot, cluster.wall), revision=3))
        assert why_overtaken(found, cluster.wall) == ""
        assert found.published is not None
        assert found.published.look_again_unix_s == pytest.approx(cluster.wall + DWELL_S)


def test_nodes_that_move_are_not_counted_on_by_those_they_leave() -> None:
    cluster = two_jobs()
    node = cluster.nodes[cluster.node_of("a")]
    moving = replace(node, state=NodeState.LEAVING, towards="b")
    assert (node.held_by, node.heads_for) == ("a", "a")
    assert (moving.held_by, moving.heads_for) == ("", "b")
