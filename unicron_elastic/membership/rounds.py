"""Who trains together, and under which ranks: pure decisions on what the store says of one job.

A job's nodes meet in rounds, as torch's rendezvous calls them. Each agent has a *member* in the store, which goes with
its lease. Those who have a place in the present round train, all others wait. Whoever waits may write the next round,
by compare-and-set: all would write the same. That makes one write of each node per round, and one of the round.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

# What is waited for if --rdzv-conf says nothing else of it; seconds.
WAITS_S: Mapping[str, float] = {
    "join_timeout": 600.0,
    "last_call_timeout": 30.0,
    "connect_timeout": 30.0,
    "lease_ttl": 3.0,
    "blind_patience": 600.0,
}
BEGINS_IN_S = 30.0  # a round, once it may
BLIND_MARGIN_S = 10.0  # until a blind node has noticed that it is, and its workers have ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the command line asks for; seconds."""

    min_nodes: int
    max_nodes: int
    blind_patience_s: float = WAITS_S["blind_patience"]  # so long a node trains that cannot see the store
    last_call_s: float = WAITS_S["last_call_timeout"]  # for more than the fewest nodes to come to the first round
    target_nodes: int | None = None  # train at most; the others, up to the most, are spares
    expected_nodes: int | None = None  # come to the first round, if that is known; else as many as train at most

    @property
    def most(self) -> int:
        """How many nodes train at most."""
        return self.max_nodes if self.target_nodes is None else self.target_nodes

    def __post_init__(self) -> None:
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise ValueError(f"nodes must be at least 1, and MIN at most MAX, not {self.min_nodes}:{self.max_nodes}")
        if not self.min_nodes <= self.most <= self.max_nodes:
            raise ValueError(f"target_nodes must be {self.min_nodes} to {self.max_nodes}, not {self.target_nodes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMember:
    """An agent that is alive, by its lease. It has no part in rounds before the one that it ``waits_for``."""

    node_id: str  # another one each time that an agent starts
    host: str
    label: str = ""  # of the place in the network, such as a rack: neighbours get neighbouring ranks
    joined: int = 0  # revision of the store at which it came
    waits_for: int = 1
    process: str = ""  # which it is, on its host


@dataclass(frozen=True, slots=True)
class Place:
    """One rank of a round. ``process``: which the agent is, on its host; "" if that was not told."""

    node_id: str
    host: str
    process: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Nodes that train together, in the order of their ranks. The first has number 1."""

    number: int
    places: tuple[Place, ...]

    def rank_of(self, node_id: str) -> int | None:
        """The rank of a node among nodes; None if it has none."""
        return next((rank for rank, place in enumerate(self.places) if place.node_id == node_id), None)


@dataclass(frozen=True, kw_only=True)  # without slots: who waits, and who trains, is found once, and asked for often
class JobView:
    """What the store says of a job at one revision. ``closed`` is why it is over, as a sentence; "": it is not."""

    members: tuple[JobMember, ...] = ()
    round: Round | None = None
    closed: str = ""
    round_revision: int = 0  # of the store, at which the round was written
    ended: frozenset[str] = frozenset()  # agents of which it is certain that they, and their workers, are no more
    orderly: frozenset[str] = frozenset()  # agents that have left in good order, by their own word

    @property
    def is_stopped(self) -> bool:
        """Whether the job trained until all of its nodes were told to go; it goes on if others come."""
        if self.round is None or self.closed or self.members:
            return False
        return {place.node_id for place in self.round.places} <= self.orderly

    @cached_property
    def waiting(self) -> tuple[JobMember, ...]:
        """Those who wait for the next round, in the order in which they came.

        Not those who were blind while a round began without them, and have not noticed yet: they may still train.
        """
        number = 0 if self.round is None else self.round.number
        waiting = (member for member in self.members if member.waits_for > number)
        return tuple(sorted(waiting, key=lambda member: (member.joined, member.node_id)))

    @cached_property
    def training(self) -> tuple[JobMember, ...]:
        """Those who train in the present round."""
        if self.round is None:
            return ()
        places, number = {place.node_id for place in self.round.places}, self.round.number
        return tuple(each for each in self.members if each.node_id in places and each.waits_for <= number)

    @cached_property
    def lost(self) -> tuple[Place, ...]:
        """Places of the present round whose agents are gone, or have given it up."""
        return self._without(self.training)

    @cached_property
    def gone(self) -> tuple[Place, ...]:
        """Places of the present round whose agents are gone."""
        return self._without(self.members)

    def _without(self, there: tuple[JobMember, ...]) -> tuple[Place, ...]:
        known = {member.node_id for member in there}
        return () if self.round is None else tuple(each for each in self.round.places if each.node_id not in known)


@dataclass(frozen=True, slots=True)
class Formed:
    """The next round; the store decides whether it comes to be."""

    round: Round
    reason: str


@dataclass(frozen=True, slots=True)
class NotYet:
    """Why there is no next round now. ``again_in_s``: when there may be one although nothing changes.

    ``is_for_safety``: there are nodes enough, and there will be one then: no other round may train by that time.
    """

    reason: str
    again_in_s: float | None = None
    is_for_safety: bool = False


def may_train_unseen(view: JobView) -> bool:
    """Whether all nodes of the present round may be cut off from the store and still train: nobody of it is there.

    If only one of them is, the others cannot go on without it, wherever they are.
    """
    if view.round is None:
        return False
    there = {member.node_id for member in view.members}
    places = {place.node_id for place in view.round.places}
    return not places & there and not places <= view.ended


def next_round(view: JobView, settings: Settings, enough_for_s: float, unseen_for_s: float = 0.0) -> Formed | NotYet:
    """Whether those who wait can begin the next round.

    ``unseen_for_s`` is for how long ``may_train_unseen``. ``enough_for_s`` is for how long at least ``min_nodes`` have
    waited. Only a first round with room for more waits for
    them: later it is known who is expected, and who comes later makes another round.
    """
    if view.closed:
        return NotYet(view.closed)
    waiting, training = view.waiting, view.training
    if training:
        number = view.round.number if view.round is not None else 0
        return NotYet(f"{_nodes(len(training))} of round {number} still train{_s(len(training))}.")
    if len(waiting) < settings.min_nodes:
        return NotYet(f"{_nodes(len(waiting))} wait{_s(len(waiting))}, and {settings.min_nodes} are needed.")
    expected = settings.most if settings.expected_nodes is None else min(settings.most, settings.expected_nodes)
    if view.round is None and len(waiting) < expected and enough_for_s < settings.last_call_s:
        left_s = settings.last_call_s - enough_for_s
        return NotYet(f"{_nodes(len(waiting))} wait{_s(len(waiting))} for up to {expected}.", left_s)
    if may_train_unseen(view) and unseen_for_s < settings.blind_patience_s + BLIND_MARGIN_S:
        number = view.round.number if view.round is not None else 0
        left_s = settings.blind_patience_s + BLIND_MARGIN_S - unseen_for_s
        return NotYet(
            f"No node of round {number} is left to say that it has ended: it may train, cut off.", left_s, True
        )
    number = 1 if view.round is None else view.round.number + 1
    chosen = _chosen(view.round, waiting, settings.most)
    formed = Round(number=number, places=_ranked(view.round, chosen))
    left_out = len(waiting) - len(chosen)
    reason = f"Round {number} begins with {_nodes(len(chosen))}"
    more = f"; {_nodes(left_out)} wait{_s(left_out)} for a place" if left_out else ""
    return Formed(formed, f"{reason}{more}.")


def safe_in_s(decided: Formed | NotYet) -> float:
    """Return for how long those who are enough have to wait for safety, with a moment to begin; else 0."""
    if isinstance(decided, NotYet) and decided.is_for_safety:
        return (decided.again_in_s or 0.0) + BEGINS_IN_S
    return 0.0


def nodes_waiting(view: JobView, settings: Settings) -> int:
    """How many nodes wait that a round would take beside those who train: for these it is worth to begin another."""
    return max(0, min(len(view.waiting), settings.most - len(view.training)))


def _chosen(before: Round | None, waiting: tuple[JobMember, ...], most: int) -> list[JobMember]:
    """Choose nodes: who had a place keeps one; the rest goes to those who came first."""
    had_place = {place.node_id for place in before.places} if before is not None else set()
    return sorted(waiting, key=lambda member: member.node_id not in had_place)[:most]


def _ranked(before: Round | None, chosen: Iterable[JobMember]) -> tuple[Place, ...]:
    """The chosen in the order of their ranks: who had one keeps it where the number of nodes allows."""
    members = sorted(chosen, key=_neighbourhood)
    size, had_rank = len(members), _returning(before, members)
    ranks = {rank: member for rank, member in had_rank.items() if rank < size}
    moved = [member for rank, member in had_rank.items() if rank >= size]
    known = {id(member) for member in had_rank.values()}
    others = (member for member in members if id(member) not in known)
    free = (rank for rank in range(size) if rank not in ranks)
    ranks.update(zip(free, [*moved, *others], strict=True))
    return tuple(Place(ranks[rank].node_id, ranks[rank].host, ranks[rank].process) for rank in range(size))


def _returning(before: Round | None, members: Sequence[JobMember]) -> dict[int, JobMember]:
    """{former rank: member}, sorted: the same agent, or else one that was started anew on the same host."""
    found: dict[int, JobMember] = {}
    places = () if before is None else before.places
    of_id, of_host = _queues(members, lambda each: each.node_id), _queues(members, lambda each: each.host)
    taken = set[int]()

    def take(rank: int, queue: deque[JobMember]) -> None:
        while queue and id(queue[0]) in taken:
            queue.popleft()
        if queue:
            found[rank] = queue.popleft()
            taken.add(id(found[rank]))

    for rank, place in enumerate(places):
        take(rank, of_id[place.node_id])
    for rank, place in enumerate(places):
        if rank not in found:
            take(rank, of_host[place.host])
    return dict(sorted(found.items()))


def _queues(members: Iterable[JobMember], name: Callable[[JobMember], str]) -> defaultdict[str, deque[JobMember]]:
    queues = defaultdict[str, deque[JobMember]](deque)
    for member in members:
        queues[name(member)].append(member)
    return queues


def _neighbourhood(member: JobMember) -> tuple[list[tuple[int, str]], list[tuple[int, str]], str]:
    return _natural(member.label), _natural(member.host), member.node_id


def _natural(name: str) -> list[tuple[int, str]]:
    """So that node10 comes after node9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", name)]


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _s(count: int) -> str:
    return "s" if count == 1 else ""
