"""Situations to plan for: by hand, random, and solved in the dullest way."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
from hypothesis import strategies as st

from unicron_elastic.planning.allocate.cluster import Cluster
from unicron_elastic.planning.allocate.optimum import exponent_of
from unicron_elastic.planning.allocate.paper import plain_optimum
from unicron_elastic.planning.model.tasks import Ints, Task, Transition
from unicron_elastic.planning.model.waf import IMPOSSIBLE, gains, keys

NAMES = "abcdefgh"


def task(name: str, rates: Sequence[float], **others: object) -> Task:
    """A task with rates in TFLOP/s; it stands still for 10 s unless told otherwise."""
    return Task(
        name=name,
        rates_flops=np.array(rates, dtype=float) * 1e12,
        **{"transition": Transition.of(10.0), **others},  # type: ignore[arg-type]
    )


def linear(most: int, per_node: float = 1.0) -> list[float]:
    """Rates in proportion to nodes."""
    return [per_node * count for count in range(most + 1)]


def rows_of(cluster: Cluster) -> list[Ints]:
    """The keys of all tasks, without anything shared."""
    found = [gains(each, cluster.nodes, cluster.running_s, is_pin_held=cluster.are_pins_held) for each in cluster.tasks]
    exponent = exponent_of([float(np.abs(row[row > -np.inf]).max()) for row in found])
    return [keys(each, row, exponent) for each, row in zip(cluster.tasks, found, strict=True)]


def plainly(cluster: Cluster) -> dict[str, int]:
    """The optimum by the dynamic programme of the paper."""
    names = [each.name for each in cluster.tasks]
    return dict(zip(names, plain_optimum(rows_of(cluster), cluster.nodes), strict=True))


def exhaustively(cluster: Cluster) -> dict[str, int]:
    """The optimum by trying everything; of equal ones the first in order of names that gives most."""
    rows = rows_of(cluster)
    options = [np.flatnonzero(row > IMPOSSIBLE).tolist() for row in rows]
    fitting = (counts for counts in product(*options) if sum(counts) <= cluster.nodes)
    best = max(fitting, key=lambda counts: (sum(int(row[k]) for row, k in zip(rows, counts, strict=True)), *counts))
    return {each.name: count for each, count in zip(cluster.tasks, best, strict=True)}


@st.composite
def clusters(draw: st.DrawFn, most_nodes: int = 7, most_tasks: int = 3) -> Cluster:
    """Small situations: gaps, ties, units, minimums, pins, lost nodes, weights of 0, and costs of all sizes."""
    nodes = draw(st.integers(0, most_nodes))
    left, tasks = nodes, []
    for name in NAMES[: draw(st.integers(0, most_tasks))]:
        unit = draw(st.integers(1, 3))
        rates = [0.0, *draw(st.lists(st.sampled_from([0.0, 1.0, 2.0, 2.5, 3.0, 7.0, 1e-9, 1e6]), max_size=7))]
        least = draw(st.integers(1, 4))
        held = unit * draw(st.integers(0, min(left // unit, len(rates) - 1)))
        left -= held
        cost_s = draw(st.sampled_from([0.0, 10.0, 1e5, 1e7]))
        can_run = [unit * place for place, rate in enumerate(rates) if rate and unit * place >= least]
        tasks.append(
            task(
                name,
                rates,
                weight=draw(st.sampled_from([0.0, 0.5, 1.0, 2.0])),
                min_nodes=least,
                max_nodes=draw(st.one_of(st.none(), st.just(max(can_run, default=9)))),
                unit_nodes=unit,
                nodes=held,
                lost_nodes=draw(st.integers(0, min(2, held))),
                pinned_nodes=draw(st.sampled_from([None, None, None, 0, *can_run])),
                transition=draw(
                    st.sampled_from(
                        [
                            Transition.of(cost_s),
                            Transition(grow_s=0.0, shrink_s=cost_s, replace_s=cost_s / 2, stop_s=cost_s),
                            Transition(grow_s=0.0, shrink_s=0.0, replace_s=0.0, stop_s=0.0, unsaved_s=cost_s),
                        ]
                    )
                ),
            )
        )
    return Cluster(tasks=tuple(tasks), nodes=nodes, size=30)


def random_cluster(choice: np.random.Generator, most_nodes: int, most_tasks: int) -> Cluster:
    """The same kind, larger, and quick to make."""
    nodes = int(choice.integers(0, most_nodes + 1))
    left, tasks = nodes, []
    for name in NAMES[: int(choice.integers(0, most_tasks + 1))]:
        unit, units = int(choice.integers(1, 4)), int(choice.integers(0, most_nodes))
        counts = np.arange(units + 1.0)
        shapes = (choice.random(units + 1), choice.integers(0, 4, units + 1) * 1.0, counts, np.sqrt(counts), counts**2)
        rates = shapes[int(choice.integers(len(shapes)))] * 10.0 ** int(choice.integers(-3, 4))
        rates[0] = 0.0
        least = int(choice.integers(1, 4))
        held = unit * int(choice.integers(0, min(left // unit, units) + 1))
        left -= held
        can_run = [unit * place for place in np.flatnonzero(rates).tolist() if unit * place >= least]
        is_pinned = can_run and choice.random() < 0.1
        tasks.append(
            task(
                name,
                rates.tolist(),
                weight=float(choice.choice([0.0, 0.5, 1.0, 2.0])),
                min_nodes=least,
                unit_nodes=unit,
                nodes=held,
                lost_nodes=int(choice.integers(0, min(1, held) + 1)),
                pinned_nodes=int(choice.choice(can_run)) if is_pinned else None,
                transition=Transition.of(float(choice.choice([0.0, 60.0, 1e5, 1e7]))),
            )
        )
    return Cluster(tasks=tuple(tasks), nodes=nodes, size=4 * most_nodes)
