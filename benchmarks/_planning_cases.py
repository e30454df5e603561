"""Clusters to plan for: jobs of mixed sizes, whose rates are neither concave nor monotone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from unicron_elastic.planning.allocate.cluster import Cluster
from unicron_elastic.planning.model.tasks import Floats, Task, Transition

NODE_FLOPS = 8 * 125e12
FEASIBLE = ("any", "any", "multiples", "divisors")


def rates(nodes: int, batch: int, overhead: float, feasible: str, noise: Floats) -> Floats:
    """FLOP/s by number of nodes: the slowest node sets the pace of a batch in whole samples, and steps cost overhead.

    ``feasible``: on which numbers it runs; "divisors": those that divide the batch, as without uneven shares.
    """
    counts = np.arange(nodes + 1)
    paced = batch / np.ceil(batch / np.maximum(counts, 1))
    found = NODE_FLOPS * paced / (1.0 + overhead * counts) * noise[: nodes + 1]
    if feasible == "divisors":
        found[batch % np.maximum(counts, 1) != 0] = 0.0
    found[0] = 0.0
    return found


def cluster(nodes: int, jobs: int, seed: int = 0) -> Cluster:
    """Jobs each of which could have all nodes; none has any yet."""
    choice = np.random.default_rng(seed)
    tasks = []
    for number in range(jobs):
        feasible = FEASIBLE[number % len(FEASIBLE)]
        unit = 2 if feasible == "multiples" else 1
        batch = int(choice.choice([768, 1024, 1536, 2048, 3072, 4096])) * max(1, nodes // 2048)
        noise = choice.uniform(0.97, 1.03, nodes + 1)
        tasks.append(
            Task(
                name=f"job-{number:03}",
                rates_flops=rates(nodes // unit, batch, float(choice.uniform(0.5, 3.0)) / nodes, feasible, noise),
                weight=float(choice.choice([0.5, 1.0, 1.5, 2.0])),
                min_nodes=int(choice.integers(1, max(2, nodes // jobs // 4))),
                unit_nodes=unit,
                transition=Transition.of(float(choice.uniform(5.0, 60.0))),
            )
        )
    return Cluster(tasks=tuple(tasks), nodes=nodes)


def placed(situation: Cluster, counts: dict[str, int]) -> Cluster:
    """The same, with each task on so many nodes."""
    tasks = tuple(replace(task, nodes=counts[task.name], lost_nodes=0) for task in situation.tasks)
    return replace(situation, tasks=tasks)
