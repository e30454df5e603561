"""One case: what is trained, in which loop, by how many ranks, and what goes wrong. A case is its own description."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

__all__ = ["Case", "Fault"]


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong once.

    ``kind``: kill or raise, which strike the process at ``place`` (node and local rank, as "a0") when it comes to
    ``phase`` in step ``step`` or later, and ``nth`` counts collectives or micro-batches; or agent-stop, node-kill,
    node-return or node-join, which are done to node ``place`` from outside, ``delay_s`` after somebody has begun
    step ``step``.
    """

    kind: str
    place: str
    step: int
    phase: str = ""
    nth: int = 1
    delay_s: float = 0.0

    @property
    def is_inside(self) -> bool:
        """Whether a process strikes itself."""
        return self.kind in ("kill", "raise")


@dataclass(frozen=True)
class Case:
    """``blocks`` are layers of the model, ``hows`` ways in which it is made or used (see ``features``).

    ``change_at`` is the step before which parameters are frozen or unfrozen. ``nodes`` 0: one host without etcd.
    ``gate``: for what the last step waits: until all who were lost have been replaced by processes that have "loaded"
    the others' state, or until the script has "begun" in a process that comes late, and for ``gate_s`` more; "": for
    nothing. ``evaluate``: where in the body of each step the script evaluates, at its "top" or its "end", and what
    ``follows``: "rate", "plateau" or "swap" (averaged weights are in place meanwhile). ``perturb``: weights are moved
    for each micro-batch and put back. ``churn``: what is done to a BatchNorm before step ``change_at``. ``shadow``:
    averaged weights made from each rank's own seed. ``mean_type``: of a value that the script reduces as well.
    ``same_seed``: all ranks make the same weights. ``pace_s``: how long a micro-batch takes, ``between_s`` the time
    between two steps, ``after_s`` that after the last.
    """

    blocks: tuple[str, ...] = ()
    hows: tuple[str, ...] = ()
    optimizer: str = "sgd"
    scheduler: str = ""
    scaler: str = ""
    ema: bool = False
    shadow: bool = False
    same_seed: bool = False
    odd_state: bool = False
    evaluate: str = ""
    follows: str = ""
    perturb: bool = False
    churn: str = ""
    mean_type: str = ""
    reproducible: bool = True
    loop: str = "plain"
    steps: int = 8
    micro_batches: int = 4
    change_at: int = 4
    snapshot_every: int = 0
    ranks: int = 2
    nodes: int = 0
    least_nodes: int = 1
    faults: tuple[Fault, ...] = ()
    gate: str = "loaded"
    gate_s: float = 0.0
    pace_s: float = 0.0
    between_s: float = 0.0
    after_s: float = 0.0
    join_patience_s: float = 5.0
    load_s: float = 0.0  # how long a replacement takes to load the state of others

    def to_json(self) -> str:
        """One line."""
        kept = {name: value for name, value in asdict(self).items() if value != getattr(_DEFAULT, name)}
        return json.dumps(kept)

    @classmethod
    def from_json(cls, text: str) -> Case:
        """Of ``to_json``. Raises ValueError or TypeError."""
        found: dict[str, Any] = json.loads(text)
        return cls.of(found)

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Case:
        """Of plain values."""
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
        values["faults"] = tuple(Fault(**each) for each in values.get("faults", ()))
        unknown = set(values) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"a case has no {', '.join(sorted(unknown))}")
        return cls(**values)

    @property
    def places(self) -> tuple[str, ...]:
        """Of the processes with which it begins."""
        nodes = "abcd"[: max(1, self.nodes)]
        return tuple(f"{node}{rank}" for node in nodes for rank in range(self.ranks // len(nodes)))

    @property
    def ranks_per_node(self) -> int:
        """On each node."""
        return self.ranks // max(1, self.nodes)


_DEFAULT = Case()
