"""Six jobs on 128 GPUs in five cases: what the Unicron paper (arXiv 2401.00134) compares, and what is chosen here.

Known of the paper's comparison, from memory and not from its text: six tasks, five cases that vary model size and
weight, weights of 0.5 to 2.0, 128 GPUs; that GPT-3 models of 1.3, 7, 13, 70 and 175 billion parameters are used in its
evaluation. Not known: which sizes and weights each case has, batches, minimums, and any figure. All of this is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from unicron_elastic.planning.allocate.cluster import Cluster
from unicron_elastic.planning.model.configurations import Workload
from unicron_elastic.planning.model.faulting import PRIOR_NODE_S, FaultRate
from unicron_elastic.planning.model.memory import parameters
from unicron_elastic.planning.model.shape import Transformer
from unicron_elastic.planning.model.tasks import Task, Transition
from unicron_elastic.planning.model.throughput import GPU_FLOPS, ThroughputModel, rates

GPUS = 128
NODE_GPUS = 8
GIB = 2**30
VOCABULARY = 51200  # GPT-2's 50257 words, padded as Megatron-LM does: arXiv 2104.04473, section 5.1
SEQUENCE = 2048  # tokens: arXiv 2005.14165, section 2.1
TRANSITION_S = 60.0  # the default of a task; the paper's times are not known
# Layers, hidden, heads, and samples of a global batch. Shapes: table 2.1 of arXiv 2005.14165, with heads of 128 and
# 13B's hidden a multiple of them; for 70B that of Llama 2 (arXiv 2307.09288), but as a GPT-3 layer, which makes 65B of
# it. Batches: the tokens in the same table, 1, 2 and 2 M, rounded to a power of 2 samples; for 70B 3.2 M, as 175B has
# there, rounded to 3 times one.
SIZES = {
    "1.3B": (24, 2048, 16, 512),
    "7B": (32, 4096, 32, 1024),
    "13B": (40, 5120, 40, 1024),
    "70B": (80, 8192, 64, 1536),
}
SAME = ("7B",) * 6
MIXED = ("1.3B", "1.3B", "7B", "7B", "13B", "70B")
EQUAL = (1.0,) * 6
RISING = (0.5, 0.8, 1.1, 1.4, 1.7, 2.0)
CASES = {
    "1: six of 7B, weights 1": (SAME, EQUAL),
    "2: six of 7B, weights 0.5 to 2": (SAME, RISING),
    "3: 1.3B to 70B, weights 1": (MIXED, EQUAL),
    "4: 1.3B to 70B, the largest weighs most": (MIXED, RISING),
    "5: 1.3B to 70B, the smallest weighs most": (MIXED, RISING[::-1]),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What the comparison assumes. ``unit_gpus``: tasks get multiples of that many. ``uneven``: replicas may have
    different numbers of micro-batches. ``is_linear``: a GPU achieves the same in every job, wherever it can run.
    ``is_weighted``: without it, all weights are 1.
    """

    unit_gpus: int = 1
    uneven: bool = False
    is_linear: bool = False
    is_weighted: bool = True


@dataclass(frozen=True, slots=True)
class Job:
    """A task, and the parameters of its model."""

    task: Task
    parameters: int


def workload(size: str, variant: Variant) -> Workload:
    """A GPT-3 under Megatron-LM on A100-80GB: ZeRO-1, TP within a node, up to 16 stages, activations kept or not."""
    layers, hidden, heads, batch = SIZES[size]
    return Workload(
        global_batch=batch,
        micro_batch_sizes=(1, 2, 4, 8),
        gpus_per_unit=variant.unit_gpus,
        gpus_per_node=NODE_GPUS,
        gpu_memory_bytes=80 * GIB,
        uneven=variant.uneven,
        transformer=Transformer(layers=layers, hidden=hidden, heads=heads, sequence=SEQUENCE, vocabulary=VOCABULARY),
        sharding="optimizer",
        recompute=None,
        max_tensor=NODE_GPUS,
        max_pipeline=16,
    )


@cache
def rates_of(size: str, variant: Variant) -> tuple[float, ...]:
    """T(t, x) in FLOP/s by number of units: nothing is measured, so the model with 40 % of an A100's peak."""
    found = rates(ThroughputModel(workload=workload(size, variant)), GPUS // variant.unit_gpus)
    if variant.is_linear:
        return tuple(units * variant.unit_gpus * GPU_FLOPS if rate else 0.0 for units, rate in enumerate(found))
    return found


def jobs_of(case: str, variant: Variant) -> list[Job]:
    """The six jobs of a case, waiting. The minimum of each is the fewest GPUs into whose memory it fits."""
    found = []
    for number, (size, weight) in enumerate(zip(*CASES[case], strict=True), 1):
        task = Task(
            name=f"job {number} ({size})",
            rates_flops=np.array(rates_of(size, variant)),
            weight=weight if variant.is_weighted else 1.0,
            min_nodes=variant.unit_gpus * next(units for units, rate in enumerate(rates_of(size, variant)) if rate),
            unit_nodes=variant.unit_gpus,
            transition=Transition.of(TRANSITION_S),
        )
        found.append(Job(task, parameters(workload(size, variant)) or 0))
    return found


def cluster_of(jobs: list[Job], gpus: int = GPUS) -> Cluster:
    """The planner hands out GPUs here, so its "node" is one. Faults are counted in whole nodes: the prior of 6.5 in
    1,000 node-days (see ``faulting``) is one eighth of that for each GPU.
    """
    faults = FaultRate(prior_node_s=NODE_GPUS * PRIOR_NODE_S)
    return Cluster(tasks=tuple(job.task for job in jobs), nodes=gpus, faults=faults)


def placed(cluster: Cluster, counts: dict[str, int]) -> Cluster:
    """The same, with each task on so many GPUs."""
    tasks = tuple(replace(task, nodes=counts[task.name], lost_nodes=0) for task in cluster.tasks)
    return replace(cluster, tasks=tasks)
