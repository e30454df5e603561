"""What keeps the coordinator from the optimum for a while: flaps, dwelling, refusals, drains, and clocks that jump."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_cluster import FakeCluster, job, two_jobs

from unicron_elastic.planning.coordinate.coordinator import (
    CoordinatorState,
    CoordinatorTick,
    PublishPlan,
    SnapshotSeen,
    handle,
)
from unicron_elastic.planning.coordinate.holding import DWELL_S, GIVE_BACK_S
from unicron_elastic.planning.coordinate.node_status import NodeState, is_within
from unicron_elastic.planning.coordinate.proposal import propose, why_overtaken
from unicron_elastic.planning.coordinate.snapshot import JobPhase


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


@pytest.mark.parametrize(("away_s", "is_given_back"), [(GIVE_BACK_S - 60.0, True), (GIVE_BACK_S + 60.0, False)])
def test_a_host_that_comes_back_soon_goes_to_who_lost_it(away_s: float, is_given_back: bool) -> None:
    cluster = two_jobs()
    lost = cluster.nodes[cluster.node_of("b")]
    cluster.lose(lost.node_id)
    cluster.reasons(60.0)
    assert cluster.held() == {"a": 3, "b": 2}
    cluster.now_s += away_s - 60.0
    cluster.respec("b", weight=0.4)  # a would earn more with it
    cluster.start(lost.host)
    told = cluster.reasons(60.0)
    assert ("b gets back what came back to it" in told[0]) == is_given_back
    assert cluster.held() == ({"a": 3, "b": 3} if is_given_back else {"a": 4, "b": 2})
    cluster.settle()
    assert cluster.held() == {"a": 4, "b": 2}


def test_a_job_that_was_moved_without_need_is_left_alone_for_a_while() -> None:
    cluster = two_jobs()
    cluster.respec("b", weight=2.8)
    cluster.reasons(60.0)
    assert cluster.held() == {"a": 2, "b": 4}
    cluster.measure("a", 1.5)
    told = cluster.reasons(DWELL_S - 70.0)
    assert "a keeps its nodes, as it was moved less than 5 minutes ago" in told[0]
    assert cluster.held() == {"a": 2, "b": 4}
    cluster.reasons(DWELL_S)
    assert cluster.held() == {"a": 3, "b": 3}


def test_no_job_waits_because_another_one_is_left_alone() -> None:
    cluster = two_jobs()
    cluster.respec("b", weight=2.8)
    cluster.reasons(60.0)
    cluster.submit(job("c", [0, 50]))
    (told,) = cluster.reasons(60.0)
    assert "keeps its nodes" not in told
    assert cluster.held()["c"] == 1


def test_a_person_may_move_what_is_left_alone() -> None:
    cluster = two_jobs()
    cluster.respec("b", weight=2.8)
    cluster.reasons(60.0)
    cluster.respec("a", paused=True)
    cluster.reasons(90.0)
    assert cluster.held()["a"] == 0


def test_a_node_that_refuses_is_replaced() -> None:
    cluster = two_jobs()
    cluster.submit(job("c", [0, 50]))
    (publish,) = cluster.coordinate()
    assert isinstance(publish, PublishPlan)
    chosen = next(seat.host for seat in publish.published.seats if seat.job == "c")
    cluster.refusing.add((chosen, "c"))
    told = cluster.reasons()
    assert cluster.held()["c"] == 1
    assert next(node.host for node in cluster.nodes.values() if node.job == "c") != chosen
    assert len(told) == 1


def test_a_job_that_all_nodes_refuse_does_not_keep_them_idle() -> None:
    cluster = two_jobs()
    cluster.submit(job("c", [0, 50]))
    cluster.refusing = {(node.host, "c") for node in cluster.nodes.values()}
    told = cluster.reasons(200.0)
    assert cluster.held() == {"a": 3, "b": 3, "c": 0}
    assert "c can have no more than 0 for now, as other nodes refuse it" in told[-1]


def test_a_draining_node_stays_while_its_job_cannot_do_without() -> None:
    cluster = FakeCluster()
    for place in range(2):
        cluster.start(f"h{place}")
    cluster.submit(job("a", [0, 0, 2], min_nodes=2))
    cluster.settle()
    cluster.drain(cluster.node_of("a"))
    told = cluster.reasons()
    assert "1 draining node stays, as a job would have to wait else" in told[0]
    assert cluster.held() == {"a": 2}
    cluster.start("h2")
    cluster.settle()
    assert {node.host for node in cluster.nodes.values() if node.job == "a"} == {"h1", "h2"}


def test_a_paused_job_gives_its_nodes_and_gets_some_again() -> None:
    cluster = two_jobs()
    cluster.respec("a", paused=True)
    cluster.settle()
    assert cluster.held() == {"a": 0, "b": 6}
    assert cluster.jobs["a"].phase is JobPhase.SUBMITTED
    cluster.respec("a", paused=False)
    cluster.settle()
    assert cluster.held() == {"a": 3, "b": 3}


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
