"""The fast optimum is the optimum: against trying everything, and against the paper's dynamic programme."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from situations import clusters, exhaustively, linear, plainly, random_cluster, task

from unicron_elastic.planning.allocate.cluster import (
    Cluster,
    NodesLost,
    NothingChanged,
    TaskSubmitted,
    after,
    next_events,
)
from unicron_elastic.planning.allocate.core import optimum
from unicron_elastic.planning.allocate.optimum import VALUE_BITS, Solver, best_counts, exponent_of
from unicron_elastic.planning.allocate.paper import plain_optimum
from unicron_elastic.planning.allocate.plan_table import applied, plan_for
from unicron_elastic.planning.allocate.prices import AlteredBlock, Block
from unicron_elastic.planning.model.faulting import FaultRate
from unicron_elastic.planning.model.tasks import Transition
from unicron_elastic.planning.model.waf import IMPOSSIBLE, gains


@settings(max_examples=1000, deadline=None)
@given(clusters())
def test_both_find_what_trying_everything_finds(cluster: Cluster) -> None:
    expected = exhaustively(cluster)
    assert plainly(cluster) == expected
    assert best_counts(cluster) == expected


@pytest.mark.parametrize(("most_nodes", "count"), [(5, 300), (12, 300), (60, 120)])
def test_the_fast_one_finds_what_the_plain_one_finds_after_every_event(most_nodes: int, count: int) -> None:
    choice = np.random.default_rng(most_nodes)
    new = task("new", linear(5))
    for _ in range(count):
        cluster = random_cluster(choice, most_nodes, 7)
        solver = Solver(cluster)
        for event in next_events(cluster, [new], with_pairs=True):
            situation = after(cluster, event)
            assert solver.best_counts(situation) == plainly(situation), (cluster, event)


@pytest.mark.parametrize("shape", ["linear", "noisy", "rare", "setup", "convex"])
def test_shapes_that_leave_many_options_open(shape: str) -> None:
    choice, counts = np.random.default_rng(7), np.arange(201)
    tasks = []
    for name in "abcdefgh":
        rates = {
            "linear": counts * 1.0,
            "noisy": counts * choice.uniform(0.99, 1.01, 201),
            "rare": counts * (choice.random(201) < 0.05),
            "setup": np.maximum(counts - 7, 0) ** 0.8,
            "convex": counts**1.5,
        }[shape]
        held = int(choice.choice([0, *np.flatnonzero(rates[:26])]))
        tasks.append(task(name, rates.tolist(), nodes=held))
    cluster = Cluster(tasks=tuple(tasks), nodes=200)
    waiting = replace(cluster, tasks=tuple(replace(each, nodes=0) for each in tasks))
    assert best_counts(waiting) == plainly(waiting)
    solver = Solver(cluster)
    for event in next_events(cluster):
        assert solver.best_counts(after(cluster, event)) == plainly(after(cluster, event)), event


@settings(max_examples=300, deadline=None)
@given(clusters(most_nodes=9, most_tasks=4))
def test_no_task_waits_while_it_could_run_on_idle_nodes(cluster: Cluster) -> None:
    counts = best_counts(cluster)
    idle = cluster.nodes - sum(counts.values())
    assert idle >= 0
    for each in cluster.tasks:
        count = counts[each.name]
        assert count == 0 or each.can_have(count)
        if each.pinned_nodes is not None:
            assert count in ({each.pinned_nodes} if cluster.are_pins_held else {0, each.pinned_nodes})
        elif count == 0:
            assert not any(each.can_have(possible) for possible in range(1, idle + 1)), each.name


@settings(max_examples=300, deadline=None)
@given(clusters(most_nodes=9, most_tasks=4))
def test_a_plan_that_was_carried_out_is_kept(cluster: Cluster) -> None:
    tasks = tuple(replace(each, transition=Transition.of(each.transition.stop_s)) for each in cluster.tasks)
    cluster = replace(cluster, tasks=tasks)
    event = NothingChanged()
    done = applied(cluster, event, plan_for(cluster, event))
    assert plan_for(done, event).moves == ()


@settings(max_examples=300, deadline=None)
@given(clusters(most_nodes=6, most_tasks=3))
def test_integers_lose_next_to_nothing_against_real_numbers(cluster: Cluster) -> None:
    rows = [gains(each, cluster.nodes, cluster.running_s, is_pin_held=cluster.are_pins_held) for each in cluster.tasks]
    found = best_counts(cluster)
    best = np.zeros(cluster.nodes + 1)
    for row in rows:  # what up to j nodes are worth, in floats
        with_row = [max(row[k] + best[j - k] for k in range(j + 1)) for j in range(cluster.nodes + 1)]
        best = np.array(with_row)
    got = sum(row[found[each.name]] for each, row in zip(cluster.tasks, rows, strict=True))
    total = sum(np.abs(row[row > -np.inf]).max() for row in rows)
    assert best[-1] - got <= 8 * len(rows) * total * 2.0**-VALUE_BITS


def test_ties_move_nobody() -> None:
    free = Transition.of(0.0)
    tasks = tuple(task(name, linear(9, 0.1), nodes=3, transition=free) for name in "abc")
    assert best_counts(Cluster(tasks=tasks, nodes=9)) == {"a": 3, "b": 3, "c": 3}


def test_of_equal_moves_the_first_name_gets_the_nodes() -> None:
    tasks = tuple(task(name, [0, 0, 1], transition=Transition.of(0.0)) for name in "abc")
    assert best_counts(Cluster(tasks=tasks, nodes=5)) == {"a": 2, "b": 2, "c": 0}


def test_a_node_is_not_taken_where_it_earns_nothing() -> None:
    assert best_counts(Cluster(tasks=(task("a", [0, 1, 1, 1]),), nodes=3)) == {"a": 1}


def test_a_task_of_weight_0_runs_on_what_nobody_else_wants() -> None:
    tasks = (task("a", linear(9), weight=0.0, min_nodes=2), task("b", linear(3)))
    assert best_counts(Cluster(tasks=tasks, nodes=5)) == {"a": 2, "b": 3}
    assert best_counts(Cluster(tasks=tasks, nodes=4)) == {"a": 0, "b": 3}


def test_pins_give_way_only_if_they_do_not_fit() -> None:
    tasks = (task("a", linear(4), pinned_nodes=2, nodes=2), task("b", linear(4, 9.0), nodes=2))
    cluster = Cluster(tasks=tasks, nodes=4)
    assert best_counts(after(cluster, NodesLost(("a",)))) == {"a": 2, "b": 1}
    assert best_counts(after(cluster, NodesLost(("a", "b", "b")))) == {"a": 0, "b": 1}


def test_a_transition_that_costs_too_much_is_not_made() -> None:
    tasks = (task("a", [0, 1, 2, 3, 3.1], nodes=2, weight=2.0), task("b", linear(9), nodes=2))
    often = Cluster(tasks=tasks, nodes=4, faults=FaultRate(faults=10**6, node_s=1e6))
    assert often.running_s < 10.0
    assert best_counts(often) == {"a": 2, "b": 2}
    assert best_counts(Cluster(tasks=tasks, nodes=4)) == {"a": 3, "b": 1}


@pytest.mark.parametrize(("part", "stays"), [(0.0, "new"), (0.4, "new"), (0.6, "old")])
def test_a_task_is_not_stopped_if_what_it_has_not_saved_is_worth_more(part: float, stays: str) -> None:
    """The new task earns half as much again, so it pays within half of the time if nothing is trained again."""
    new, running_s = task("new", linear(1, 1.5)), Cluster(tasks=(), nodes=1).running_s
    unsaved = replace(Transition.of(10.0), unsaved_s=part * running_s)
    cluster = Cluster(tasks=(task("old", linear(1), nodes=1, transition=unsaved), new), nodes=1)
    assert best_counts(cluster) == plainly(cluster) == exhaustively(cluster)
    assert best_counts(cluster) == {"new": 0, "old": 0} | {stays: 1}


def test_a_task_far_larger_than_all_others_may_come_and_go() -> None:
    giant = task("giant", linear(8, 1e9), nodes=2)
    cluster = Cluster(tasks=(giant, task("a", linear(8), nodes=2), task("b", linear(8, 1.5), nodes=2)), nodes=8)
    for event in next_events(cluster, [task("other", linear(8, 1e15))]):
        assert Solver(cluster).best_counts(after(cluster, event)) == plainly(after(cluster, event))


def test_the_base_may_be_another_situation_altogether() -> None:
    choice = np.random.default_rng(3)
    base, other = (random_cluster(choice, 20, 7) for _ in range(2))
    many = tuple(task(f"task-{number}", linear(3), nodes=1) for number in range(9))
    assert Solver(base).best_counts(other) == plainly(other)
    assert Solver(base).best_counts(Cluster(tasks=many, nodes=20)) == plainly(Cluster(tasks=many, nodes=20))


def test_the_unit_of_values_does_not_depend_on_the_order_of_tasks() -> None:
    bounds = [1e30, 1.0, 3.0, 2.0**99, 1e-9]
    assert exponent_of(bounds) == exponent_of(bounds[::-1])
    assert exponent_of([]) == exponent_of([0.0]) == -VALUE_BITS


def test_what_cannot_be_shared_is_refused_by_both() -> None:
    rows = [np.array([IMPOSSIBLE, IMPOSSIBLE, 5]), np.array([IMPOSSIBLE, 7, 8])]
    with pytest.raises(ValueError, match="the tasks cannot share 2 nodes: some must have more than there are"):
        plain_optimum(rows, 2)
    with pytest.raises(ValueError, match="the tasks cannot share 2 nodes: some must have more than there are"):
        optimum(AlteredBlock(Block("ab", np.array(rows), 2), 2))


def test_the_same_question_has_the_same_answer() -> None:
    cluster = random_cluster(np.random.default_rng(5), 40, 7)
    turned = replace(cluster, tasks=cluster.tasks[::-1])
    assert list(best_counts(cluster)) == [each.name for each in cluster.tasks]
    assert best_counts(cluster) == best_counts(turned)


def test_a_submitted_task_is_planned_with_the_others() -> None:
    new = task("a", [0, 3, 6, 9, 9.5])
    cluster = Cluster(tasks=(task("b", linear(4), nodes=4),), nodes=4)
    assert best_counts(after(cluster, TaskSubmitted(new))) == {"a": 3, "b": 1}


@pytest.mark.parametrize("held", [0, 50, 100])
@pytest.mark.parametrize("cost_s", [0.0, 1e9])
def test_a_pin_that_leaves_nothing_holds_however_much_another_would_earn(held: int, cost_s: float) -> None:
    """No price within 64 bits keeps b from taking a node: the budget has to grow until b has none."""
    pinned = task("a", linear(100), pinned_nodes=100, nodes=held, transition=Transition.of(cost_s))
    cluster = Cluster(tasks=(pinned, task("b", [0, 1e12])), nodes=100)
    assert best_counts(cluster) == plainly(cluster) == {"a": 100, "b": 0}
