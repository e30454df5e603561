"""What a failure costs under each system: one table of figures, each with its unit, its source and how sure it is.

No figure here is fitted to a result. Where a system's authors, or anybody else, have published none, the figure is an
assumption, chosen in favour of that system, and its note says so. "Remembered" figures are from memory of a paper that
was not at hand: never quote them as the paper's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from unicron_elastic.simulation.history.events import Method


class Tag(str, Enum):
    """How sure a figure is."""

    PUBLISHED = "published"
    MEASURED = "measured here"
    REMEMBERED = "remembered"
    ASSUMED = "assumed"

    def __str__(self) -> str:
        return str.__str__(self)


@dataclass(frozen=True, slots=True)
class Figure:
    """A value in ``unit`` ("s", "ratio", "steps", "bytes/s"), and where it is from."""

    value: float
    unit: str
    tag: Tag
    source: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Sized:
    """A figure that depends on the model: (parameters, value), ascending. Straight lines in between.

    Beyond the ends it stays what it is there: for larger models that is in favour of the system.
    """

    points: tuple[tuple[float, float], ...]
    unit: str
    tag: Tag
    source: str
    note: str = ""

    def at(self, parameters: float) -> float:
        """The value for a model of so many parameters."""
        before = self.points[0]
        for after in self.points:
            if parameters <= after[0]:
                share = 1.0 if after[0] == before[0] else (parameters - before[0]) / (after[0] - before[0])
                return before[1] + (after[1] - before[1]) * max(share, 0.0)
            before = after
        return before[1]


@dataclass(frozen=True, slots=True)
class TransitionPart:
    """One part of a transition, by name."""

    name: str
    figure: Figure | Sized

    def seconds(self, parameters: float) -> float:
        """For a model of so many parameters."""
        return self.figure.at(parameters) if isinstance(self.figure, Sized) else self.figure.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """One system. All times in seconds, all ratios relative to Megatron on the same GPUs.

    ``throughput``: while nothing is wrong, without checkpoints. ``detection``: by the method that would notice the
    fault under Unicron. ``transition``: its parts, one after another, without what is computed again and without the
    loading of a checkpoint from storage, which depends on bytes, unless a part says that it is in it.
    ``redone_steps``: steps that are computed again; None: all since the last checkpoint. ``checkpoint_interval`` and
    ``checkpoint_stall``: how often one is written, and for how long training stands still for it; None: it needs none.
    ``restarts_in_place``: whether a fault of a process leaves its node in the job. ``loses``: what goes with one lost
    node. ``note``: what was assumed of it besides.
    """

    system: str
    throughput: Figure
    detection: Mapping[Method, Figure]
    transition: tuple[TransitionPart, ...]
    redone_steps: Figure | None
    checkpoint_interval: Figure | None
    checkpoint_stall: Figure | Sized | None
    restarts_in_place: bool
    loses: str = "node"
    note: str = ""

    def transition_s(self, parameters: float) -> float:
        """All parts together, for a model of so many parameters."""
        return sum(part.seconds(parameters) for part in self.transition)


_UNICRON = "Unicron (arXiv 2401.00134), as told by summaries of others; the paper itself was not at hand"
_UNICRON_TABLE = "Unicron (arXiv 2401.00134), its table of detection times, from memory"
_OOBLECK = (
    "Oobleck's SOSP'23 artefact, github.com/SymbioticLab/Oobleck, branch sosp23-artifact (7966556), tools/simulator"
)
_OOBLECK_CODE = "the same branch, oobleck/elastic"
_BAMBOO_CODE = "Bamboo (NSDI'23), github.com/uclasystem/bamboo (8080929), project_pactum"
_TORCH = "PyTorch 2.13, torch.distributed: default_pg_nccl_timeout, 10 minutes"
_BYTEROBUST = "ByteRobust (SOSP'25, arXiv 2509.16293)"
_OURS = "docs/benchmark-{}.md of this repository, 2 cores, CPU, gloo"

_BILLION = 1e9


def _published(value: float, unit: str, source: str, note: str = "") -> Figure:
    return Figure(value, unit, Tag.PUBLISHED, source, note)


def _measured(value: float, unit: str, page: str, note: str = "") -> Figure:
    return Figure(value, unit, Tag.MEASURED, _OURS.format(page), note)


def _remembered(value: float, unit: str, source: str, note: str = "") -> Figure:
    return Figure(value, unit, Tag.REMEMBERED, source, note)


def _assumed(value: float, unit: str, note: str) -> Figure:
    return Figure(value, unit, Tag.ASSUMED, "no figure found", note)


# The path back under Megatron, as the Unicron paper tells it: 30 + 9 + 14 + 15 minutes.
_TIMEOUT = _published(
    30 * 60, "s", _UNICRON, "the time-out of the collectives; Megatron-LM's own default is 10 min now"
)
_TIMEOUT_TODAY = _published(10 * 60, "s", _TORCH, "it has no other way to notice a hang")
_INTERVAL = _remembered(
    30 * 60, "s", "Unicron (arXiv 2401.00134), from memory", "agrees with 15 min of recomputing in the mean"
)
_STALL = _published(
    6.77,
    "s",
    f"{_BYTEROBUST}, table 8, Megatron, 70B on 2,048 GPUs",
    "used for all sizes; 151 s are told for 18 GB too",
)
_NO_OVERHEAD = _assumed(1.0, "ratio", "as fast as Megatron, in its favour: nobody has published both on one cluster")
_NO_NOTICE = _assumed(1.0, "s", "the end of a process closes its connections; 1 s for telling others, in its favour")

_MEGATRON = Costs(
    system="megatron",
    throughput=_published(1.0, "ratio", "Megatron is what others are relative to"),
    detection={
        Method.NODE_HEALTH: _remembered(5.7, "s", _UNICRON_TABLE, "the column without Unicron"),
        Method.SUPERVISION: _TIMEOUT,
        Method.EXCEPTION: _TIMEOUT,
        Method.STATISTICS: _TIMEOUT,
    },
    transition=(
        TransitionPart("waiting for resources and submitting again", _published(9 * 60, "s", _UNICRON)),
        TransitionPart("environment, CUDA and NCCL", _published(14 * 60, "s", _UNICRON, "taken to include loading")),
    ),
    redone_steps=None,
    checkpoint_interval=_INTERVAL,
    checkpoint_stall=_STALL,
    restarts_in_place=True,
    note="After a lost node it goes on with fewer once 23 minutes have passed, though the same summaries say that "
    "people do that by hand, in hours to days: in its favour.",
)

_TORCHRUN = Costs(
    system="torchrun",
    throughput=_published(1.0, "ratio", "the launcher only; training is Megatron's"),
    detection={
        Method.NODE_HEALTH: _published(15.0, "s", "PyTorch 2.13, c10d rendezvous: keep-alive of 5 s, three times"),
        Method.SUPERVISION: _measured(0.073, "s", "restart", "median of 20; found by polling every 0.1 s"),
        Method.EXCEPTION: _measured(0.711, "s", "detection", "median of 2; the exit of the interpreter is in it"),
        Method.STATISTICS: _TIMEOUT_TODAY,
    },
    transition=(
        TransitionPart(
            "last call of the rendezvous", _published(30.0, "s", "PyTorch 2.13, c10d rendezvous: last_call_timeout")
        ),
        TransitionPart(
            "new processes, CUDA and NCCL",
            _published(
                46.0, "s", f"{_BYTEROBUST}, table 7: restart within pods that stay, 2,048 GPUs", "for all sizes"
            ),
        ),
    ),
    redone_steps=None,
    checkpoint_interval=_INTERVAL,
    checkpoint_stall=_STALL,
    restarts_in_place=True,
    note="All processes of the job restart. Measured with three agents on one machine: 43.6 s from the loss of one to "
    "the first step (docs/benchmark-rendezvous.md), and nothing within 60 s after a power-off.",
)

_TORCHFT = Costs(
    system="torchft",
    throughput=_assumed(
        1.0, "ratio", "about 10 ms a step were measured here, which is little where steps take seconds"
    ),
    detection={
        Method.NODE_HEALTH: _published(5.0, "s", "torchft, src/lighthouse.rs: heartbeat_timeout_ms 5000"),
        Method.SUPERVISION: _published(5.0, "s", "torchft, src/lighthouse.rs: heartbeat_timeout_ms 5000"),
        Method.EXCEPTION: _NO_NOTICE,
        Method.STATISTICS: _published(60.0, "s", "torchft, manager.py: time-out of operations and of the quorum"),
    },
    transition=(
        TransitionPart(
            "new quorum and process groups", _measured(2.023, "s", "recovery", "median of 10, with a step in it")
        ),
    ),
    redone_steps=_published(1.0, "steps", "torchft: a step that not all finish is discarded (should_commit)"),
    checkpoint_interval=None,
    checkpoint_stall=None,
    restarts_in_place=True,
    loses="replica",
    note="Survivors go on without the whole replica of a lost rank. That the batch is smaller then is not counted "
    "against it. A vendor of a rival reports steps more than twice as long with it on 64 GPUs "
    "(clockwork.io/blog/keeping-distributed-training-running-through-failures); that is not used.",
)

_OOBLECK_COSTS = Costs(
    system="oobleck",
    throughput=_NO_OVERHEAD,
    detection={
        Method.NODE_HEALTH: _published(5.0, "s", f"{_OOBLECK_CODE}: TIMEOUT of messages, a ping every 0.4 s"),
        Method.SUPERVISION: _NO_NOTICE,
        Method.EXCEPTION: _NO_NOTICE,
        Method.STATISTICS: _TIMEOUT_TODAY,
    },
    transition=(
        TransitionPart(
            "pipelines are made anew",
            Sized(
                ((0.34e9, 2.0), (0.35e9, 3.0), (2.7 * _BILLION, 6.0), (6.7 * _BILLION, 10.0)),
                "s",
                Tag.PUBLISHED,
                f"{_OOBLECK}/oobleck_simulator.py: BERT-large 2 s, GPT-3 medium 3 s, 2.7B 6 s, 6.7B 10 s",
                "the state that is moved is in it",
            ),
        ),
    ),
    redone_steps=_published(1.0, "steps", f"{_OOBLECK}/oobleck_simulator.py: the step in progress is lost"),
    checkpoint_interval=None,
    checkpoint_stall=None,
    restarts_in_place=False,
    note="It has no restart in place: a fault of a process costs the node until it can join again.",
)

_BAMBOO = Costs(
    system="bamboo",
    throughput=_remembered(
        0.83,
        "ratio",
        "Bamboo (NSDI'23): its redundant computing makes an iteration 19.8 % longer, from memory",
        "in its favour: 0.72 per GPU follows from its own repository (BERT, with and without), and 0.16 to 0.33 of "
        "Oobleck or Varuna from Oobleck's artefact, where it runs out of memory from 2.7B on; here it never does",
    ),
    detection={
        Method.NODE_HEALTH: _published(10.0, "s", f"{_BAMBOO_CODE}/rendezvous/etcd.py: keep-alive of 10 s"),
        Method.SUPERVISION: _NO_NOTICE,
        Method.EXCEPTION: _NO_NOTICE,
        Method.STATISTICS: _TIMEOUT_TODAY,
    },
    transition=(
        TransitionPart(
            "the neighbour takes over, then pipelines are made anew",
            _published(
                20.0,
                "s",
                f"{_BAMBOO_CODE}/simulation/simulator.py: GPT-2 and BERT",
                "in its favour: Oobleck's artefact has 76 s to 450 s",
            ),
        ),
    ),
    redone_steps=_assumed(0.0, "steps", "the neighbour has computed the lost layers too, in its favour"),
    checkpoint_interval=None,
    checkpoint_stall=None,
    restarts_in_place=False,
    note="Two neighbours lost at once would end the job; here they do not.",
)

_VARUNA = Costs(
    system="varuna",
    throughput=_assumed(
        1.0,
        "ratio",
        "as fast as Megatron, in its favour; 0.95 to 1.21 of Oobleck's in Oobleck's artefact (2.7B and 6.7B)",
    ),
    detection={
        Method.NODE_HEALTH: _published(10.0, "s", f"{_OOBLECK}/varuna_simulator.py"),
        Method.SUPERVISION: _NO_NOTICE,
        Method.EXCEPTION: _NO_NOTICE,
        Method.STATISTICS: _TIMEOUT_TODAY,
    },
    transition=(
        TransitionPart(
            "restart with another shape",
            Sized(
                ((0.34e9, 76.0), (2.7 * _BILLION, 515.0), (6.7 * _BILLION, 701.0)),
                "s",
                Tag.PUBLISHED,
                f"{_OOBLECK}/varuna_simulator.py: BERT-large 76 s, 2.7B 515 s, 6.7B 701 s",
                "the loading of the checkpoint is in it; a rival's measurement, on 30 nodes with an A40 each",
            ),
        ),
    ),
    redone_steps=None,
    checkpoint_interval=_published(
        1950.0, "s", f"{_OOBLECK}/varuna_simulator.py", "10 steps of 6.7B there, 1,024 samples at 5.24 a second"
    ),
    checkpoint_stall=Sized(
        ((0.34e9, 15.8), (2.7 * _BILLION, 50.0), (6.7 * _BILLION, 120.0)),
        "s",
        Tag.PUBLISHED,
        f"{_OOBLECK}/varuna_simulator.py: BERT-large 15.8 s, 2.7B 50 s, 6.7B 120 s",
        "a rival's measurement, on 30 nodes with an A40 each",
    ),
    restarts_in_place=True,
)

COSTS: Mapping[str, Costs] = MappingProxyType(
    {costs.system: costs for costs in (_MEGATRON, _TORCHRUN, _TORCHFT, _OOBLECK_COSTS, _BAMBOO, _VARUNA)}
)

# Figures that belong to no competitor.
FIGURES: Mapping[str, Figure] = MappingProxyType(
    {
        "Unicron notices a lost node": _remembered(5.6, "s", _UNICRON_TABLE),
        "Unicron notices a killed process": _remembered(1.8, "s", _UNICRON_TABLE),
        "Unicron notices an exception": _remembered(0.3, "s", _UNICRON_TABLE),
        "Unicron notices a hang": _published(3.0, "steps", _UNICRON),
        "Megatron's time-out": _TIMEOUT,
        "time-out of collectives today": _TIMEOUT_TODAY,
        "Megatron's checkpoint interval": _INTERVAL,
        "computing again, in the mean": _published(15 * 60, "s", _UNICRON, "half of the checkpoint interval"),
        "shared storage": _remembered(20e9, "bytes/s", "Unicron (arXiv 2401.00134), its cluster, from memory"),
        "loading a checkpoint, 504 B200": _published(33 * 60, "s", "arXiv 2605.09370, the mean"),
        "loading a checkpoint, Megatron": _published(242.0, "s", "DLRover, Flash Checkpoint; 156 s with it"),
        "submitting again, 2,048 GPUs": _published(454.0, "s", f"{_BYTEROBUST}, table 7"),
        "submitting again, 16,384 GPUs": _published(768.0, "s", f"{_BYTEROBUST}, table 7"),
        "recovery of FlashRecovery": _published(150.0, "s", "FlashRecovery (arXiv 2509.03047), 4,800 devices"),
    }
)


def all_figures() -> Iterator[tuple[str, Figure | Sized]]:
    """Every figure with what it is, for people to read: in the order of the table."""
    yield from FIGURES.items()
    for name, costs in COSTS.items():
        yield f"{name}: healthy throughput", costs.throughput
        for method, figure in costs.detection.items():
            yield f"{name}: detection by {method}", figure
        for part in costs.transition:
            yield f"{name}: {part.name}", part.figure
        others = {
            "steps computed again": costs.redone_steps,
            "checkpoint interval": costs.checkpoint_interval,
            "checkpoint stall": costs.checkpoint_stall,
        }
        for what, found in others.items():
            if found is not None:
                yield f"{name}: {what}", found
