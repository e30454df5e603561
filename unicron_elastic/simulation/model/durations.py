"""How long the live system's actions take, in simulated seconds: each figure with its source beside it.

What this repository measured was measured on 2 cores with gloo. Where GPUs make a difference (communicators, processes,
bytes), somebody else's figure for a large system is taken instead, never a smaller one of our own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from unicron_elastic.base.require import require, require_keys
from unicron_elastic.simulation.history.events import Method
from unicron_elastic.simulation.model.published import COSTS, FIGURES, Figure, Sized, Tag

STATE_BYTES = 14.0  # per parameter: bf16 weight (2), fp32 weight, mean and variance (12): as in configurations_memory
_OURS = "docs/benchmark-{}.md of this repository, 2 cores, CPU, gloo"
_MEGASCALE = "MegaScale (NSDI'24): initialization under 5 s on 2,048 GPUs, under 30 s on more than 10,000, from memory"


def _measured(value: float, unit: str, page: str, note: str = "") -> Figure:
    return Figure(value, unit, Tag.MEASURED, _OURS.format(page), note)


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """What the execution of decisions takes. ``notices``: by method, in seconds, or in steps of the job."""

    notices: Mapping[Method, Figure]
    decides: Sized  # by nodes of the cluster: from a change in the store until an agent acts on the new plan
    meets: Figure  # survivors agree on the next world and connect
    communicators: Sized  # by GPUs of the job: NCCL's, made anew
    stops: Figure  # workers that are told to
    process: Figure  # a worker starts, until it can take part
    node: Figure | None = None  # all of a node that comes to a job do, with what starts them; None: as one worker
    checkpoint_s: float | None = None  # the state comes from a checkpoint of so many seconds' interval; None: peers
    peer_bytes_per_s: Figure  # into one node, from peers
    storage_bytes_per_s: Figure  # of all nodes together
    reuses_partial: bool = True  # the gradients of micro-batches that survivors had computed

    def notice_s(self, method: Method, step_s: float) -> float:
        """Return the seconds from a fault until it is noticed."""
        figure = self.notices[method]
        return figure.value * (step_s if figure.unit == "steps" else 1.0)

    @property
    def node_s(self) -> float:
        """Until the workers of a node that comes to a job can take part."""
        return (self.process if self.node is None else self.node).value

    def regroup_s(self, gpus: float) -> float:
        """Survivors stand still while they form the next world."""
        return self.meets.value + self.communicators.at(gpus)

    def fetch_s(self, parameters: float, nodes: int) -> float:
        """Until ``nodes`` new ones have the training state, of which each gets a copy as large as the model at most."""
        state = parameters * STATE_BYTES
        if self.checkpoint_s is not None:
            return state / self.storage_bytes_per_s.value
        return state / self.peer_bytes_per_s.value / max(nodes, 1)


PAPER_DETECTION: Mapping[Method, Figure] = MappingProxyType(
    {
        Method.NODE_HEALTH: FIGURES["Unicron notices a lost node"],
        Method.SUPERVISION: FIGURES["Unicron notices a killed process"],
        Method.EXCEPTION: FIGURES["Unicron notices an exception"],
        Method.STATISTICS: FIGURES["Unicron notices a hang"],
    }
)

# As the live system does it.
DURATIONS = Durations(
    notices={
        Method.NODE_HEALTH: _measured(0.947, "s", "rendezvous", "power-off, median of 3"),
        Method.SUPERVISION: _measured(0.0088, "s", "detection", "SIGKILL, 4 ranks, median of 2; 7 to 9 ms in all rows"),
        Method.EXCEPTION: _measured(0.0023, "s", "detection", "the slowest row's median"),
        Method.STATISTICS: _measured(3.1, "steps", "detection", "steps of 100 ms: 3.01 to 3.10 of them"),
    },
    decides=Sized(
        ((4.0, 0.018), (200.0, 0.0317), (2000.0, 0.0885), (12500.0, 0.42)),
        "s",
        Tag.MEASURED,
        _OURS.format("coordinator"),
        "lost to first agent acting, medians at 4, 200 and 2,000 agents; the last by a straight line, not measured",
    ),
    meets=_measured(0.060, "s", "in-place", "all survivors step after a kill: 48 to 59 ms in the median"),
    communicators=Sized(((2048.0, 5.0), (12288.0, 30.0)), "s", Tag.REMEMBERED, _MEGASCALE, "by GPUs of the job"),
    stops=Figure(1.0, "s", Tag.ASSUMED, "no figure found", "SIGTERM until the end of a training process"),
    process=Figure(
        COSTS["torchrun"].transition[1].seconds(0.0),
        "s",
        Tag.PUBLISHED,
        "ByteRobust (SOSP'25), table 7: restart within pods that stay, 2,048 GPUs: the same as for torchrun here",
        "measured here, without GPUs, 0.74 s (docs/benchmark-recovery.md): not used",
    ),
    peer_bytes_per_s=_measured(4.0e9, "bytes/s", "in-place", "docs/going-on.md: one process, TCP within a host"),
    storage_bytes_per_s=FIGURES["shared storage"],
)


# What a scenario can say of its own cluster, and the field of ``Durations`` that it replaces.
OWN: Mapping[str, str] = MappingProxyType(
    {
        "process_s": "process",
        "node_s": "node",
        "stops_s": "stops",
        "meets_s": "meets",
        "communicators_s": "communicators",
        "peer_bytes_per_s": "peer_bytes_per_s",
        "storage_bytes_per_s": "storage_bytes_per_s",
    }
)


def with_own(durations: Durations, own: Mapping[str, float]) -> Durations:
    """The same with what was measured on the cluster in question. Raises ``ValueError`` for what cannot be."""
    require_keys(own, list(OWN), "durations", ())
    found: dict[str, Any] = {}
    for name, value in own.items():
        is_rate = name.endswith("_per_s")
        is_possible = math.isfinite(value) and (value > 0.0 if is_rate else value >= 0.0)
        require(is_possible, f"{name} is {value}: it must be {'more than 0' if is_rate else '0 or more'}")
        given = Figure(value, "bytes/s" if is_rate else "s", Tag.MEASURED, "given with the scenario")
        is_sized = name == "communicators_s"
        found[OWN[name]] = Sized(((1.0, value),), "s", given.tag, given.source) if is_sized else given
    return replace(durations, **found)


def all_durations() -> Mapping[str, Figure | Sized]:
    """Every figure by what it is, for people to read."""
    found: dict[str, Figure | Sized] = {f"a fault is noticed by {m}": each for m, each in DURATIONS.notices.items()}
    return {
        **found,
        "a lost node until agents act on the new plan": DURATIONS.decides,
        "survivors meet": DURATIONS.meets,
        "communicators are made anew": DURATIONS.communicators,
        "workers that are told to stop": DURATIONS.stops,
        "a worker starts": DURATIONS.process,
        "state from peers": DURATIONS.peer_bytes_per_s,
        "state from storage": DURATIONS.storage_bytes_per_s,
    }
