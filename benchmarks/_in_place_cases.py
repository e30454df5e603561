"""The cases of the matrix of tier 2: which ranks are struck, how, and at which moment of which step. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = [
    "KINDS",
    "MICRO_BATCHES",
    "MODES",
    "OVER",
    "PHASES",
    "RANKS",
    "SPECIAL",
    "STEPS",
    "Case",
    "Strike",
    "cases",
    "quick",
]

STEPS = 60
MICRO_BATCHES = 12
STRUCK_STEP = 20  # long after the job has found its pace, and long before its end
RANKS = (2, 3, 4)
MODES = ("default", "reproducible")
OVER = ("gloo", "late", "late-strict")  # the back end; whose results land late, in the order of a stream or strictly
KINDS = ("kill", "segv", "exception", "exit-3", "hang", "exit-0", "sever")
PHASES = (
    "forward-first",
    "forward-last",
    "backward",
    "between",
    "before-reduce",
    "reduce-first",
    "reduce-middle",
    "reduce-last",
    "reduce-any",
    "after-reduce",
    "optimizer",
    "between-steps",
    "first-step",
    "last-step",
    "end",
)
SPECIAL = (
    "two-at-once",
    "all-but-one",
    "second-in-meeting",
    "second-in-connecting",
    "second-in-recomputing",
    "newcomer-copies",
    "newcomer-has-copied",
    "newcomer-joined",
    "two-nodes",
    "two-nodes-first",
    "two-nodes-sever",
)
MOMENT = {"first-step": "reduce-middle", "last-step": "reduce-middle"}
STEP = {"first-step": 0, "last-step": STEPS - 1, "end": None}
NOT_FROM_THREAD = ("exception", "exit-0", "sever")  # what ends or breaks only the thread that does it
OPEN = ("forward-first", "forward-last", "backward", "between", "before-reduce", "reduce-first", "reduce-middle")
OPEN += ("first-step", "last-step")  # phases in which nobody can have all reduced gradients of the step


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One fault: ``kind`` to the process of place ``slot`` that is its ``life``-th, once, at ``moment``.

    ``slot`` is the rank at the launch, which a replacement inherits; ``life`` 0 is the process of the launch. ``step``
    None: in any. ``world`` is the least number of the world in which it may happen. ``delay_ms``: it is done by a
    thread, so much later.
    """

    kind: str
    slot: int
    moment: str
    step: int | None = None
    life: int = 0
    world: int = 0
    delay_ms: float | None = None

    def to_message(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Strike:
        """What ``to_message`` gave."""
        return cls(**message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One launch. ``strikes`` are in the order in which they are expected; without any it is a reference."""

    kind: str
    phase: str
    ranks: int
    mode: str
    repetition: int
    strikes: tuple[Strike, ...] = ()
    nodes: int = 1
    over: str = "gloo"

    @property
    def lost(self) -> tuple[int, ...]:
        """The places whose first process is lost in the first fault."""
        first = tuple(strike for strike in self.strikes if not strike.world and not strike.life)
        return tuple(strike.slot for strike in first if strike.kind != "sever")

    @property
    def ends(self) -> dict[int, int]:
        """How many processes of each place come to an end, of those that were struck."""
        return {
            slot: sum(strike.slot == slot and strike.kind != "sever" for strike in self.strikes)
            for slot in range(self.ranks)
        }

    @property
    def must_recompute(self) -> bool:
        """Whether the reduction of the step cannot have been complete anywhere, so that work was lost.

        In reproducible mode the rank that is struck in the last step may have given all of its part before.
        """
        if (self.phase, self.mode) == ("last-step", "reproducible"):
            return False
        return self.phase in OPEN or self.phase in ("two-at-once", "all-but-one", "two-nodes", "two-nodes-first")

    @property
    def group(self) -> tuple[str, str, int, str]:
        """What is struck, when, of how many, and in which mode."""
        return self.kind, self.phase, self.ranks, self.mode


def cases(
    kinds: Sequence[str], phases: Sequence[str], ranks: Sequence[int] | None, modes: Sequence[str], repeat: int
) -> Iterator[Case]:
    """Every kind at every phase with these numbers of ranks and in these modes, and the special phases.

    ``ranks`` None: all numbers for kills and the special phases; the other kinds take turns. So do the ranks that are
    struck.
    """
    number = 0
    for repetition in range(repeat):
        for turn, (phase, kind) in enumerate(_pairs(phases, kinds)):
            sizes = ranks or (RANKS if kind == "kill" else (RANKS[(turn + repetition) % len(RANKS)],))
            for size, mode in itertools.product(sizes, modes):
                number += 1
                case = _case((kind, phase, size, mode), repetition, number)
                if case is not None:
                    yield case


def _pairs(phases: Sequence[str], kinds: Sequence[str]) -> Iterator[tuple[str, str]]:
    for phase in phases:
        yield from ((phase, kind) for kind in (("kill",) if phase in SPECIAL else kinds))


def quick() -> Iterator[Case]:
    """A selection: each kind and each phase once or twice, all numbers of ranks and both modes."""
    every = list(cases(KINDS, PHASES, RANKS, MODES, 1))
    for number, phase in enumerate(PHASES):
        wanted = ("kill", phase, RANKS[number % 3], MODES[number % 2])
        yield from (case for case in every if case.group == wanted)
    for number, kind in enumerate(KINDS[1:]):
        wanted = (kind, ("between", "reduce-last", "optimizer")[number % 3], RANKS[(number + 1) % 3], MODES[number % 2])
        yield from (case for case in every if case.group == wanted)
    for number, phase in enumerate(SPECIAL):
        yield from cases(("kill",), (phase,), (4 if "nodes" in phase else 3,), (MODES[number % 2],), 1)


def _case(group: tuple[str, str, int, str], repetition: int, number: int) -> Case | None:
    """None for a combination that does not exist."""
    kind, phase, ranks, mode = group
    slot = number % ranks
    if phase in SPECIAL:
        kind = "sever" if phase == "two-nodes-sever" else kind
        strikes = _special(phase, ranks, slot)
        nodes = 2 if phase.startswith("two-nodes") else 1
        if not strikes or ranks % nodes:
            return None
        return Case(kind=kind, phase=phase, ranks=ranks, mode=mode, repetition=repetition, strikes=strikes, nodes=nodes)
    if (phase == "reduce-any" and kind in NOT_FROM_THREAD) or (phase == "first-step" and kind == "hang"):
        return None  # nothing is known yet of how long a step takes
    delay_ms = (7 * repetition + 3 * ranks + number) % 16 * 0.25 if phase == "reduce-any" else None
    moment = "before-reduce" if phase == "reduce-any" else MOMENT.get(phase, phase)
    strike = Strike(kind=kind, slot=slot, moment=moment, step=STEP.get(phase, STRUCK_STEP), delay_ms=delay_ms)
    return Case(kind=kind, phase=phase, ranks=ranks, mode=mode, repetition=repetition, strikes=(strike,))


def _special(phase: str, ranks: int, slot: int) -> tuple[Strike, ...]:
    """The strikes of a phase with more than one fault, or with more than one node; none if it needs more ranks."""
    other = (slot + 1) % ranks
    first = Strike(kind="kill", slot=slot, moment="between", step=STRUCK_STEP)
    match phase:
        case "two-at-once" if ranks > 2:
            return first, Strike(kind="kill", slot=other, moment="between", step=STRUCK_STEP)
        case "all-but-one":
            left = other
            return tuple(
                Strike(kind="kill", slot=each, moment="reduce-middle", step=STRUCK_STEP)
                for each in range(ranks)
                if each != left
            )
        case "second-in-meeting" | "second-in-connecting" | "second-in-recomputing" if ranks > 2:
            moment = phase.removeprefix("second-in-")
            return first, Strike(kind="kill", slot=other, moment=moment, world=2)
        case "newcomer-copies" | "newcomer-has-copied":
            return first, Strike(kind="kill", slot=slot, moment=phase, life=1)
        case "newcomer-joined":
            return first, Strike(kind="kill", slot=slot, moment="forward-first", life=1, world=2)
        case "two-nodes" | "two-nodes-first":
            place = ranks - 1 if phase == "two-nodes" else 0  # rank 0's node hosts the store of the rendezvous
            return (Strike(kind="kill", slot=place, moment="reduce-middle", step=STRUCK_STEP),)
        case "two-nodes-sever":
            return (Strike(kind="sever", slot=slot, moment="reduce-middle", step=STRUCK_STEP),)
        case _:
            return ()
