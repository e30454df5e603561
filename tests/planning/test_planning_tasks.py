"""What a planner is told: values that none can have are refused with one sentence that says what is right."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from situations import linear, task

from unicron_elastic.planning.allocate.cluster import (
    Cluster,
    NodesJoined,
    NodesLost,
    NothingChanged,
    TaskFinished,
    TaskSubmitted,
    after,
    next_events,
)
from unicron_elastic.planning.model.faulting import FaultRate
from unicron_elastic.planning.model.tasks import Task, Transition

A = task("a", linear(4), nodes=2)
B = task("b", linear(4), nodes=2)
CLUSTER = Cluster(tasks=(B, A), nodes=5, size=6)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"name": " "}, "a task is called ' ': it must have a name"),
        ({"weight": -1.0}, "task a: weight is -1.0: it must be a number, 0 or more"),
        ({"weight": math.nan}, "task a: weight is nan: it must be a number, 0 or more"),
        ({"min_nodes": 0}, "task a: min_nodes is 0: it must be a whole number, at least 1"),
        ({"min_nodes": 1.5}, "task a: min_nodes is 1.5: it must be a whole number, at least 1"),
        ({"unit_nodes": 0}, "task a: unit_nodes is 0: it must be a whole number, at least 1"),
        ({"max_nodes": 0}, "task a: max_nodes is 0: it must be a whole number, at least 1"),
        ({"min_nodes": 3, "max_nodes": 2}, "task a: min_nodes is 3: it must be at most max_nodes, which is 2"),
        ({"nodes": -1}, "task a: nodes is -1: it must be a whole number, at least 0"),
        ({"nodes": True}, "task a: nodes is True: it must be a whole number, at least 0"),
        ({"nodes": 5}, "task a: nodes is 5: rates_flops ends at 4 nodes, it must reach that"),
        ({"nodes": 3, "unit_nodes": 2}, "task a: nodes is 3: it must be a multiple of unit_nodes, which is 2"),
        ({"lost_nodes": 3}, "task a: lost_nodes is 3: it must be at most nodes, which is 2"),
        ({"pinned_nodes": -1}, "task a: pinned_nodes is -1: it must be a whole number, at least 0"),
        ({"pinned_nodes": 5}, "task a: pinned_nodes is 5: it must be 0, or a number of nodes on which it can run"),
        ({"rates_flops": [0.0, math.nan]}, "task a: the rate of 1 units is nan: it must be FLOP/s, 0 where it cannot"),
        ({"rates_flops": [0.0, 1.0, -2.0]}, "task a: the rate of 2 units is -2.0: it must be FLOP/s"),
        ({"rates_flops": [1.0]}, "task a: the rate of 0 units is 1.0: it must be 0"),
        (
            {"rates_flops": []},
            r"task a: rates_flops has shape \(0,\): it must have one FLOP/s for each number of units",
        ),
        ({"rates_flops": [[0.0]]}, r"task a: rates_flops has shape \(1, 1\): it must have one FLOP/s for each"),
    ],
)
def test_a_task_that_cannot_be(changes: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text}"):
        replace(A, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Transition.of(-1.0), "grow_s is -1.0: it must be a number, 0 or more"),
        (lambda: Transition.of(math.inf), "grow_s is inf: it must be a number, 0 or more"),
        (
            lambda: Transition(grow_s=1.0, shrink_s=3.0, replace_s=1.0, stop_s=2.0),
            "shrink_s is 3.0: it must be at most stop_s, which is 2.0",
        ),
        (
            lambda: Transition(grow_s=1.0, shrink_s=1.0, replace_s=1.0, stop_s=2.0, unsaved_s=-1.0),
            "unsaved_s is -1.0: it must be a number, 0 or more",
        ),
        (lambda: Cluster(tasks=(), nodes=-1), "nodes is -1: it must be a whole number, at least 0"),
        (lambda: Cluster(tasks=(A, A), nodes=9), "two tasks are called a: each must have a name of its own"),
        (lambda: Cluster(tasks=(A, B), nodes=3), "the tasks hold 4 nodes: there must be at least as many, and are 3"),
        (
            lambda: Cluster(tasks=(replace(A, min_nodes=9),), nodes=5, size=8),
            "task a needs 9 nodes: it must be at most the size of the cluster, 8",
        ),
        (lambda: CLUSTER.task("c"), "there is no task c: the tasks are a, b"),
        (lambda: after(CLUSTER, TaskFinished("c")), "there is no task c"),
        (lambda: after(CLUSTER, NodesLost(("a", "a", "a"))), "task a lost 3 nodes: it has only 2"),
        (lambda: after(CLUSTER, NodesLost(idle=2)), "2 idle nodes are lost: there are only 1"),
        (NodesLost, "no node is lost: name a task, or a number of idle nodes"),
        (lambda: NodesJoined(0), "count is 0: it must be a whole number, at least 1"),
        (lambda: TaskSubmitted(A), "task a is submitted with 2 nodes: it must have none yet"),
        (lambda: after(CLUSTER, TaskSubmitted(replace(A, nodes=0))), "two tasks are called a"),
        (lambda: FaultRate(faults=-1), "faults is -1: it must be a whole number, at least 0"),
        (lambda: FaultRate(node_s=math.nan), "node_s is nan: it must be 0 or more seconds"),
        (lambda: FaultRate(prior_faults=1.0), "prior_faults is 1.0: it must be more than 1"),
        (lambda: FaultRate(prior_node_s=0.0), "prior_node_s is 0.0: it must be more than 0 seconds"),
    ],
)
def test_what_else_cannot_be(make: Callable[[], object], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text}"):
        make()


def test_rates_are_copied_and_cannot_be_changed() -> None:
    rates = np.array([0.0, 1.0])
    made = Task(name="a", rates_flops=rates)
    rates[1] = 7.0
    assert made.rates_flops.tolist() == [0.0, 1.0]
    with pytest.raises(ValueError, match="read-only"):
        made.rates_flops[1] = 7.0
    assert replace(made, nodes=1).rates_flops is made.rates_flops


def test_tasks_are_equal_if_all_is() -> None:
    assert task("a", linear(4), nodes=2) == A
    assert hash(task("a", linear(4), nodes=2)) == hash(A)
    assert task("a", [0, 1, 2, 3, 5], nodes=2) != A
    assert replace(A, weight=2.0) != A
    assert A != "a"


def test_a_task_in_units_of_two_nodes() -> None:
    pipeline = task("p", [0, 3, 0, 8], unit_nodes=2, min_nodes=1, max_nodes=5)
    assert [pipeline.rate_flops(nodes) for nodes in range(9)] == [0, 0, 3e12, 0, 0, 0, 8e12, 0, 0]
    assert [nodes for nodes in range(9) if pipeline.can_have(nodes)] == [2]
    assert pipeline.most_nodes == 5


def test_a_cluster_orders_its_tasks_and_counts_what_is_idle() -> None:
    assert [each.name for each in CLUSTER.tasks] == ["a", "b"]
    assert (CLUSTER.idle_nodes, CLUSTER.size, Cluster(tasks=(), nodes=3).size) == (1, 6, 3)
    assert replace(A, pinned_nodes=0).is_paused
    assert not A.is_paused


def test_after_each_event() -> None:
    lost = after(CLUSTER, NodesLost(("a",), idle=1))
    assert (lost.nodes, lost.size, lost.task("a").held_nodes, lost.task("a").nodes) == (3, 6, 1, 2)
    assert after(CLUSTER, NodesJoined(2)).nodes == after(CLUSTER, NodesJoined(2)).size == 7
    assert after(CLUSTER, TaskFinished("a")).idle_nodes == 3
    assert [each.name for each in after(CLUSTER, TaskSubmitted(task("aa", linear(1)))).tasks] == ["a", "aa", "b"]
    assert after(CLUSTER, NothingChanged()) is CLUSTER
    twice = after(lost, NodesLost(("a",)))
    assert twice.task("a").held_nodes == 0


def test_what_may_happen_next() -> None:
    new = task("new", linear(1))
    single = [
        NothingChanged(),
        NodesJoined(),
        NodesLost(idle=1),
        NodesLost(("a",)),
        NodesLost(("b",)),
        TaskFinished("a"),
        TaskFinished("b"),
        TaskSubmitted(new),
    ]
    pairs = [
        NodesLost(("a",), idle=1),
        NodesLost(("a", "a")),
        NodesLost(("b", "a")),
        NodesLost(("b",), idle=1),
        NodesLost(("b", "b")),
    ]
    assert list(next_events(CLUSTER, [new])) == single
    assert set(next_events(CLUSTER, [new], with_pairs=True)) == {*single, *pairs}
    two_idle = replace(CLUSTER, nodes=6)
    assert NodesLost(idle=2) in set(next_events(two_idle, with_pairs=True))


def test_time_to_the_next_fault() -> None:
    prior = FaultRate()
    assert prior.running_s(16) == pytest.approx(1000 / 6.5 / 16 * 86_400)
    assert prior.running_s(0) == prior.running_s(1)
    seen = prior.observed(100, 1e8)
    assert seen == prior.observed(60, 4e7).observed(40, 6e7)
    assert seen.running_s(1) == pytest.approx((1e8 + 1000 / 6.5 * 86_400) / 101)


def test_the_mean_time_is_that_of_the_gamma_distribution() -> None:
    """Source: the time to the next event of a Poisson process with a Gamma rate has a Lomax distribution."""
    rate = FaultRate(faults=3, node_s=5e6)
    choice = np.random.default_rng(1)
    rates = choice.gamma(rate.prior_faults + 3, 1.0 / (rate.prior_node_s + 5e6), 400_000)
    times = choice.exponential(1.0 / (7 * rates))
    assert times.mean() == pytest.approx(rate.running_s(7), rel=0.02)
