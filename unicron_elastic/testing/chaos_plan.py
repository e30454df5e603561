"""The plan of what is to break, where and when, as values. Pure; ``chaos_parse`` reads it from text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from enum import Enum
from math import inf
from random import Random
from typing import Any
from urllib.parse import quote, unquote


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


# A plan in plain words, for ``unicron chaos check`` and for what a struck worker says. Pure.


NEEDS_TEST_LIBRARY = "needs the test library that stands in for NVML"

_MOMENTS = {
    ChaosPhase.FORWARD: "as the model's forward call begins",
    ChaosPhase.BACKWARD: "as the backward pass begins",
    ChaosPhase.BEFORE_REDUCE: "before the reduction of gradients begins",
    ChaosPhase.DURING_REDUCE: "while gradients are being reduced",
    ChaosPhase.AFTER_REDUCE: "when the reduction of gradients is done",
    ChaosPhase.OPTIMIZER: "before the optimizer changes the weights",
}
_TIMES = {
    ChaosPhase.FORWARD: "forward call",
    ChaosPhase.BACKWARD: "backward pass",
    ChaosPhase.BEFORE_REDUCE: "reduction",
    ChaosPhase.DURING_REDUCE: "reduction",
    ChaosPhase.AFTER_REDUCE: "reduction",
    ChaosPhase.OPTIMIZER: "optimizer",
}


def explain(plan: ChaosPlan) -> list[str]:
    """One sentence for each part of the plan, in its order."""
    return [*map(_explain_fault, plan.faults), *map(_explain_random, plan.random)]


def deed(fault: ChaosFault) -> str:
    """What the worker does, as the rest of a sentence that begins with it."""
    for_how_long = "for ever" if fault.seconds == inf else f"for {fault.seconds:g} s"
    limit = "without a limit" if fault.limit_mb == inf else f"up to {fault.limit_mb:g} MB"
    added = "burning CPU" if fault.how is How.CPU else "sleeping"
    lasting = "from then on" if fault.steps is None else f"for {_count(fault.steps, 'step')}"
    return {
        ChaosKind.KILL: "kills itself (SIGKILL)",
        ChaosKind.SEGV: "reads from address 0 (SIGSEGV)",
        ChaosKind.ABORT: "aborts (SIGABRT)",
        ChaosKind.EXIT: f"exits with code {fault.code}",
        ChaosKind.EXCEPTION: f"raises RuntimeError({fault.text!r})",
        ChaosKind.HANG: "stops as a whole (SIGSTOP)",
        ChaosKind.HANG_GIL: f"sleeps {for_how_long} holding Python's lock, so that none of its threads can run",
        ChaosKind.SLEEP: f"sleeps {for_how_long} in its main thread",
        ChaosKind.SKIP: "leaves out its next reduction",
        ChaosKind.SLOW: f"takes {fault.factor:g} times as long for each step, {added}, {lasting}",
        ChaosKind.LEAK: f"keeps {fault.mb_per_step:g} MB more of host memory after each step, {limit}",
        ChaosKind.DISK: f"fills {fault.folder} with a file that goes when the worker goes, {limit}",
        ChaosKind.XID: f"sees XID {fault.xid} from its GPU ({NEEDS_TEST_LIBRARY})",
        ChaosKind.ECC: f"sees an uncorrectable memory error from its GPU ({NEEDS_TEST_LIBRARY})",
    }[fault.kind]


def _explain_fault(fault: ChaosFault) -> str:
    who = "Every rank" if fault.rank is None else f"Rank {fault.rank}"
    return f"{who} {deed(fault)} {_when(fault)}, {_generation(fault.restart)}."


def _when(fault: ChaosFault) -> str:
    if fault.after is not None:
        return f"{fault.after:g} s after it started"
    if fault.kind in (ChaosKind.SLOW, ChaosKind.LEAK):
        return f"(beginning with step {fault.step})"
    if fault.kind not in PHASED:
        return f"in step {fault.step}"
    which = "" if fault.nth == 1 else f" ({_TIMES[fault.phase]} number {fault.nth} of that step)"
    return f"in step {fault.step}, {_MOMENTS[fault.phase]}{which}"


def _generation(restart: int | None) -> str:
    if restart is None:
        return "after each restart anew"
    return "in the first generation only" if restart == 0 else f"only after restart {restart}"


def _explain_random(random: RandomFaults) -> str:
    kinds = " or ".join(kind.value for kind in dict.fromkeys(random.kinds))
    generation = "" if random.restart is None else f", {_generation(random.restart)}"
    return (
        f"A random rank does {kinds} at random moments, every {random.mtbf:g} s on average "
        f"(seed {random.seed}){generation}."
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


# Reads a plan from one line of text, the same for all workers. Pure.
#
# kill:rank=1,step=50; slow:rank=2,step=100,factor=3,steps=50; random:mtbf=30,seed=7,kinds=kill|hang
#
# Parts are separated by semicolons, settings by commas; %2C, %3B and %25 stand for ``,``, ``;`` and ``%`` in a value.


def parse(text: str) -> ChaosPlan:
    """The plan in ``text``. Raises ValueError, whose one sentence names what is wrong and what would be right."""
    parts = [part.strip() for part in text.split(";") if part.strip()]
    if not parts:
        raise ValueError("the plan is empty; kill:rank=1,step=50 would be one")
    parsed = [_parse_part(part) for part in parts]
    return ChaosPlan(
        tuple(each for each in parsed if isinstance(each, ChaosFault)),
        tuple(each for each in parsed if isinstance(each, RandomFaults)),
    )


def _parse_part(part: str) -> ChaosFault | RandomFaults:
    name, colon, rest = part.partition(":")
    name = name.strip()
    if not colon and "=" in name:  # "mtbf=30,seed=7" can mean only one thing
        name, rest = "random", part
    try:
        if name == "random":
            return _parse_random(_split(rest))
        if name not in _KINDS:
            raise ValueError(f"{name!r} is no fault; there are {', '.join(_KINDS)} and random")
        return _parse_fault(_KINDS[name], _split(rest))
    except ValueError as error:
        raise ValueError(f"in {part!r}: {error}") from None


def _split(text: str) -> dict[str, str]:
    """{name: text} of the settings of one part."""
    found: dict[str, str] = {}
    for pair in filter(None, (pair.strip() for pair in text.split(","))):
        name, equals, value = (piece.strip() for piece in pair.partition("="))
        if not equals:
            raise ValueError(f"{pair!r} has no value; settings are written NAME=VALUE and separated by commas")
        if name in found:
            raise ValueError(f"{name} is given twice")
        found[name] = unquote(value)
    return found


def _parse_fault(kind: ChaosKind, given: dict[str, str]) -> ChaosFault:
    possible = {name: setting for name, setting in _SETTINGS.items() if kind in setting.kinds}
    values = _values(kind.value, given, possible)
    if "rank" not in values:
        raise ValueError("it needs rank=NUMBER, or rank=all")
    if kind is ChaosKind.DISK and "folder" not in values:
        raise ValueError("it needs folder=FOLDER, the folder to fill")
    places = [name for name in ("step", "phase", "nth") if name in values]
    if places and "after" in values:
        raise ValueError(f"after and {places[0]} exclude each other; a fault has a time, or a place in a step")
    return ChaosFault(kind=kind, **values)


def _parse_random(given: dict[str, str]) -> RandomFaults:
    values = _values("random", given, _RANDOM_SETTINGS)
    if "mtbf" not in values:
        raise ValueError("it needs mtbf=SECONDS, the mean time between two faults of the job")
    return RandomFaults(**values)


@dataclass(frozen=True, slots=True)
class _Setting:
    """How the text of one setting is read. ``parse`` raises ValueError whose text says what would be right."""

    parse: Callable[[str], Any]
    kinds: frozenset[ChaosKind] = frozenset(ChaosKind)


def _values(what: str, given: dict[str, str], possible: dict[str, _Setting]) -> dict[str, Any]:
    values = {}
    for name, text in given.items():
        if name not in possible:
            raise ValueError(f"{what} has no setting {name!r}; it has {', '.join(possible)}")
        try:
            values[name] = possible[name].parse(text)
        except ValueError as error:
            raise ValueError(f"{name}={text!r} is not possible; it takes {error}") from None
    return values


def _whole(least: int, most: int | None = None) -> Callable[[str], int]:
    what = f"a whole number from {least} " + ("on" if most is None else f"to {most}")

    def parse_whole(text: str) -> int:
        # int() alone would also take signs, underscores, other scripts' digits and texts of any length.
        is_number = text.isascii() and text.isdecimal() and len(text) <= 18
        if not is_number or not least <= int(text) <= (inf if most is None else most):
            raise ValueError(what)
        return int(text)

    return parse_whole


def _number(above: float, what: str, *, or_inf: bool = False) -> Callable[[str], float]:
    def parse_number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError(what) from None
        if not above < value or (value == inf and not or_inf):  # "not <": so is "nan"
            raise ValueError(what)
        return value

    return parse_number


def _or_word(word: str, parse_number: Callable[[str], int]) -> Callable[[str], int | None]:
    def parse_or_word(text: str) -> int | None:
        try:
            return None if text == word else parse_number(text)
        except ValueError as error:
            raise ValueError(f"{error}, or {word}") from None

    return parse_or_word


def _member(enum: type[Enum]) -> Callable[[str], Any]:
    def parse_member(text: str) -> Enum:
        try:
            return enum(text)
        except ValueError:
            raise ValueError(_one_of(each.value for each in enum)) from None

    return parse_member


def _text(text: str) -> str:
    if not text or "\0" in text:
        raise ValueError("a text without NUL characters")
    return text


def _kinds(text: str) -> tuple[ChaosKind, ...]:
    possible = {name: kind for name, kind in _KINDS.items() if kind not in UNDRAWABLE}
    names = [name.strip() for name in text.split("|")]
    if not set(names) <= set(possible):
        raise ValueError(f"{_one_of(possible)}, several of them separated by |")
    return tuple(possible[name] for name in names)


def _one_of(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}"


_KINDS = {kind.value: kind for kind in ChaosKind}
_TIMED = frozenset(ChaosKind) - UNTIMED
_SECONDS = _number(0, "a number of seconds above 0")
_SECONDS_OR_INF = _number(0, "a number of seconds above 0, or inf", or_inf=True)
_RESTART = _Setting(_or_word("any", _whole(0)))
_SETTINGS = {
    "rank": _Setting(_or_word("all", _whole(0))),
    "step": _Setting(_whole(1)),
    "phase": _Setting(_member(ChaosPhase), PHASED),
    "nth": _Setting(_whole(1), PHASED),
    "after": _Setting(_SECONDS, _TIMED),
    "restart": _RESTART,
    "code": _Setting(_whole(0, 255), frozenset({ChaosKind.EXIT})),
    "text": _Setting(_text, frozenset({ChaosKind.EXCEPTION})),
    "seconds": _Setting(_SECONDS_OR_INF, frozenset({ChaosKind.SLEEP, ChaosKind.HANG_GIL})),
    "factor": _Setting(_number(1, "a number above 1"), frozenset({ChaosKind.SLOW})),
    "how": _Setting(_member(How), frozenset({ChaosKind.SLOW})),
    "steps": _Setting(_or_word("all", _whole(1)), frozenset({ChaosKind.SLOW})),
    "mb_per_step": _Setting(_number(0, "a number of megabytes above 0"), frozenset({ChaosKind.LEAK})),
    "limit_mb": _Setting(
        _number(0, "a number of megabytes above 0, or inf", or_inf=True), frozenset({ChaosKind.LEAK, ChaosKind.DISK})
    ),
    "folder": _Setting(_text, frozenset({ChaosKind.DISK})),
    "xid": _Setting(_whole(1), frozenset({ChaosKind.XID})),
}
_RANDOM_SETTINGS = {
    "mtbf": _Setting(_SECONDS),
    "seed": _Setting(_whole(0)),
    "kinds": _Setting(_kinds),
    "restart": _RESTART,
}
