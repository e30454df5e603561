"""The plan of what is to break, where and when, as values. Pure; ``chaos_parse`` reads it from text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import Enum
from math import inf
from random import Random
from typing import Any
from urllib.parse import quote


class ChaosKind(Enum):
    """What a worker does to itself."""

    KILL = "kill"
    SEGV = "segv"
    ABORT = "abort"
    EXIT = "exit"
    EXCEPTION = "exception"
    HANG = "hang"
    HANG_GIL = "hang-gil"
    SLEEP = "sleep"
    SKIP = "skip"
    SLOW = "slow"
    LEAK = "leak"
    DISK = "disk"
    XID = "xid"
    ECC = "ecc"


class ChaosPhase(Enum):
    """The moment of a step at which a fault strikes."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BEFORE_REDUCE = "before-reduce"
    DURING_REDUCE = "during-reduce"
    AFTER_REDUCE = "after-reduce"
    OPTIMIZER = "optimizer"


class How(Enum):
    """How a slow worker spends the time that it adds."""

    SLEEP = "sleep"
    CPU = "cpu"


# Any thread can do these to the whole process, so they strike at any moment; the others wait for the main thread.
PROCESS_WIDE = frozenset(
    {
        ChaosKind.KILL,
        ChaosKind.SEGV,
        ChaosKind.ABORT,
        ChaosKind.EXIT,
        ChaosKind.HANG,
        ChaosKind.HANG_GIL,
        ChaosKind.DISK,
    }
)
# Faults of a GPU come through the fake NVML library of the tests, which knows no seconds.
UNTIMED = frozenset({ChaosKind.XID, ChaosKind.ECC})
# These strike once, in a phase; a skip knows its own moment, and the others last for several steps.
PHASED = frozenset(ChaosKind) - {ChaosKind.SKIP, ChaosKind.SLOW, ChaosKind.LEAK} - UNTIMED
UNDRAWABLE = UNTIMED | {ChaosKind.DISK}  # a folder cannot be drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosFault:
    """One fault. Settings that its kind does not take have their defaults."""

    kind: ChaosKind
    rank: int | None  # None: every rank
    step: int = 1  # optimizer steps counted from the worker's start; the fault strikes in this one
    phase: ChaosPhase = ChaosPhase.FORWARD
    nth: int = 1  # which time that the phase comes in that step
    after: float | None = None  # seconds after the worker's start, instead of step and phase
    restart: int | None = 0  # TORCHELASTIC_RESTART_COUNT of the generation it belongs to; None: each
    code: int = 1
    text: str = "injected by unicron chaos"
    seconds: float = inf
    factor: float = 2.0
    how: How = How.SLEEP
    steps: int | None = None  # None: until the end
    mb_per_step: float = 64.0  # megabytes of 2**20 bytes, here and in limit_mb
    limit_mb: float = 1024.0
    folder: str = ""
    xid: int = 79  # "GPU has fallen off the bus"

    def __str__(self) -> str:
        return _format(self.kind.value, self, "rank")

    def is_for(self, rank: int, restart: int) -> bool:
        """Whether worker ``rank`` does this in the generation after ``restart`` restarts."""
        return self.rank in (None, rank) and self.restart in (None, restart)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomFaults:
    """Faults at random moments; every worker draws the same ones."""

    mtbf: float  # mean seconds between two faults of the whole job
    seed: int = 0
    kinds: tuple[ChaosKind, ...] = (ChaosKind.KILL,)
    restart: int | None = None

    def __str__(self) -> str:
        return _format("random", self, "mtbf")

    def draw(self, world_size: int, restart: int) -> Iterator[ChaosFault]:
        """The faults of one generation in the order of their moments, without end.

        A pure function of seed, world size, generation and how many were drawn. As a Poisson process remembers
        nothing, each generation may begin anew: the mean time between faults of the whole job stays as it is.
        """
        at = 0.0
        number = 0
        while self.restart in (None, restart):
            random = Random(f"{self.seed}/{world_size}/{restart}/{number}")
            at += random.expovariate(1.0 / self.mtbf)
            kind = random.choice(self.kinds)
            yield ChaosFault(kind=kind, rank=random.randrange(world_size), after=at, restart=restart)
            number += 1


@dataclass(frozen=True, slots=True)
class ChaosPlan:
    """All that is to break in a job. ``str`` gives a text that parses to the same plan."""

    faults: tuple[ChaosFault, ...] = ()
    random: tuple[RandomFaults, ...] = ()

    def __str__(self) -> str:
        return ";".join(map(str, (*self.faults, *self.random)))

    def faults_of(self, rank: int, restart: int) -> tuple[ChaosFault, ...]:
        """The faults that worker ``rank`` does in this generation, without those at random."""
        return tuple(fault for fault in self.faults if fault.is_for(rank, restart))

    def missing_ranks(self, world_size: int) -> list[int]:
        """Ranks that are named and that a job of this size does not have."""
        return sorted({fault.rank for fault in self.faults if fault.rank is not None and fault.rank >= world_size})


def _format(name: str, part: ChaosFault | RandomFaults, needed: str) -> str:
    """The text of ``part``, without the settings that have their defaults."""
    settings = []
    for each in fields(part):
        value = getattr(part, each.name)
        if each.name != "kind" and (each.name == needed or value != each.default):
            settings.append(f"{each.name}={_value_text(each.name, value)}")
    return f"{name}:{','.join(settings)}"


def _value_text(name: str, value: Any) -> str:
    if value is None:
        return "any" if name == "restart" else "all"
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, tuple):
        return "|".join(kind.value for kind in value)
    if isinstance(value, str):
        return quote(value, safe="/:=|!?'()[]<>@#&*+~$" + (" " if value == value.strip() else ""))
    return repr(value)
