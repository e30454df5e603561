"""The policies that can be compared: who divides the nodes, who answers a fault, and what that costs.

Unicron is this repository's own code, with the live system's durations; each ablation changes one thing about it. The
others are models with the figures of ``published``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from unicron_elastic.planning.allocate.cluster import Cluster
from unicron_elastic.planning.allocate.optimum import best_counts
from unicron_elastic.planning.model.jobs import JobSpec
from unicron_elastic.planning.model.tasks import Task
from unicron_elastic.simulation.model.durations import DURATIONS, PAPER_DETECTION, Durations
from unicron_elastic.simulation.model.published import COSTS, FIGURES, Costs
from unicron_elastic.simulation.model.shape import JobShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPolicy:
    """One way to run a cluster.

    ``division``: "coordinator": the live one; "planned": by the planner once, and each job keeps what it got; a share:
    see ``divisions``; "oracle": the best at every moment, at no cost. ``durations``: with the live recovery machine;
    ``costs``: by the model of another system; neither: faults cost nothing but the nodes that they take. ``uneven``:
    replicas may have different numbers of micro-batches. ``loads``: the state from storage, beside ``costs``.
    ``shrinks``: a job goes on with fewer nodes; else it waits until it has as many as before.
    """

    name: str
    title: str
    division: str
    durations: Durations | None = None
    costs: Costs | None = None
    uneven: bool = True
    loads: bool = False
    shrinks: bool = True


def _unicron(
    name: str, title: str, durations: Durations, division: str = "coordinator", *, uneven: bool = True
) -> ClusterPolicy:
    return ClusterPolicy(name=name, title=title, division=division, durations=durations, uneven=uneven)


# What Megatron notices by, as the paper's column without Unicron has it: all but a lost node by time-out.
_LATE = replace(DURATIONS, notices=COSTS["megatron"].detection)
_ALL_OF_STEP = replace(DURATIONS, reuses_partial=False)
_FROM_CHECKPOINT = replace(DURATIONS, checkpoint_s=FIGURES["Megatron's checkpoint interval"].value)

_ALL = (
    _unicron("unicron", "Unicron: all parts", DURATIONS),
    _unicron(
        "unicron-paper",
        "Unicron, noticing as late as in the paper's table",
        replace(DURATIONS, notices=PAPER_DETECTION),
    ),
    _unicron("no-detection", "Unicron without detection: time-outs", _LATE),
    _unicron("no-partial", "Unicron without partial results: the step is lost", _ALL_OF_STEP),
    _unicron("no-nearest", "Unicron without nearest state: from checkpoints", _FROM_CHECKPOINT),
    _unicron("no-plan", "Unicron without cost-aware plan: jobs keep their nodes", DURATIONS, "planned"),
    _unicron("no-uneven", "Unicron without uneven shares of a batch", DURATIONS, uneven=False),
    _unicron("equal", "Unicron's recovery, equal shares", DURATIONS, "equal"),
    _unicron("weighted", "Unicron's recovery, shares by weight", DURATIONS, "weighted"),
    _unicron("sized", "Unicron's recovery, shares by size", DURATIONS, "sized"),
    ClusterPolicy(
        name="megatron",
        title="Megatron: checkpoints and time-outs",
        division="planned",
        costs=COSTS["megatron"],
        uneven=False,
    ),
    ClusterPolicy(
        name="megatron-waits",
        title="Megatron whose jobs wait for the repair of a node",
        division="planned",
        costs=COSTS["megatron"],
        uneven=False,
        shrinks=False,
    ),
    ClusterPolicy(
        name="torchrun", title="torchrun elastic", division="planned", costs=COSTS["torchrun"], uneven=False, loads=True
    ),
    ClusterPolicy(name="torchft", title="like torchft", division="planned", costs=COSTS["torchft"]),
    ClusterPolicy(name="oobleck", title="Oobleck", division="planned", costs=COSTS["oobleck"]),
    ClusterPolicy(name="bamboo", title="Bamboo", division="planned", costs=COSTS["bamboo"], uneven=False),
    ClusterPolicy(name="varuna", title="Varuna", division="planned", costs=COSTS["varuna"], uneven=False),
    ClusterPolicy(name="oracle", title="an oracle: knows the future, moves at no cost", division="oracle"),
)

POLICIES: Mapping[str, ClusterPolicy] = MappingProxyType({policy.name: policy for policy in _ALL})
COMPARED = ("unicron", "megatron", "torchrun", "torchft", "oobleck", "bamboo", "varuna", "oracle")
ABLATION = (
    "unicron",
    "no-detection",
    "no-partial",
    "no-nearest",
    "no-plan",
    "no-uneven",
    "equal",
    "weighted",
    "sized",
    "unicron-paper",
    "megatron",
    "megatron-waits",
    "oracle",
)


# How nodes are divided between jobs where no coordinator does it: by the planner once, or by shares.
#
# A share is rounded so: each job gets the largest useful number of nodes that is at most its share; then, again and
# again, the job whose next useful number is the smallest multiple of its share gets that, while there are nodes. A
# number is useful if the job runs on it, and faster than on any smaller one. As in ``benchmarks/multi_task.py``, in
# whole nodes.


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
