"""The best division of nodes for a situation, and for many that differ from one in little."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from unicron_elastic.planning.allocate.cluster import Cluster
from unicron_elastic.planning.allocate.core import optimum
from unicron_elastic.planning.allocate.prices import AlteredBlock, Block
from unicron_elastic.planning.model.tasks import Floats, Task
from unicron_elastic.planning.model.waf import IMPOSSIBLE, gains, keys

VALUE_BITS = 38  # of the sum of all G: differences below 4e-12 of it are none, as are sums of 64 bits without overflow

CHANGED_MAX = 8  # tasks; with more, little is shared


def best_counts(cluster: Cluster) -> dict[str, int]:
    """The nodes of each task, by name, that maximise the sum of G over all tasks: see ``waf``."""
    return Solver(cluster).best_counts(cluster)


def exponent_of(bounds: list[float]) -> int:
    """The unit of values, as a power of 2, for tasks whose largest absolute G are ``bounds``.

    It depends on nothing but the situation, not even on the order of tasks: the sum is exactly rounded.
    """
    return math.frexp(math.fsum(bounds))[1] - VALUE_BITS


@dataclass(frozen=True, slots=True)
class _Gains:
    """G of all tasks of the base at one n', and the largest absolute one of each."""

    rows: list[Floats]
    bounds: list[float]


class Solver:
    """Solves situations that differ from ``base`` in few tasks or in the number of nodes, sharing what is the same.

    What it finds is the optimum of the given situation, whatever the base is.
    """

    def __init__(self, base: Cluster) -> None:
        self._base = base
        self._gains: dict[tuple[int, float, bool], _Gains] = {}
        self._blocks: dict[tuple[int, float, bool, int], Block] = {}

    def best_counts(self, cluster: Cluster) -> dict[str, int]:
        """The nodes of each task of ``cluster``, by name, that maximise the sum of G over all tasks."""
        kept = {id(task) for task in cluster.tasks}
        without = [place for place, task in enumerate(self._base.tasks) if id(task) not in kept]
        based = {id(task) for task in self._base.tasks}
        extra = [task for task in cluster.tasks if id(task) not in based]
        if len(without) + len(extra) > CHANGED_MAX:
            return Solver(cluster).best_counts(cluster)
        shared = self._shared(cluster)
        rows = _gains(extra, cluster)
        left_out = set(without)
        bounds = [bound for place, bound in enumerate(shared.bounds) if place not in left_out]
        exponent = exponent_of([*bounds, *map(_bound, rows)])
        changed = tuple((task.name, keys(task, row, exponent)) for task, row in zip(extra, rows, strict=True))
        return optimum(AlteredBlock(self._block(cluster, shared, exponent), cluster.nodes, tuple(without), changed))

    def _shared(self, cluster: Cluster) -> _Gains:
        key = cluster.nodes, cluster.running_s, cluster.are_pins_held
        if key not in self._gains:
            rows = _gains(self._base.tasks, cluster)
            self._gains[key] = _Gains(rows, [_bound(row) for row in rows])
        return self._gains[key]

    def _block(self, cluster: Cluster, shared: _Gains, exponent: int) -> Block:
        key = cluster.nodes, cluster.running_s, cluster.are_pins_held, exponent
        if key not in self._blocks:
            width = max((len(row) for row in shared.rows), default=1)
            found = np.full((len(shared.rows), width), IMPOSSIBLE)
            found[:, 0] = 0
            for place, (task, row) in enumerate(zip(self._base.tasks, shared.rows, strict=True)):
                # A task above the bound of the sum is not in the situation; its keys could leave 64 bits.
                if math.frexp(shared.bounds[place])[1] <= exponent + VALUE_BITS:
                    found[place, : len(row)] = keys(task, row, exponent)
            self._blocks[key] = Block([task.name for task in self._base.tasks], found, cluster.nodes)
        return self._blocks[key]


def _gains(tasks: Iterable[Task], cluster: Cluster) -> list[Floats]:
    nodes, running_s, is_pin_held = cluster.nodes, cluster.running_s, cluster.are_pins_held
    limits = ((task, min(nodes, max(task.most_nodes, task.pinned_nodes or 0))) for task in tasks)
    return [gains(task, most, running_s, is_pin_held=is_pin_held) for task, most in limits]


def _bound(row: Floats) -> float:
    """The largest absolute value of an option."""
    return float(np.max(np.abs(row), initial=0.0, where=row > -np.inf))
