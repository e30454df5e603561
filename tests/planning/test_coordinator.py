"""The coordinator of several jobs: what it decides, when it does not, and what it tells."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_cluster import B, job, two_jobs

from unicron_elastic.planning.allocate.cluster import NodesLost, TaskSubmitted
from unicron_elastic.planning.allocate.plan_table import build_table
from unicron_elastic.planning.coordinate import proposal
from unicron_elastic.planning.coordinate.coordinator import (
    REPEAT_S,
    AdoptRates,
    BuildTable,
    CoordinatorState,
    CoordinatorTick,
    PublishPlan,
    SnapshotSeen,
    TableBuilt,
    handle,
)
from unicron_elastic.planning.coordinate.proposal import propose
from unicron_elastic.planning.coordinate.reconcile import reconcile
from unicron_elastic.planning.coordinate.situation import Bounds, changes_of, situation_of
from unicron_elastic.planning.coordinate.snapshot import ClusterSnapshot, JobPhase


def test_nothing_is_said_of_nothing() -> None:
    assert handle(CoordinatorState(), CoordinatorTick(0.0)) == (CoordinatorState(), ())
    assert handle(CoordinatorState(), SnapshotSeen(0.0, ClusterSnapshot()))[1] == ()


def test_jobs_are_started_on_the_best_division() -> None:
    cluster = two_jobs()
    assert cluster.held() == {"a": 3, "b": 3}
    assert all(each.phase is JobPhase.RUNNING for each in cluster.jobs.values())


def test_a_job_is_submitted_and_finishes() -> None:
    cluster = two_jobs()
    cluster.submit(job("c", [0, 50, 100]))
    assert "Job c was submitted" in cluster.reasons()[0]
    assert cluster.held() == {"a": 2, "b": 2, "c": 2}
    cluster.end("c", JobPhase.FINISHED)
    assert "Job c finished" in cluster.reasons()[0]
    cluster.settle()
    assert cluster.held() == {"a": 3, "b": 3}


def test_a_lost_node_is_answered_from_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = two_jobs()
    table = cluster.state.table
    assert table is not None
    cluster.lose(cluster.node_of("b"))
    computed = propose(cluster.snapshot(), cluster.wall)
    monkeypatch.setattr(proposal, "plan_for", None)  # nothing is computed
    monkeypatch.setattr(type(table), "plan", lambda self, event: self.plans[event])
    assert propose(cluster.snapshot(), cluster.wall, table) == computed
    assert computed.reason.startswith("Job b lost a node")


@pytest.mark.parametrize("what", ["joined", "submitted", "finished"])
def test_the_table_changes_no_plan(what: str) -> None:
    cluster = two_jobs()
    if what == "joined":
        cluster.start("new")
    elif what == "submitted":
        cluster.submit(job("c", [0, 50, 100]))
    else:
        cluster.end("b", JobPhase.FINISHED)
    assert propose(cluster.snapshot(), cluster.wall, cluster.state.table) == propose(cluster.snapshot(), cluster.wall)


def test_a_plan_that_was_overtaken_is_replaced_and_not_carried_out() -> None:
    cluster = two_jobs()
    cluster.submit(job("c", [0, 50, 100]))
    cluster.coordinate()
    first = cluster.published
    assert first is not None
    stale = reconcile(cluster.snapshot(), first)
    assert stale
    cluster.lose(cluster.node_of("a"))
    (publish,) = cluster.coordinate()
    assert isinstance(publish, PublishPlan)
    assert publish.expected_revision == first.revision
    assert publish.reason.startswith("Job a lost a node")
    before = cluster.nodes.copy(), cluster.jobs.copy()
    for command in stale:  # they come late, and are refused
        cluster.obey(command)
    assert (cluster.nodes, cluster.jobs) == before
    cluster.settle()
    assert cluster.held() == {"a": 3, "b": 0, "c": 2}


def test_a_plan_is_published_only_over_the_one_it_was_made_from() -> None:
    cluster = two_jobs()
    cluster.start("new")
    (publish,) = handle(CoordinatorState(), SnapshotSeen(cluster.wall, cluster.snapshot()))[1]
    cluster.obey(publish)
    found = cluster.published
    cluster.obey(publish)  # of one who did not know
    assert cluster.published is found


def test_a_command_is_repeated_only_after_a_while() -> None:
    cluster = two_jobs()
    cluster.start("new")
    state, first = handle(cluster.state, SnapshotSeen(cluster.wall, cluster.snapshot()))
    assert len(first) == 1
    state, again = handle(state, CoordinatorTick(cluster.wall + REPEAT_S - 0.1))
    assert again == ()
    state, again = handle(state, CoordinatorTick(cluster.wall + REPEAT_S))
    assert [type(each) for each in again] == [PublishPlan]
    _, again = handle(state, CoordinatorTick(cluster.wall - 1000.0))  # the clock was set back
    assert [type(each) for each in again] == [PublishPlan]


def test_a_table_is_built_once_everything_is_in_its_place() -> None:
    cluster = two_jobs()
    state = CoordinatorState()
    state, (command,) = handle(state, SnapshotSeen(cluster.wall, cluster.snapshot()))
    assert isinstance(command, BuildTable)
    state, commands = handle(state, CoordinatorTick(cluster.wall))
    assert commands == ()
    state, commands = handle(state, TableBuilt(cluster.wall, None))  # it failed, and is not tried again
    assert commands == ()
    assert state.table is None


def test_the_table_has_what_may_come_again_and_any_two_losses() -> None:
    cluster = two_jobs()
    cluster.end("b", JobPhase.FINISHED)
    cluster.settle()
    _, (command,) = handle(CoordinatorState(), SnapshotSeen(cluster.wall, cluster.snapshot()))
    assert isinstance(command, BuildTable)
    assert [task.name for task in command.expected] == ["b"]
    table = build_table(command.cluster, command.expected, with_pairs=command.with_pairs)
    assert NodesLost(("a", "a")) in table.plans
    cluster.submit(B)
    _, event = situation_of(cluster.snapshot(), changes_of(cluster.snapshot()), Bounds())
    assert event in table.plans
    assert isinstance(event, TaskSubmitted)


def test_rates_are_adopted_when_they_have_changed_by_enough() -> None:
    cluster = two_jobs()
    cluster.measure("a", 1.04)
    assert cluster.coordinate() == ()
    cluster.measure("a", 1.04)
    (adopt,) = cluster.coordinate()
    assert isinstance(adopt, AdoptRates)
    assert adopt.reason == "The rate of a on 4 nodes has changed by 8 %."
    found = cluster.jobs["b"]
    cluster.jobs["b"] = replace(found, newest_flops=(*found.newest_flops, 7e12))
    (adopt,) = [each for each in cluster.coordinate() if isinstance(each, AdoptRates)]
    assert adopt.reason == "Rates of b are known for 7 nodes now."


def test_a_job_without_rates_waits_for_them() -> None:
    cluster = two_jobs()
    cluster.submit(replace(job("c", [0, 50, 100]), rates_flops=()))
    cluster.settle()
    assert cluster.held()["c"] == 2


def test_every_reason_is_one_sentence() -> None:
    cluster = two_jobs()
    cluster.lose(cluster.node_of("a"))
    cluster.lose(cluster.node_of("b"))
    cluster.start("new")
    cluster.submit(job("c", [0, 50]))
    (told,) = cluster.reasons(5.0)
    assert told.startswith("Since the last plan: 2 lost nodes, 1 new node, 1 new job")
    assert told.endswith(".")
    assert told.count(". ") == 0
