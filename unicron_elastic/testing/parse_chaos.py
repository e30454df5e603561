"""Reads a plan from one line of text, the same for all workers. Pure.

kill:rank=1,step=50; slow:rank=2,step=100,factor=3,steps=50; random:mtbf=30,seed=7,kinds=kill|hang

Parts are separated by semicolons, settings by commas; %2C, %3B and %25 stand for ``,``, ``;`` and ``%`` in a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Any
from urllib.parse import unquote

from unicron_elastic.testing.chaos_plan import (
    PHASED,
    UNDRAWABLE,
    UNTIMED,
    ChaosFault,
    ChaosKind,
    ChaosPhase,
    ChaosPlan,
    How,
    RandomFaults,
)


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
