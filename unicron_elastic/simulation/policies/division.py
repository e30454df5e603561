"""How nodes are divided between jobs where no coordinator does it: by the planner once, or by shares.

A share is rounded so: each job gets the largest useful number of nodes that is at most its share; then, again and
again, the job whose next useful number is the smallest multiple of its share gets that, while there are nodes. A
number is useful if the job runs on it, and faster than on any smaller one. As in ``benchmarks/multi_task.py``, in
whole nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from unicron_elastic.planning.allocate.cluster import Cluster
from unicron_elastic.planning.allocate.optimum import best_counts
from unicron_elastic.planning.model.jobs import JobSpec
from unicron_elastic.planning.model.tasks import Task
from unicron_elastic.simulation.model.shape import JobShape

Jobs = Sequence[tuple[JobSpec, JobShape]]
RULES = ("planned", "equal", "weighted", "sized")


def division(rule: str, jobs: Jobs, nodes: int) -> dict[str, int]:
    """How many of ``nodes`` each job gets, by name."""
    if rule == "planned":
        return best_division(jobs, nodes)
    parts = {
        "equal": [1.0] * len(jobs),
        "weighted": [spec.weight for spec, _ in jobs],
        "sized": [shape.parameters for _, shape in jobs],
    }[rule]
    return _shared(jobs, parts, nodes)


def best_division(jobs: Jobs, nodes: int) -> dict[str, int]:
    """The planner's, for jobs that have nothing yet."""
    if not jobs:
        return {}
    tasks = tuple(_task(spec, shape) for spec, shape in jobs)
    size = max([nodes, *(max(task.min_nodes, task.pinned_nodes or 0) for task in tasks)])
    return best_counts(Cluster(tasks=tasks, nodes=nodes, size=size))


def waf_of(jobs: Jobs, counts: Mapping[str, int]) -> float:
    """Weighted FLOP/s of a division."""
    return sum(spec.weight * shape.rate_flops(counts.get(spec.name, 0)) for spec, shape in jobs)


def _task(spec: JobSpec, shape: JobShape) -> Task:
    pin = 0 if spec.paused else spec.pinned_nodes
    return Task(
        name=spec.name,
        rates_flops=np.array(shape.rates_flops),
        weight=spec.weight,
        min_nodes=spec.min_nodes,
        max_nodes=spec.max_nodes,
        unit_nodes=spec.unit_nodes,
        pinned_nodes=pin,
    )


def _useful(spec: JobSpec, shape: JobShape, most: int) -> list[int]:
    found, best = [0], 0.0
    for units, rate in enumerate(shape.rates_flops):
        nodes = units * shape.unit_nodes
        if rate > best and spec.min_nodes <= nodes <= min(most, spec.max_nodes or most):
            found.append(nodes)
            best = rate
    return found


def _shared(jobs: Jobs, parts: Sequence[float], nodes: int) -> dict[str, int]:
    total = sum(parts) or 1.0
    shares = {spec.name: nodes * part / total for (spec, _), part in zip(jobs, parts, strict=True)}
    possible = {spec.name: _useful(spec, shape, nodes) for spec, shape in jobs}
    counts = {name: max(count for count in possible[name] if count <= share) for name, share in shares.items()}
    while True:
        left = nodes - sum(counts.values())
        steps = [
            (count / shares[name] if shares[name] else float("inf"), name, count)
            for name, has in counts.items()
            for count in [next((each for each in possible[name] if each > has), 0)]
            if count and count - has <= left
        ]
        if not steps:
            return counts
        _, name, count = min(steps)
        counts[name] = count
