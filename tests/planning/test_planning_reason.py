"""Why: one sentence per plan, and one for every task that has to wait."""

from __future__ import annotations

from dataclasses import replace

import pytest
from situations import linear, task

from unicron_elastic.planning.allocate.cluster import (
    Cluster,
    Event,
    NodesJoined,
    NodesLost,
    NothingChanged,
    TaskFinished,
    TaskSubmitted,
)
from unicron_elastic.planning.allocate.plan_table import plan_for
from unicron_elastic.planning.model.faulting import FaultRate
from unicron_elastic.planning.model.tasks import Transition

A = task("a", [0, 1, 2, 3, 6.6, 8.4], nodes=5)
B = task("b", [0, 1, 2, 3, 4, 5], nodes=5, transition=Transition.of(40.0))
ALIKE = {"grow_s": 10.0, "shrink_s": 10.0, "replace_s": 10.0, "stop_s": 10.0}
TWO = Cluster(tasks=(A, B), nodes=10)
OFTEN = FaultRate(faults=10**6, node_s=1e6)
PLATEAU = task("a", [0, 1, 1], nodes=2)


@pytest.mark.parametrize(
    ("cluster", "event", "reason"),
    [
        (
            TWO,
            NodesLost(("a",)),
            (
                "Job a lost a node; b gives it 1 of its 5 nodes, as a earns 1.8 times as much with it: 6.9 % more "
                "weighted FLOP/s for 40 s of b standing still."
            ),
        ),
        (
            replace(TWO, faults=OFTEN),
            NodesLost(("a",)),
            (
                "Job a lost a node; it goes on with 4 of its 5 nodes: no node moves, as no move would earn what it "
                "costs before the next fault, expected in 1.59 s."
            ),
        ),
        (
            replace(TWO, nodes=11),
            NodesLost(("a",)),
            "Job a lost a node; it gets an idle node: 16 % more weighted FLOP/s.",
        ),
        (
            Cluster(
                tasks=(
                    task("a", [0, 1], nodes=1, transition=Transition(**ALIKE, unsaved_s=512.0)),
                    task("b", [0, 4], pinned_nodes=1),
                ),
                nodes=1,
            ),
            NothingChanged(),
            (
                "Nothing has changed; a gives b its last node and waits (it has not saved 8.53 minutes of training), "
                "as b earns 4 times as much with it: 300 % more weighted FLOP/s."
            ),
        ),
        (
            TWO,
            NothingChanged(),
            (
                "Nothing has changed: no node moves, as no move would earn what it costs before the next fault, "
                "expected in 15.4 days."
            ),
        ),
        (
            replace(TWO, tasks=(B, replace(A, nodes=4)), nodes=9),
            NodesJoined(2),
            "2 nodes joined; a gets an idle node: 16 % more weighted FLOP/s for 10 s of a standing still.",
        ),
        (
            Cluster(tasks=(task("a", linear(4), nodes=2), B), nodes=7),
            TaskFinished("b"),
            "Job b finished; a gets 2 idle nodes: 100 % more weighted FLOP/s for 10 s of a standing still.",
        ),
        (
            Cluster(tasks=(PLATEAU,), nodes=2),
            TaskSubmitted(task("b", [0, 1])),
            (
                "Job b was submitted; a gives it 1 of its 2 nodes, as a earns no less without it: 100 % more weighted "
                "FLOP/s for 10 s of a standing still."
            ),
        ),
        (
            Cluster(tasks=(), nodes=2),
            TaskSubmitted(task("b", [0, 1])),
            "Job b was submitted; it gets an idle node: 1e+12 weighted FLOP/s instead of none.",
        ),
        (
            Cluster(tasks=(task("a", linear(2), nodes=2, min_nodes=2),), nodes=2),
            NodesLost(("a",)),
            "Job a lost a node; it gives up its last node and waits: no more weighted FLOP/s.",
        ),
        (
            Cluster(tasks=(task("a", linear(2), nodes=2), task("b", linear(2), nodes=2)), nodes=5),
            NodesLost(("a", "a", "b"), idle=1),
            (
                "Job a lost 2 nodes and job b lost a node and an idle node went away; a has to wait; b goes on with "
                "1 of its 2 nodes: no node moves"
            ),
        ),
    ],
)
def test_one_sentence(cluster: Cluster, event: Event, reason: str) -> None:
    found = plan_for(cluster, event).reason
    assert found == reason or (not reason.endswith(".") and found.startswith(reason))


def test_of_many_moves_a_few_are_told() -> None:
    tasks = tuple(task(f"task-{number}", linear(2), nodes=1) for number in range(5))
    cluster = Cluster(tasks=tasks, nodes=5)
    assert plan_for(cluster, NodesJoined(5)).reason == (
        "5 nodes joined; task-0 gets an idle node; task-1 gets an idle node; task-2 gets an idle node; 2 more moves: "
        "100 % more weighted FLOP/s for 50 s of standing still in 5 tasks."
    )
    assert plan_for(cluster, NodesJoined(3)).reason == (
        "3 nodes joined; task-0 gets an idle node; task-1 gets an idle node; task-2 gets an idle node: 60 % more "
        "weighted FLOP/s for 10 s of task-0, 10 s of task-1 and 10 s of task-2 standing still."
    )


def test_a_pin_may_cost_something() -> None:
    tasks = (task("a", linear(2), nodes=1, pinned_nodes=2), task("b", linear(3, 2.0), nodes=3))
    assert plan_for(Cluster(tasks=tasks, nodes=4), NothingChanged()).reason == (
        "Nothing has changed; b gives a 1 of its 3 nodes: 14 % less weighted FLOP/s for 10 s of a and 10 s "
        "of b standing still."
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pinned_nodes": 0}, "w is paused."),
        ({"min_nodes": 4}, "w waits: it needs at least 4 nodes, and there are 3."),
        ({"min_nodes": 2}, "w waits: it needs at least 2 nodes, 1 is idle, and the others earn more with theirs."),
        ({"rates_flops": [0, 0, 0]}, "w waits: there is no number of nodes on which it can run."),
    ],
)
def test_why_a_task_waits(changes: dict[str, object], reason: str) -> None:
    waiting = replace(task("w", linear(4)), **changes)  # type: ignore[arg-type]
    tasks = (task("a", linear(2, 9.0), nodes=2), waiting)
    plan = plan_for(Cluster(tasks=tasks, nodes=3, size=5), NothingChanged())
    assert [tuple(wait) for wait in plan.waits] == [("w", reason)]


def test_why_a_pinned_task_waits() -> None:
    tasks = (task("a", linear(3, 9.0), nodes=3, pinned_nodes=3), task("w", linear(3), pinned_nodes=1))
    plan = plan_for(Cluster(tasks=tasks, nodes=3, size=4), NothingChanged())
    assert plan.waits[0].reason == (
        "w waits: it needs exactly 1 node, none are idle, and the others earn more with theirs."
    )
