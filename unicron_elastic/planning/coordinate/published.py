"""The plan as it stands in the store: who works where, what it was made from, and why.

It names every node, so that who reads it need not choose again; and what it was made from, so that anybody can tell
whether it has been overtaken, and by what.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, fields
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from unicron_elastic.base.require import require, require_count
from unicron_elastic.planning.allocate.plan import Plan


class Seat(NamedTuple):
    """A node that the plan knew, and the job that it is for, "" for none. ``is_draining``: as it was then."""

    node_id: str
    host: str
    job: str
    is_draining: bool = False


_NODE_ID, _JOB = itemgetter(0), itemgetter(2)


class Loss(NamedTuple):
    """A job that was to have ``nodes_before`` nodes lost the one on ``host``."""

    host: str
    job: str
    nodes_before: int
    at_unix_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A plan with its seats.

    ``revision``: of its key in the store; 0 until it is there. ``jobs``: the jobs that it was made for, with the
    revision of each. ``made_unix_s``: when it was made. ``moved_unix_s``: when a job last gave or got nodes without
    need. ``losses``: of late. ``look_again_unix_s``: when another look may find a better plan though nothing happens;
    None: never. ``job_of``: the job of each node by its id, "" for none, in the order of seats. Raises ``ValueError``
    if a node has two seats, or if the seats are not the counts of the plan.
    """

    plan: Plan
    seats: tuple[Seat, ...]
    jobs: tuple[tuple[str, int], ...]
    revision: int = 0
    made_unix_s: float = 0.0
    moved_unix_s: tuple[tuple[str, float], ...] = ()
    losses: tuple[Loss, ...] = ()
    look_again_unix_s: float | None = None
    # Asked for at every look of the coordinator, and a walk over all seats.
    node_ids: tuple[str, ...] = field(init=False, repr=False, compare=False)
    draining_ids: frozenset[str] = field(init=False, repr=False, compare=False)
    job_of: Mapping[str, str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_count("revision of the plan", self.revision)
        object.__setattr__(self, "node_ids", tuple(map(_NODE_ID, self.seats)))
        object.__setattr__(self, "job_of", dict(zip(self.node_ids, map(_JOB, self.seats), strict=True)))
        draining = frozenset([seat.node_id for seat in self.seats if seat.is_draining])
        object.__setattr__(self, "draining_ids", draining)
        require(len(self.job_of) == len(self.seats), "a node has two seats: it must have one")
        seated = Counter(self.job_of.values())
        seated.pop("", 0)
        for job, nodes in self.plan.counts.items():
            require(seated.pop(job, 0) == nodes, f"the seats of {job} are not the {nodes} nodes that the plan gives it")
        require(not seated, f"seats are for {', '.join(seated)}: they must be for jobs of the plan")

    def __hash__(self) -> int:
        # Of what tells nearly all plans apart: there may be thousands of seats.
        return hash((self.plan.reason, self.revision, len(self.seats)))

    @property
    def reason(self) -> str:
        """Why it is as it is, as one sentence."""
        return self.plan.reason

    def to_json(self) -> str:
        """The plan as one line of JSON, without the revision: the store knows that."""
        found = {name: getattr(self, name) for name in _stored(self)}
        found |= {"plan": json.loads(self.plan.to_json()), "seats": list(_benches(self.seats))}
        return json.dumps(found, allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes, revision: int) -> Published:
        """Rebuilds a plan that is in the store at ``revision``. Raises ``ValueError`` for what is none."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not a published plan: it must be JSON, and is not: {error}") from None
        names = set(_stored(cls))
        if not isinstance(found, dict) or set(found) != names:
            raise ValueError(f"not a published plan: it must be an object with {', '.join(sorted(names))} only")
        try:
            return cls(revision=revision, **_values(found))
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not a published plan: a field has the wrong kind: {error!r}") from None

    def without_times(self) -> Published:
        """What two proposals that come to the same have in common."""
        return self.renewed(made_unix_s=0.0, moved_unix_s=(), losses=(), look_again_unix_s=None)

    def renewed(self, **values: Any) -> Published:
        """The same seats with other ``values``, of which a plan must have the same counts: seats need no check then."""
        found = copy(self)
        for name, value in values.items():
            object.__setattr__(found, name, value)
        return found

    def at_revision(self, revision: int) -> Published:
        """The same plan as it is in the store. Raises ``ValueError`` if that is no revision."""
        require_count("revision of the plan", revision)
        return self.renewed(revision=revision)


def _stored(published: Published | type[Published]) -> list[str]:
    return [each.name for each in fields(published) if each.init and each.name != "revision"]


def _values(found: Mapping[str, Any]) -> dict[str, Any]:
    look = found["look_again_unix_s"]
    return {
        "plan": Plan.from_json(json.dumps(found["plan"])),
        "seats": tuple(seat for bench in found["seats"] for seat in _seats(*bench)),
        "jobs": tuple((_text(name), _whole(revision)) for name, revision in found["jobs"]),
        "made_unix_s": _number(found["made_unix_s"]),
        "moved_unix_s": tuple((_text(name), _number(moment)) for name, moment in found["moved_unix_s"]),
        "losses": tuple(
            Loss(_text(host), _text(job), _whole(nodes), _number(moment))
            for host, job, nodes, moment in found["losses"]
        ),
        "look_again_unix_s": None if look is None else _number(look),
    }


def _benches(seats: tuple[Seat, ...]) -> Iterator[list[object]]:
    """Seats side by side of one job, each by its node's id alone where that begins with the host, as agents' do.

    A plan has to fit into one transaction of the store, however many nodes there are.
    """
    for (job, is_draining), bench in groupby(seats, key=lambda seat: (seat.job, seat.is_draining)):
        nodes = [each.node_id if _host_in(each.node_id) == each.host else [each.node_id, each.host] for each in bench]
        yield [job, is_draining, nodes]


def _seats(job: object, is_draining: object, nodes: Iterable[object]) -> Iterator[Seat]:
    if not isinstance(is_draining, bool):
        raise TypeError(is_draining)
    for node in nodes:
        node_id, host = (node, _host_in(node)) if isinstance(node, str) else _pair(node)
        yield Seat(_text(node_id), _text(host), _text(job), is_draining)


def _host_in(node_id: str) -> str:
    return node_id.rpartition("/")[0]


def _pair(value: object) -> tuple[object, object]:
    if not isinstance(value, list) or len(value) != 2:
        raise TypeError(value)
    return value[0], value[1]


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(value)
    return value


def _number(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(value)
    return float(value)
