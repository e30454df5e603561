"""The record of one fault: what, where, how bad, what was done about it and what it cost. A value, without I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

# The moments of an incident in their order; each phase's cost is the time since the moment before it.
PHASES = ("occurred", "noticed", "stopped", "regrouped", "first_step")
_TOO_MUCH = 2**63  # of anything that is counted or timed: larger integers need not fit a float


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One fault and its handling on one node. The ``*_at`` moments are CLOCK_MONOTONIC seconds of that host.

    A moment that has not come is None: no first step means the job ended, or never stepped, after the fault, that
    another fault came before (``superseded_by``), or that the node has left the job (``left``).
    """

    number: int  # 1, 2, ... within a run
    run_id: str
    job: str  # the script or command
    host: str
    time: str  # wall clock, ISO 8601 with offset, for people
    generation: int
    rank: int | None  # of the root cause; None if the fault came from another node
    status: str
    severity: int  # 1 (worst) to 3
    method: str  # how it was noticed: "process supervision", "exception propagation", "online statistics"
    reason: str  # what happened, one sentence
    action: str  # "restart", "fail", "observe" or "" while undecided
    decision: str  # why this action, one sentence
    restarts_used: int
    max_restarts: int
    exit_code: int | None = None
    exception_type: str | None = None
    message: str | None = None
    location: str | None = None
    stack: str | None = None
    step: int | None = None  # optimizer steps the failed worker had done since it started
    consequences: tuple[str, ...] = ()  # what the other ranks reported because of it
    occurred_at: float | None = None
    noticed_at: float | None = None
    stopped_at: float | None = None
    regrouped_at: float | None = None
    first_step_at: float | None = None
    micro_batches_reused: int | None = None  # of the failed step, computed before the fault by members on this node
    micro_batches_recomputed: int | None = None  # ... by the lost ranks, and now again by all nodes' members
    evidence: str | None = None  # the file with what was found out before anything was done
    workers: int | None = None  # of this node, when it was noticed
    state_at: float | None = None  # when the workers of this node that began again had their state
    state_s: float | None = None  # for how long they fetched it; others may have trained on meanwhile
    state_bytes: int | None = None
    state_from: str | None = None
    superseded_by: int | None = None  # the number of the incident that came before the first step after this one
    left: str | None = None  # that the node left the job before the first step after this one, and why

    @property
    def is_closed(self) -> bool:
        """Whether the job has made a step after it, or another incident or the node's departure came before that."""
        return self.first_step_at is not None or self.superseded_by is not None or self.left is not None

    def phase_ms(self, phase: str) -> float | None:
        """Milliseconds from the moment before ``phase`` to it; None if either has not come."""
        position = PHASES.index(phase)
        if position == 0:
            return None
        start, end = (getattr(self, f"{name}_at") for name in PHASES[position - 1 : position + 1])
        return None if start is None or end is None else (end - start) * 1e3

    @property
    def total_ms(self) -> float | None:
        """Milliseconds from the fault to the first step after it; None if there was none."""
        if self.occurred_at is None or self.first_step_at is None:
            return None
        return (self.first_step_at - self.occurred_at) * 1e3

    def to_json(self) -> dict[str, Any]:
        """The record as plain data, with each phase's milliseconds added."""
        data = asdict(self)
        data["consequences"] = list(self.consequences)
        data["phases_ms"] = {phase: self.phase_ms(phase) for phase in PHASES[1:]}
        data["total_ms"] = self.total_ms
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Incident:
        """Rebuilds a record. Raises ValueError naming the field that is missing or of a wrong kind.

        Unknown fields are ignored.
        """
        for field in fields(cls):
            if field.name in data and not _fits(data[field.name], str(field.type)):
                raise ValueError(f"not an incident record: {field.name} must be {field.type}")
        known = {field.name: data[field.name] for field in fields(cls) if field.name in data}
        known["consequences"] = tuple(known.get("consequences", ()))
        try:
            return cls(**known)
        except TypeError as error:
            raise ValueError(f"not an incident record: {error}") from None


def _fits(value: object, annotation: str) -> bool:
    """Whether ``value`` is of the type that ``Incident`` declares for it, so that readers need not doubt it."""
    if annotation == "tuple[str, ...]":
        return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
    kinds = {"int": (int,), "str": (str,), "float": (int, float), "None": (type(None),)}
    allowed = tuple(kind for name in annotation.split(" | ") for kind in kinds[name])
    if isinstance(value, int) and abs(value) >= _TOO_MUCH:
        return False
    return isinstance(value, allowed) and not isinstance(value, bool)
