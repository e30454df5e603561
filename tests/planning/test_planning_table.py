"""The lookup table: what it says before anything happens is what planning from scratch says after it has."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from situations import NAMES, clusters, linear, plainly, random_cluster, task

from unicron_elastic.planning.allocate.cluster import (
    Cluster,
    Event,
    NodesJoined,
    NodesLost,
    NothingChanged,
    TaskFinished,
    TaskSubmitted,
    after,
    next_events,
)
from unicron_elastic.planning.allocate.plan_table import PlanTable, applied, build_table, plan_for
from unicron_elastic.planning.model.waf import penalty_flop, waf_flops

NEW = task("new", [0, 2, 3, 8])
THREE = Cluster(tasks=tuple(task(name, linear(9), nodes=3) for name in "abc"), nodes=10)


@settings(max_examples=80, deadline=None)
@given(clusters(most_nodes=9, most_tasks=4))
def test_every_entry_is_what_planning_from_scratch_finds(cluster: Cluster) -> None:
    table = build_table(cluster, [NEW], with_pairs=True)
    assert list(table.plans) == list(next_events(cluster, [NEW], with_pairs=True))
    for event, plan in table.plans.items():
        assert plan == plan_for(cluster, event)
        assert plan.counts == plainly(after(cluster, event))


def test_every_entry_of_larger_tables_too() -> None:
    choice = np.random.default_rng(11)
    for _ in range(40):
        cluster = random_cluster(choice, 40, 7)
        for event, plan in build_table(cluster, [NEW]).plans.items():
            assert plan.counts == plainly(after(cluster, event)), (cluster, event)


@settings(max_examples=200, deadline=None)
@given(clusters(most_nodes=9, most_tasks=4))
def test_a_plan_says_what_follows_from_its_counts(cluster: Cluster) -> None:
    for event, plan in build_table(cluster, with_pairs=True).plans.items():
        situation = after(cluster, event)
        tasks = {each.name: each for each in situation.tasks}
        assert plan.nodes == situation.nodes
        assert plan.running_s == situation.running_s
        assert plan.waf_before_flops == pytest.approx(sum(waf_flops(each, each.nodes) for each in cluster.tasks))
        assert plan.waf_after_flops == pytest.approx(sum(waf_flops(tasks[n], k) for n, k in plan.counts.items()))
        assert plan.lost_flop == pytest.approx(sum(penalty_flop(tasks[n], k) for n, k in plan.counts.items()))
        taken = sum(move.nodes for move in plan.moves if move.source is None)
        assert taken <= situation.idle_nodes
        assert plan.reason.endswith(".")
        done = applied(cluster, event, plan)
        assert {each.name: each.nodes for each in done.tasks} == plan.counts
        assert not any(each.lost_nodes for each in done.tasks)


def test_what_has_no_entry_is_planned_on_the_spot() -> None:
    table = build_table(THREE)
    event = NodesLost(("a", "a", "b"), idle=1)
    assert event not in table.plans
    assert table.plan(event) == plan_for(THREE, event)
    assert table.plan(NodesJoined(4)).nodes == 14
    with pytest.raises(ValueError, match="there is no task d"):
        table.plan(TaskFinished("d"))


def test_an_expected_task_is_found_by_its_value() -> None:
    table = build_table(THREE, [NEW])
    same = task("new", [0, 2, 3, 8])
    assert table.plan(TaskSubmitted(same)) is table.plans[TaskSubmitted(NEW)]
    assert table.plan(TaskSubmitted(replace(NEW, weight=2.0))) is not table.plans[TaskSubmitted(NEW)]


def test_the_order_in_which_nodes_were_lost_does_not_matter() -> None:
    table = build_table(THREE, with_pairs=True)
    assert table.plan(NodesLost(("b", "a"))) is table.plan(NodesLost(("a", "b")))


def test_a_table_cannot_be_changed() -> None:
    table = build_table(THREE)
    with pytest.raises(TypeError):
        table.plans[NothingChanged()] = table.plans[NodesJoined()]  # type: ignore[index]


def test_a_plan_is_only_carried_out_where_it_belongs() -> None:
    plan = plan_for(THREE, NothingChanged())
    with pytest.raises(ValueError, match="the plan is for a, b, c: it must be for the tasks of this cluster"):
        applied(THREE, TaskFinished("a"), plan)


def test_of_four_jobs_that_lose_nodes_again_and_again_none_is_left_below_its_minimum() -> None:
    tasks = tuple(task(name, linear(8), nodes=4, min_nodes=3) for name in NAMES[:4])
    cluster = Cluster(tasks=tasks, nodes=16)
    while cluster.nodes:
        victim = next(each for each in cluster.tasks if each.nodes)
        event: Event = NodesLost((victim.name,))
        cluster = applied(cluster, event, build_table(cluster).plan(event))
        assert all(each.nodes == 0 or each.nodes >= 3 for each in cluster.tasks)
        idle = cluster.idle_nodes
        assert idle < 3 or not any(each.nodes == 0 for each in cluster.tasks)
        if idle and not any(each.nodes for each in cluster.tasks):
            break
    assert cluster.nodes < 3


def fastest_lookup_s(table: PlanTable, event: Event) -> float:
    """The least of many: how long a lookup takes when nothing comes between."""
    found = []
    for _ in range(200):
        began = time.perf_counter()
        table.plan(event)
        found.append(time.perf_counter() - began)
    return min(found)


def test_a_lookup_takes_no_time_worth_mentioning() -> None:
    assert fastest_lookup_s(build_table(THREE), NodesLost(("a",))) < 50e-6
