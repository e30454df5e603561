"""The world: the replicas that train together, in the order of their ranks. A value that agents agree on.

A world replaces the one before whenever a replica is lost, joins, or its connections have to be made anew. Its number
grows by one each time and is never used again within a run of the job.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from unicron_elastic.base.text import one_line, shorten, shown

_MEMBERS_MAX = 1_000_000
_TEXT_MAX = 4096
_STORE = re.compile(r"\S{1,255}:[0-9]{1,5}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One replica: a process that no other one is ever confused with, also not the one that takes its place."""

    name: str
    node: str
    local_rank: int


class EndOfSteps(NamedTuple):
    """`EndOfSteps` names one end to which all had come: of ``run.steps(total)``, in the world of this number.

    A later call may come to its end in the same world. Later ones are greater; 0, 0: none.
    """

    world: int = 0
    total: int = 0

    def __str__(self) -> str:
        return f"{self.world}/{self.total}"


NO_END = EndOfSteps()


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Who trains together. ``store`` is "host:port" of the TCPStore where the members meet.

    ``reason`` says, as a sentence, why this world came; "": it is the first. ``restarts_used`` is the job's count.
    ``anew`` is the number of the newest world, this one or an earlier one, in which all had to connect anew.
    ``over``: members that made their last steps in the world of this number, or an earlier one, have begun to end, and
    nobody joins any more; 0: none has. ``parted``: the latest end of their steps to which all had come, as some have
    left it. ``lost_in``: the number of the latest world of which a member was lost, which may have had something left
    to do; 0: of none.
    """

    number: int
    members: tuple[Member, ...]
    store: str
    reason: str = ""
    restarts_used: int = 0
    anew: int = 1
    over: int = 0
    parted: EndOfSteps = NO_END
    lost_in: int = 0

    @property
    def size(self) -> int:
        """How many replicas there are."""
        return len(self.members)

    def rank_of(self, name: str) -> int | None:
        """The rank of a member; None if it is not one."""
        return next((rank for rank, member in enumerate(self.members) if member.name == name), None)

    def breaks(self, before: World) -> bool:
        """Return whether what goes on in the world ``before`` ends with this one, and not only when its members like.

        It goes on if all of them are here, connected as they were: then others have joined, or nothing has changed.
        """
        names = {member.name for member in self.members}
        return self.anew > before.number or any(member.name not in names for member in before.members)

    def has_parted(self, end: EndOfSteps) -> bool:
        """Return whether all had come to that end, or to one of a later call: in that world, or a later one."""
        return self.parted.total >= end.total and self.parted.world >= end.world > 0

    def after(
        self,
        *,
        store: str,
        reason: str,
        lost: Collection[str] = (),
        joined: Iterable[Member] = (),
        restarts_used: int = 0,
        anew: bool = False,
        over: int = 0,
        parted: EndOfSteps = NO_END,
        lost_in: int = 0,
    ) -> World:
        """The next world: without the ``lost`` members, by name, and with those who ``joined``.

        ``anew``: all connect anew. Ranks follow nodes and local ranks, so that a replica which takes the place of
        another gets its rank.
        """
        stay = [member for member in self.members if member.name not in lost]
        order = {node: number for number, node in reversed(list(enumerate(member.node for member in self.members)))}
        members = {member.name: member for member in (*stay, *joined)}
        ranked = sorted(members.values(), key=lambda m: (order.get(m.node, len(order)), m.node, m.local_rank, m.name))
        return World(
            number=self.number + 1,
            members=tuple(ranked),
            store=store,
            reason=shorten(reason, _TEXT_MAX),  # many nodes may be lost at once, and each has its own
            restarts_used=max(self.restarts_used, restarts_used),
            anew=self.number + 1 if anew else self.anew,
            over=max(self.over, over),
            parted=max(self.parted, parted),
            lost_in=max(self.lost_in, lost_in),
        )

    def to_message(self) -> dict[str, Any]:
        """Return the world as plain data."""
        members = [[member.name, member.node, member.local_rank] for member in self.members]
        return {
            "number": self.number,
            "members": members,
            "store": self.store,
            "reason": self.reason,
            "restarts_used": self.restarts_used,
            "anew": self.anew,
            "over": self.over,
            "parted": self.parted.world,
            "parted_total": self.parted.total,
            "lost_in": self.lost_in,
        }

    def to_json(self) -> str:
        """Return the world as a text that ``parse`` takes."""
        return json.dumps(self.to_message(), separators=(",", ":"))

    @classmethod
    def from_message(cls, data: Any) -> World:
        """What ``to_message`` made. Raises ValueError naming what is wrong."""
        if not isinstance(data, dict):
            raise ValueError("a world must be an object")
        number, store, reason = data.get("number"), data.get("store"), data.get("reason", "")
        number = _count(number, "number", least=1)
        restarts_used = _count(data.get("restarts_used", 0), "count of restarts", least=0)
        if not isinstance(store, str) or not _STORE.fullmatch(store):
            raise ValueError(f"a world's store must be host:port, got {shown(store)}")
        if not isinstance(reason, str) or len(reason) > _TEXT_MAX:
            raise ValueError("a world's reason must be a sentence")
        return cls(
            number=number,
            members=_members(data.get("members")),
            store=store,
            reason=one_line(reason, _TEXT_MAX),
            restarts_used=restarts_used,
            anew=_count(data.get("anew", 1), "last new beginning", least=1),
            over=_count(data.get("over", 0), "end", least=0),
            parted=EndOfSteps(
                _count(data.get("parted", 0), "last steps", least=0),
                _count(data.get("parted_total", 0), "total of last steps", least=0),
            ),
            lost_in=_count(data.get("lost_in", 0), "latest loss", least=0),
        )

    @classmethod
    def parse(cls, text: str | bytes) -> World:
        """What ``to_json`` made. Raises ValueError naming what is wrong."""
        try:
            return cls.from_message(json.loads(text))
        except RecursionError:
            raise ValueError("a world must be an object") from None


def _count(data: Any, what: str, *, least: int) -> int:
    if not isinstance(data, int) or isinstance(data, bool) or data < least:
        raise ValueError(f"a world's {what} must be {least} or more, got {shown(data)}")
    return data


def _members(data: Any) -> tuple[Member, ...]:
    if not isinstance(data, list) or not 0 < len(data) <= _MEMBERS_MAX:
        raise ValueError("a world must have members")
    members = tuple(map(_member, data))
    if len({member.name for member in members}) < len(members):
        raise ValueError("a world must not have a member twice")
    return members


def _member(data: Any) -> Member:
    match data:
        case [str(name), str(node), int(local_rank)] if 0 < len(name) <= _TEXT_MAX and local_rank >= 0:
            if name.isprintable() and node.isprintable() and len(node) <= _TEXT_MAX:  # both are said to people
                return Member(name=name, node=node, local_rank=local_rank)
    raise ValueError(f"a member must be [name, node, local rank], got {shown(data)}")
