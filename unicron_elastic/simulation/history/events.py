"""What happens to a cluster, and when: faults, nodes that come and go, jobs that come and end. Values; pure.

A history says nothing of what is done about it: that is the policy's matter. Times are seconds since its start. Nodes
are numbered from 0; a node that comes back after a repair, or a machine that takes the place of one that left, has the
number again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import TypeAlias

from unicron_elastic.faults import SEVERITY_OF, Severity, Status


class Method(str, Enum):
    """How a fault is noticed: the four methods of the Unicron paper, in the words of the incident ledger."""

    NODE_HEALTH = "node health"
    SUPERVISION = "process supervision"
    EXCEPTION = "exception propagation"
    STATISTICS = "online statistics"

    def __str__(self) -> str:
        return str.__str__(self)


@dataclass(frozen=True, slots=True)
class FaultKind:
    """What is known of a fault by its name alone: how bad it is, and how it is noticed."""

    severity: Severity
    method: Method


_METHODS: Mapping[Method, tuple[Status, ...]] = {
    Method.NODE_HEALTH: (Status.LOST_CONNECTION,),
    Method.SUPERVISION: (
        Status.EXITED_ABNORMALLY,
        Status.CONNECTION_REFUSED_OR_RESET,
        Status.KILLED_BY_SIGNAL,
        Status.OUT_OF_HOST_MEMORY,
        Status.STOPPED_BY_REQUEST,
    ),
    Method.EXCEPTION: (
        Status.ILLEGAL_MEMORY_ACCESS,
        Status.CUDA_ERROR,
        Status.OTHER_SOFTWARE_ERROR,
        Status.ECC_ERROR,
        Status.INVALID_DMA_MAPPING,
        Status.NVLINK_ERROR,
        Status.GPU_DRIVER_ERROR,
        Status.OTHER_NETWORK_ERROR,
        Status.OUT_OF_GPU_MEMORY,
        Status.STORAGE_ERROR,
    ),
    Method.STATISTICS: (Status.COLLECTIVE_TIMEOUT, Status.LINK_FLAPPING, Status.TASK_HANG),
}

# By status. Severities are those of the live system, `faults.SEVERITY_OF`, which has them from table 1 of the Unicron
# paper (arXiv 2401.00134; seen in summaries by others). Which method notices which status is remembered from the same
# table, not read there; for the statuses of our own it is the method by which the live system notices them.
KINDS: Mapping[Status, FaultKind] = MappingProxyType(
    {status: FaultKind(SEVERITY_OF[status], method) for method, statuses in _METHODS.items() for status in statuses}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredFault:
    """What a fault of a real job cost there, in seconds; None where the moment did not come.

    The phases follow each other: from the fault until it was noticed, until the workers had stopped, until they had
    regrouped, until the first step after it. ``job``, ``host`` and ``action`` are the ledger's.
    """

    job: str
    host: str
    action: str
    noticed_s: float | None = None
    stopped_s: float | None = None
    regrouped_s: float | None = None
    first_step_s: float | None = None

    @property
    def total_s(self) -> float | None:
        """Return the seconds from the fault to the first step after it; None if a moment is missing."""
        phases = (self.noticed_s, self.stopped_s, self.regrouped_s, self.first_step_s)
        return None if None in phases else math.fsum(phase for phase in phases if phase is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultStruck:
    """A fault strikes ``node``. Faults at one moment have one cause, such as a rack without power.

    ``repair_s``: how long the node is away if it has to be isolated; None where nothing has to be repaired.
    ``measured``: what it cost, if the history is that of a real job.
    """

    at_s: float
    node: int
    kind: Status
    repair_s: float | None = None
    measured: MeasuredFault | None = None

    @property
    def severity(self) -> Severity:
        return KINDS[self.kind].severity

    @property
    def method(self) -> Method:
        return KINDS[self.kind].method


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoins:
    """A node that was absent is there."""

    at_s: float
    node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLeaves:
    """A node goes, announced ``notice_s`` before; 0 without notice."""

    at_s: float
    node: int
    notice_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobArrives:
    """A job of the scenario, known there by this name, is submitted."""

    at_s: float
    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnds:
    """A job of the scenario is done."""

    at_s: float
    job: str


Event: TypeAlias = FaultStruck | NodeJoins | NodeLeaves | JobArrives | JobEnds

# At one moment: nodes come before others go, so that no count falls short for nothing, and faults meet what is there.
_RANK = {NodeJoins: 0, NodeLeaves: 1, FaultStruck: 2, JobEnds: 3, JobArrives: 4}


def order(event: Event) -> tuple[float, int, int, str]:
    """The key by which events are sorted: total, but for equal events of one kind on one node."""
    if isinstance(event, JobArrives | JobEnds):
        return event.at_s, _RANK[type(event)], 0, event.job
    return event.at_s, _RANK[type(event)], event.node, str(event.kind) if isinstance(event, FaultStruck) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The events of ``duration_s`` on nodes 0 to ``nodes`` - 1, of which those in ``absent`` are not there at first.

    ``source`` says in one sentence where it is from. Raises ``ValueError`` for events out of order, outside of the
    time, of nodes that there are not, and for a node that joins while it is there or leaves while it is not. (A node
    that is under repair is still there in this sense.)
    """

    name: str
    duration_s: float
    nodes: int
    events: tuple[Event, ...]
    source: str
    absent: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        _require(self.nodes >= 1, f"{self.nodes} nodes: there must be at least one")
        _require(
            math.isfinite(self.duration_s) and self.duration_s > 0,
            f"a duration of {self.duration_s} s: it must be a positive number",
        )
        _require(
            all(0 <= node < self.nodes for node in self.absent),
            f"absent are nodes {sorted(self.absent)}: there are nodes 0 to {self.nodes - 1}",
        )
        here = set(range(self.nodes)) - self.absent
        last = (-1.0, 0, 0, "")
        for event in self.events:
            key = order(event)
            if key < last:
                raise ValueError(f"{event} comes after an event of {last[0]:g} s: events must be in their order")
            last = key
            problem = self._problem(event, here)
            if problem:
                raise ValueError(f"{event}: {problem}")

    def _problem(self, event: Event, here: set[int]) -> str:
        """What is wrong with an event, "" if nothing is; keeps ``here``, the nodes that are there."""
        if not 0 <= event.at_s <= self.duration_s:
            return f"it is outside of the history, which is from 0 to {self.duration_s:g} s"
        if isinstance(event, JobArrives | JobEnds):
            return "" if event.job else "it names no job"
        if not 0 <= event.node < self.nodes:
            return f"there are nodes 0 to {self.nodes - 1}"
        if isinstance(event, NodeJoins):
            problem = "the node is there already" if event.node in here else ""
            here.add(event.node)
            return problem
        if isinstance(event, NodeLeaves):
            problem = "" if event.node in here else "the node is not there"
            here.discard(event.node)
            return problem or ("" if event.notice_s >= 0 else "a notice cannot be negative")
        return "" if event.repair_s is None or event.repair_s >= 0 else "a repair cannot be negative"

    @property
    def faults(self) -> tuple[FaultStruck, ...]:
        """The faults among the events."""
        return tuple(event for event in self.events if isinstance(event, FaultStruck))

    @classmethod
    def of(cls, events: Iterable[Event], **others: object) -> History:
        """A history of events in any order."""
        return cls(events=tuple(sorted(events, key=order)), **others)  # type: ignore[arg-type]


def _require(is_met: bool, text: str) -> None:
    if not is_met:
        raise ValueError(text)
