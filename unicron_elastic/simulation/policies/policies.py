"""The policies that can be compared: who divides the nodes, who answers a fault, and what that costs.

Unicron is this repository's own code, with the live system's durations; each ablation changes one thing about it. The
others are models with the figures of ``published``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from unicron_elastic.simulation.model.durations import DURATIONS, PAPER_DETECTION, Durations
from unicron_elastic.simulation.model.published import COSTS, FIGURES, Costs


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
