"""The plan as a value: who has how many nodes, who gives to whom, what it earns, what it costs, and why."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, NoReturn

from unicron_elastic.base.require import require, require_count
from unicron_elastic.base.text import one_line


class Share(NamedTuple):
    """One task's nodes: ``before`` the event, ``lost`` in it, and ``after`` the plan."""

    task: str
    before: int
    lost: int
    after: int

    @property
    def held(self) -> int:
        """What the event left it with."""
        return self.before - self.lost


class Move(NamedTuple):
    """So many nodes go from one task to another; None: from or to the idle ones. Which nodes is decided elsewhere."""

    nodes: int
    source: str | None
    target: str | None


class Wait(NamedTuple):
    """A task that has no nodes, and why, as a sentence."""

    task: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to do about an event.

    ``nodes``: n', how many there are; ``shares``: of every task, in order of names; ``moves`` lead from what tasks hold
    to what they get. ``waf_before_flops`` and ``waf_after_flops``: the sum of F over all tasks, in weighted FLOP/s,
    before the event and after the plan; ``lost_flop``: the sum of the penalties, in weighted FLOP (an amount), of which
    a lost node causes its part whatever the plan is. ``running_s``: D_running(n'). ``reason``: one sentence. Raises
    ``ValueError`` if numbers contradict each other.
    """

    nodes: int
    shares: tuple[Share, ...]
    moves: tuple[Move, ...]
    waits: tuple[Wait, ...]
    waf_before_flops: float
    waf_after_flops: float
    lost_flop: float
    running_s: float
    reason: str

    def __post_init__(self) -> None:
        given = sum(share.after for share in self.shares)
        require(given <= self.nodes, f"the shares are {given} nodes: they must be at most nodes, which is {self.nodes}")
        require(len(self.counts) == len(self.shares), "two shares are of one task: each task must have one")
        balance = {share.task: share.held - share.after for share in self.shares}
        for move in self.moves:
            for task, nodes in ((move.source, -move.nodes), (move.target, move.nodes)):
                if task is not None:
                    require(task in balance, f"a move names {task}: it must name a task that has a share")
                    balance[task] += nodes
        wrong = sorted(task for task, rest in balance.items() if rest)
        require(not wrong, f"the moves do not lead to the share of {wrong[:1]}: they must")
        waiting = [share.task for share in self.shares if not share.after]
        require([wait.task for wait in self.waits] == waiting, f"waits must name the tasks without nodes, {waiting}")

    @property
    def counts(self) -> dict[str, int]:
        """The nodes of each task after the plan, by name."""
        return {share.task: share.after for share in self.shares}

    def to_json(self) -> str:
        """The plan as one line of JSON."""
        found: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        for name in ("shares", "moves", "waits"):
            found[name] = [row._asdict() for row in found[name]]
        return json.dumps(found, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """Rebuilds a plan. Raises ``ValueError`` naming the field that is missing, wrong or unknown."""
        try:
            found = json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not a plan: it must be JSON, and is not: {error}") from None
        found = _object(found, "the plan", tuple(each.name for each in fields(cls)))
        require_count("nodes", found["nodes"])
        require(isinstance(found["reason"], str), f"reason is {found['reason']!r}: it must be a sentence")
        numbers = ("waf_before_flops", "waf_after_flops", "lost_flop", "running_s")
        return cls(
            nodes=found["nodes"],
            shares=tuple(_share(row) for row in _list(found, "shares")),
            moves=tuple(_move(row) for row in _list(found, "moves")),
            waits=tuple(_wait(row) for row in _list(found, "waits")),
            reason=found["reason"],
            **{name: _number(found[name], name) for name in numbers},
        )


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _object(value: object, what: str, names: tuple[str, ...]) -> Mapping[str, Any]:
    """``value``, if it is an object with exactly these fields."""
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {_short(value)}: it must be an object")
    missing = [name for name in names if name not in value]
    require(not missing, f"{what} has no {', '.join(missing)}")
    unknown = sorted(set(value) - set(names))
    require(not unknown, f"{what} has {one_line(', '.join(unknown))}: it must have {', '.join(names)} only")
    return value


def _list(found: Mapping[str, Any], name: str) -> list[object]:
    value = found[name]
    if not isinstance(value, list):
        raise ValueError(f"{name} is {_short(value)}: it must be a list")
    return value


def _share(row: object) -> Share:
    found = _object(row, "a share", Share._fields)
    _require_name(found["task"], "a share's task")
    for name in ("before", "lost", "after"):
        require_count(f"{name} of {found['task']}", found[name])
    require(found["lost"] <= found["before"], f"lost of {found['task']} is {found['lost']}: it must be at most before")
    return Share(**found)


def _move(row: object) -> Move:
    found = _object(row, "a move", Move._fields)
    require_count("nodes of a move", found["nodes"], 1)
    for name in ("source", "target"):
        if found[name] is not None:
            _require_name(found[name], f"a move's {name}")
    require(found["source"] != found["target"], "a move leads nowhere: source and target must differ")
    return Move(**found)


def _wait(row: object) -> Wait:
    found = _object(row, "a wait", Wait._fields)
    _require_name(found["task"], "a wait's task")
    require(isinstance(found["reason"], str), f"the reason of a wait is {_short(found['reason'])}: it must be a text")
    return Wait(**found)


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is {_short(value)}: it must be a number")
    require(0 <= value <= sys.float_info.max, f"{name} is {_short(value)}: it must be a number, 0 or more")
    return float(value)


def _require_name(value: object, what: str) -> None:
    require(isinstance(value, str) and value.strip() != "", f"{what} is {_short(value)}: it must be a name")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
