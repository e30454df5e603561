"""What a worker tells its agent, one class a message, as JSON on the channel between them.

The script may write to that channel as well: ``heard`` takes nothing that a worker of ours cannot have said.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

_KIND = "is"
_PARTS_MAX = 1024  # of a list or a table


class Notice:
    """`Notice` is anything that a worker tells."""

    def message(self) -> dict[str, Any]:
        """Return it as it is sent."""
        return {_KIND: type(self).__name__, **{each.name: getattr(self, each.name) for each in fields(self)}}  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStep(Notice):
    """`FirstStep` says that the first step is made; ``stack_fd`` is where stacks can be read, if anywhere."""

    step: int
    stack_fd: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending(Notice):
    """`Ending` says that the interpreter shuts down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised(Notice):
    """`Raised` tells of an exception; ``is_final`` if it ends the process."""

    exception: dict[str, str | None]
    is_final: bool
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopsPerStep(Notice):
    """`FlopsPerStep` is the script's word on what a step of the whole job computes."""

    flops: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionLimits(Notice):
    """`SectionLimits` are the script's own limits, in seconds; None: none."""

    first_heartbeat_s: float | None
    heartbeat_s: float | None
    out_of_section_s: float | None
    sections_s: dict[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionOverdue(Notice):
    """`SectionOverdue` says that a section is open for longer than its limit."""

    section: str
    open_s: float
    limit_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlWanted(Notice):
    """`ControlWanted` is an action for which the script asks through its RankMonitorClient."""

    action: str
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTaken(Notice):
    """`StateTaken` says that ``bytes_taken`` of state came within ``took_s`` from ``sources``."""

    bytes_taken: int
    took_s: float
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored(Notice):
    """`Restored` says from which step a script goes on that has asked for a state kept before, and what was taken."""

    step: int
    sentence: str
    bytes_taken: int = 0
    took_s: float = 0.0
    sources: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving(Notice):
    """`Saving` answers the agent that asks for a snapshot: whether one will be made when the present step ends."""

    will_save: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered(Notice):
    """`Entered` says that the script trains in steps(), as a member of worlds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready(Notice):
    """`Ready` says that a newcomer has the state of step ``state``."""

    state: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Left(Notice):
    """`Left` says that this rank is no member of any world any more, and connected with nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Broke(Notice):
    """`Broke` says that the connections of this world are broken, for this ``error``."""

    world: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WentOn(Notice):
    """`WentOn` says that a step was made in this world, of micro-batches that were computed before or again."""

    world: int
    reused: int
    recomputed: int
    regrouped_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parted(Notice):
    """`Parted` says that all steps are made; ``world`` is the one in which all parted, if they did so together."""

    world: int | None = None


@dataclass(frozen=True, slots=True)
class Odd(Notice):
    """`Odd` is what no worker of ours says; ``why`` names the field that is wrong."""

    why: str


KINDS: tuple[type[Notice], ...] = (
    *(FirstStep, Ending, Raised, FlopsPerStep, SectionLimits, SectionOverdue, ControlWanted),
    *(StateTaken, Restored, Saving, Entered, Ready, Left, Broke, WentOn, Parted),
)
_BY_NAME: Mapping[str, type[Notice]] = {each.__name__: each for each in KINDS}


def heard(message: Mapping[str, Any]) -> Notice | None:
    """Return what was said; None for what is none of these."""
    name = message.get(_KIND)
    kind = _BY_NAME.get(name) if isinstance(name, str) else None
    try:
        return None if kind is None else _read(kind, message)
    except ValueError as error:
        return Odd(str(error))


def _read(kind: type[Notice], message: Mapping[str, Any]) -> Notice:
    name, values = kind.__name__, {}
    for each in fields(kind):  # type: ignore[arg-type]
        if each.name in message:
            values[each.name] = _checked(str(each.type), message[each.name], f"{name}.{each.name}")
        elif each.default is MISSING and each.default_factory is MISSING:
            raise ValueError(f"{name}.{each.name} is missing")
    return kind(**values)


def _checked(type_: str, value: Any, what: str) -> Any:
    is_right, meaning, made = _TYPES[type_]
    if not is_right(value):
        raise ValueError(f"{what} is not {meaning}")
    return made(value)


def _is_whole(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**63


def _is_number(value: Any) -> bool:
    return _is_whole(value) or (type(value) is float and math.isfinite(value))


def _is_text(value: Any) -> bool:
    return type(value) is str


def _or_none(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or is_right(value)


def _is_table(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: type(value) is dict and len(value) <= _PARTS_MAX and all(map(is_right, value.values()))


def _is_list(value: Any) -> bool:
    return type(value) in (list, tuple) and len(value) <= _PARTS_MAX and all(map(_is_text, value))


def _same(value: Any) -> Any:
    return value


_TYPES: Mapping[str, tuple[Callable[[Any], bool], str, Callable[[Any], Any]]] = {
    "int": (_is_whole, "a whole number", _same),
    "int | None": (_or_none(_is_whole), "a whole number or null", _same),
    "float": (_is_number, "a number", float),
    "float | None": (_or_none(_is_number), "a number or null", _same),
    "str": (_is_text, "a text", _same),
    "bool": (lambda value: type(value) is bool, "true or false", _same),
    "tuple[str, ...]": (_is_list, "a list of texts", tuple),
    "dict[str, str | None]": (_is_table(_or_none(_is_text)), "a table of texts", _same),
    "dict[str, float | None]": (_is_table(_or_none(_is_number)), "a table of numbers", _same),
}
