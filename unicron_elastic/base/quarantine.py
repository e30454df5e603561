"""Nodes that are kept out of jobs for a while: who, why and until when, as values and pure functions on them.

Moments are unix seconds, as the entries pass between nodes and outlive a boot; the current one is always passed in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

from unicron_elastic.base.text import one_line

LAUNCHER = "unicron-run"  # who put a node into quarantine, if no operator did
VERSION = 1  # of the document; a later one may mean something else by the same fields
TOO_LATE_UNIX_S = 253_402_128_000.0  # two days before the year 10000, which no calendar here reaches in any time zone
_SECONDS_OF = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantined:
    """One node in quarantine. Raises ValueError for values that none can have; the text names the field."""

    node: str  # as the node calls itself: compared letter by letter
    reason: str  # for people; any text that is not blank
    since: float  # unix seconds
    until: float | None  # unix seconds; None: until it is lifted by hand
    by: str  # LAUNCHER, or the operator's user name
    is_broken: bool = False  # found so, and works for nobody; else it is to leave when its job can do without it

    def __post_init__(self) -> None:
        check_node(self.node)
        for name, text in (("reason", self.reason), ("by", self.by)):
            if not one_line(text):
                raise ValueError(f"{name} is empty")
        for name, moment in (("since", self.since), ("until", self.until)):
            if moment is not None and not 0 <= moment < TOO_LATE_UNIX_S:
                raise ValueError(f"{name} must be unix seconds from 1970 to 9999, not {_short(moment)}")

    def to_json(self) -> dict[str, Any]:
        """The entry as plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> Quarantined:
        """Rebuilds an entry. Raises ValueError naming the field that is wrong or missing; unknown ones are ignored."""
        if not isinstance(data, dict):
            raise ValueError("an object was expected")
        return cls(
            node=_text(data, "node"),
            reason=_text(data, "reason"),
            since=_moment(data, "since"),
            until=None if _field(data, "until") is None else _moment(data, "until"),
            by=_text(data, "by"),
            is_broken=_is_broken(data),
        )


def check_node(node: str) -> None:
    """Raises ValueError if no node can be called so: nothing, or with blanks or unprintable characters in it."""
    if not node:
        raise ValueError("node is empty")
    if any(letter.isspace() or not letter.isprintable() for letter in node):
        raise ValueError(f"node must be a name without blanks and control characters, not {_short(node)}")


def is_active(entry: Quarantined, now: float) -> bool:
    """Whether the node is still kept out at ``now``."""
    return entry.until is None or now < entry.until


def active(entries: Iterable[Quarantined], now: float) -> tuple[Quarantined, ...]:
    """The entries whose time is not over at ``now``."""
    return tuple(entry for entry in entries if is_active(entry, now))


def find(entries: Iterable[Quarantined], node: str, now: float) -> Quarantined | None:
    """The entry that keeps ``node`` out at ``now``; None if there is none."""
    return next((entry for entry in active(entries, now) if entry.node == node), None)


def add(entries: Sequence[Quarantined], new: Quarantined) -> tuple[Quarantined, ...]:
    """The entries with ``new``, one for each node.

    A node that is kept out already stays so since the earlier and until the later moment, for the newest reason; a
    broken one stays broken, whoever else wants it out. A quarantine that was over when ``new`` began does not count.
    """
    old = find(entries, new.node, new.since)
    if old is not None:
        is_broken = old.is_broken or new.is_broken
        new = replace(new, since=min(old.since, new.since), until=_later(old.until, new.until), is_broken=is_broken)
    return (*lift(entries, new.node), new)


def lift(entries: Iterable[Quarantined], node: str) -> tuple[Quarantined, ...]:
    """The entries without ``node``."""
    return tuple(entry for entry in entries if entry.node != node)


def to_document(entries: Iterable[Quarantined]) -> dict[str, Any]:
    """All entries as plain data, as they are kept in a file."""
    return {"version": VERSION, "nodes": [entry.to_json() for entry in entries]}


def from_document(data: object) -> tuple[Quarantined, ...]:
    """The entries of a document. Raises ValueError naming the entry and the field that is wrong or missing."""
    if not isinstance(data, dict):
        raise ValueError("an object was expected")
    _check_version(_field(data, "version"))
    nodes = _field(data, "nodes")
    if not isinstance(nodes, list):
        raise ValueError(f"nodes must be a list, not {_short(nodes)}")
    entries: dict[str, Quarantined] = {}
    for number, each in enumerate(nodes):
        try:
            entry = Quarantined.from_json(each)
        except ValueError as error:
            raise ValueError(f"nodes[{number}]: {error}") from None
        if entry.node in entries:
            raise ValueError(f"nodes[{number}]: node {entry.node} is there twice")
        entries[entry.node] = entry
    return tuple(entries.values())


def sentence(entry: Quarantined, now: float, to_time: Callable[[float], datetime]) -> str:
    """The entry for people, on one line. ``to_time`` makes the reader's time of day out of unix seconds."""
    since, reason = f"{to_time(entry.since):%Y-%m-%d %H:%M}", one_line(entry.reason).rstrip(".")
    if entry.until is not None and not is_active(entry, now):
        until = f"{to_time(entry.until):%Y-%m-%d %H:%M}"
        return f"node {entry.node} was in quarantine from {since} to {until}: {reason}."
    end = "it stays there until it is lifted by hand"
    if entry.until is not None:
        returns = to_time(entry.until)
        is_today = returns.date() == to_time(now).date()
        end = f"it returns at {returns:%H:%M}" if is_today else f"it returns on {returns:%Y-%m-%d at %H:%M}"
    return f"node {entry.node} is in quarantine since {since} ({_span(now - entry.since)}): {reason}; {end}."


def why_out(entry: Quarantined, most_characters: int) -> str:
    """Return why the node is to leave its job, as a clause that stays the same."""
    who = "is in quarantine" if entry.is_broken else f"is drained by {one_line(entry.by)}"
    return f"{who}: {one_line(entry.reason, most_characters).rstrip('.')}"


def parse_duration(text: str) -> float:
    """The seconds that a text such as 30s, 15m, 6h or 2d means. Raises ValueError whose text says what is right."""
    match = re.fullmatch(r"([0-9]{1,6})([smhd])", text.strip())
    if match is None or int(match[1]) == 0:
        raise ValueError("a number and a unit such as 30s, 15m, 6h or 2d")
    return float(int(match[1]) * _SECONDS_OF[match[2]])


def _later(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else max(first, second)


def _span(seconds: float) -> str:
    """A time span in at most two units: "40 s", "5 min", "2 h 3 min", "3 d 4 h"; 0 s if the nodes' clocks disagree."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min"
    size, unit, smaller, smaller_unit = (3600, "h", 60, "min") if whole < 86400 else (86400, "d", 3600, "h")
    count, rest = divmod(whole, size)
    return f"{count} {unit} {rest // smaller} {smaller_unit}" if rest // smaller else f"{count} {unit}"


def _check_version(version: object) -> None:
    """Raises ValueError."""
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ValueError(f"version must be {VERSION}, not {_short(version)}")
    if version > VERSION:
        raise ValueError(f"version {_short(version)} is newer than {VERSION}, the newest that is understood here")


def _field(data: dict[Any, Any], name: str) -> Any:
    try:
        return data[name]
    except KeyError:
        raise ValueError(f"{name} is missing") from None


def _text(data: dict[Any, Any], name: str) -> str:
    value = _field(data, name)
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a text, not {_short(value)}")
    return value


def _is_broken(data: dict[Any, Any]) -> bool:
    value = data.get("is_broken", data.get("by") == LAUNCHER)  # entries of before have no such field
    if not isinstance(value, bool):
        raise ValueError(f"is_broken must be true or false, not {_short(value)}")
    return value


def _moment(data: dict[Any, Any], name: str) -> float:
    value = _field(data, name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{name} must be a number of unix seconds, not {_short(value)}")
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits; what follows says what is wrong with it
        return float("inf")


def _short(value: object) -> str:
    """A wrong value for an error text, however long it is."""
    if isinstance(value, dict | list):
        return f"a {'list' if isinstance(value, list) else 'JSON object'}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**20:
        return "a huge number"
    shown = ascii(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
