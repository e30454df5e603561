"""Who coordinates and who is lost, decided purely: ``handle(state, event) -> (state, commands)``.

One agent of the cluster holds the leader's key and is the *coordinator*. All others keep a connection to it, which the
kernels at its ends keep an eye on: it breaks within milliseconds when a process ends, and within a second when a host
no longer answers. Whoever is missed is *probed* by a new connection to the port that every agent listens on, so that a
broken connection alone costs nobody its place:

- it answers: it lives and will connect again; if it hangs, its lease will run out, which is slower and surer.
- it is refused: the host is there, and the agent is not.
- silence: the host is gone or cut off.

Who never had a connection to the present coordinator is probed as well, after a moment, and so is a coordinator that
never had one to this agent: one that was elected during a cut has met nobody beyond it. But where no connection between
hosts ever stood that says nothing, as names may not resolve and ports may be closed: then the lease alone tells.

The coordinator removes who is gone from the store, under the guard of its own key: one that was replaced changes
nothing any more. If all others are silent it removes none, as it is more likely itself that is cut off; a single one it
does. A coordinator that is gone is removed by the others, when more than half of them say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from unicron_elastic.membership.decision import Decision, why_not

RECONNECT_S = 0.5  # between two attempts to reach the coordinator
MISSED_S = 2.0  # so long an agent may take to connect before it is probed
LOOK_S = 1.0  # between two looks of the coordinator at the nodes that the store knows
ACCUSER_LOOK_S = 0.25  # ... and of who accuses the coordinator
ANSWERED_S = 0.25  # after which one that answered, and has just been lost, is probed again
WITNESSES = 3  # other nodes that are probed if one is silent
_ENDED = "its process has ended"
_SILENT = "it answers neither on its connection nor on a new one"
_NEVER_MET = "it has not connected to the present coordinator, which cannot reach it either"
_NEVER_MET_IT = "it coordinates, and most of the other nodes have never reached it"


class Answer(Enum):
    """What came of a probe."""

    ANSWERS = "answers"
    REFUSED = "refused"
    SILENT = "silent"


@dataclass(frozen=True, slots=True)
class Leader:
    """Who holds the leader's key."""

    node_id: str
    host: str
    address: str  # HOST:PORT
    revision: int
    is_dedicated: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    """An agent as the store knows it."""

    node_id: str
    host: str
    address: str
    job: str  # "": none
    revision: int


@dataclass(frozen=True, slots=True)
class CoordinatorSeen:
    """The leader's key has changed, or is gone."""

    at: float
    leader: Leader | None


@dataclass(frozen=True, slots=True)
class NodesSeen:
    """The answer to ``LookAtNodes``."""

    at: float
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Accused:
    """Those who say that they cannot reach the coordinator ``leader``."""

    at: float
    leader: str
    accusers: frozenset[str]


@dataclass(frozen=True, slots=True)
class LinkOpened:
    """A connection stands: of a node to this coordinator, or of this node to its coordinator."""

    at: float
    node_id: str


@dataclass(frozen=True, slots=True)
class LinkLost:
    """It has broken, or could not be made."""

    at: float
    node_id: str


@dataclass(frozen=True, slots=True)
class Probed:
    """The answer to ``Probe``."""

    at: float
    node_id: str
    answer: Answer


@dataclass(frozen=True, slots=True)
class Sight:
    """Whether the store can be seen. A blind node decides little: see ``decision``."""

    at: float
    blind: str  # why not; "": it can


@dataclass(frozen=True, slots=True)
class MembershipTick:
    """Some time has passed."""

    at: float


Event = CoordinatorSeen | NodesSeen | Accused | LinkOpened | LinkLost | Probed | Sight | MembershipTick


@dataclass(frozen=True, slots=True)
class BecomeCoordinator:
    """Take the leader's key, if it still is at ``revision``; 0: if there is none."""

    revision: int


@dataclass(frozen=True, slots=True)
class Connect:
    """Open a connection to the coordinator."""

    leader: Leader


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask whether somebody listens there."""

    node_id: str
    address: str


@dataclass(frozen=True, slots=True)
class LookAtNodes:
    """Read which nodes the store knows."""


@dataclass(frozen=True, slots=True)
class Accuse:
    """Say in the store that the coordinator cannot be reached."""

    leader: str
    reason: str


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Take that back."""


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove a node from the store, by the right of the leader's key at ``leader_revision``.

    ``has_ended``: it is certain that its process is no more.
    """

    node: Node
    leader_revision: int
    reason: str
    has_ended: bool


@dataclass(frozen=True, slots=True)
class Depose:
    """Take the leader's key from ``leader`` and remove its node, if it is one."""

    leader: Leader
    node: Node | None
    by: Node  # of who deposes: one that was removed itself deposes nobody
    reason: str
    has_ended: bool


Command = BecomeCoordinator | Connect | Probe | LookAtNodes | Accuse | Withdraw | Remove | Depose


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinationState:
    """What one agent knows. ``is_dedicated``: it has no node of its own, and leads if it can.

    Without ``may_lead`` it never coordinates: another agent of its host does that, which outlives it.
    ``do_links_work``: it has had a connection to or from another host, whoever coordinated then.
    """

    me: str
    host: str = ""
    is_dedicated: bool = False
    may_lead: bool = True
    blind: str = ""  # why the store cannot be seen; "": it can
    do_links_work: bool = False
    leader: Leader | None = None
    leader_seen_at: float = float("-inf")
    # of the coordinator itself
    nodes: Mapping[str, Node] = field(default_factory=dict)
    looked_at: float = float("-inf")
    links: frozenset[str] = frozenset()
    linked_once: frozenset[str] = frozenset()
    missed_since: Mapping[str, float] = field(default_factory=dict)  # nodes without a connection
    probing: frozenset[str] = frozenset()
    silent: frozenset[str] = frozenset()  # nodes that did not answer and are not removed yet
    is_cut_off: bool = False  # none of them answered, and none has since
    doubted: frozenset[str] = frozenset()  # of probes that began then
    # of the others
    is_linked: bool = False
    was_linked: bool = False
    tried_at: float = float("-inf")
    accusation: str = ""  # of the coordinator, "": none
    has_ended: bool = False  # as the accusation says
    accusers: frozenset[str] = frozenset()

    @property
    def leads(self) -> bool:
        """Whether this agent is the coordinator."""
        return self.leader is not None and self.leader.node_id == self.me

    @property
    def why_unreached(self) -> str:
        """Why this agent cannot be sure that others reach it, as a clause; "": it leads, or is linked to who does."""
        if self.leader is None:
            return "nobody coordinates the cluster at the moment"
        return "" if self.leads or self.is_linked else f"it has no connection to {self.leader.host}, which coordinates"


Outcome = tuple[CoordinationState, list[Command]]


def handle(state: CoordinationState, event: Event) -> Outcome:
    """The state after ``event``, and what is to be done."""
    state, commands = _handle(state, event)
    if not state.may_lead:
        commands = [each for each in commands if not isinstance(each, BecomeCoordinator | Depose)]
    return state, commands


def _handle(state: CoordinationState, event: Event) -> Outcome:
    match event:
        case CoordinatorSeen():
            return _coordinator_seen(state, event)
        case Sight():
            state = replace(state, silent=frozenset(), is_cut_off=False)  # of before; who is missed is probed again
            return replace(state, blind=event.blind, looked_at=float("-inf")), []
        case Accused():
            is_of_this = state.leader is not None and event.leader == state.leader.node_id
            return replace(state, accusers=event.accusers if is_of_this else frozenset()), []
        case MembershipTick():
            return _time_passed(state, event.at)
        case NodesSeen() if state.leads:
            return _nodes_seen(state, event)
        case NodesSeen():
            return _tried(state, event)
        case LinkOpened() | LinkLost() | Probed() if state.leads:
            return _of_node(state, event)
        case LinkOpened() | LinkLost() | Probed():
            return _of_coordinator(state, event)


def _coordinator_seen(state: CoordinationState, event: CoordinatorSeen) -> Outcome:
    was, now = state.leader, event.leader
    if was is not None and now is not None and (was.node_id, was.address) == (now.node_id, now.address):
        return replace(state, leader=now), []
    commands: list[Command] = [Withdraw()] if state.accusation else []
    if now is None:
        return _fresh(state, None, event.at), [*commands, BecomeCoordinator(0)]
    state = _fresh(state, now, event.at)
    if state.leads:
        return replace(state, looked_at=event.at), [*commands, LookAtNodes()]
    if state.is_dedicated and not now.is_dedicated:
        return replace(state, tried_at=event.at), [*commands, BecomeCoordinator(now.revision)]
    return replace(state, tried_at=event.at), [*commands, Connect(now)]


def _fresh(state: CoordinationState, leader: Leader | None, at: float) -> CoordinationState:
    return CoordinationState(
        me=state.me,
        host=state.host,
        is_dedicated=state.is_dedicated,
        may_lead=state.may_lead,
        blind=state.blind,
        do_links_work=state.do_links_work,
        leader=leader,
        leader_seen_at=at,
    )


def _time_passed(state: CoordinationState, at: float) -> Outcome:
    if state.leads:
        return _coordinate(state, at)
    if state.leader is None:
        is_due = not why_not(Decision.COORDINATE, state.blind) and at - state.tried_at >= RECONNECT_S
        return (replace(state, tried_at=at), [BecomeCoordinator(0)]) if is_due else (state, [])
    commands: list[Command] = []
    leader = state.leader
    if state.is_dedicated and not leader.is_dedicated and at - state.tried_at >= RECONNECT_S:
        commands.append(BecomeCoordinator(leader.revision))
    if not state.is_linked and at - state.tried_at >= RECONNECT_S:
        commands.append(Connect(leader))
    if commands:
        state = replace(state, tried_at=at)
    if state.accusation and not state.blind and at - state.looked_at >= ACCUSER_LOOK_S:
        state = replace(state, looked_at=at)
        commands.append(LookAtNodes())
    return state, commands


def _coordinate(state: CoordinationState, at: float) -> Outcome:
    commands: list[Command] = []
    if not state.blind and at - state.looked_at >= LOOK_S:
        state = replace(state, looked_at=at)
        commands.append(LookAtNodes())
    due = [node_id for node_id, since in state.missed_since.items() if at - since >= MISSED_S]
    due = [node_id for node_id in due if node_id in state.linked_once or state.do_links_work]
    for node_id in due:
        state, probe = _probe(state, node_id)
        commands += probe
    return state, commands


def _nodes_seen(state: CoordinationState, event: NodesSeen) -> Outcome:
    nodes = {node.node_id: node for node in event.nodes if node.node_id != state.me}
    missed = {n: state.missed_since.get(n, event.at) for n in nodes if n not in state.links}
    silent = frozenset(state.silent & nodes.keys())
    unasked = sorted((nodes.keys() - state.nodes.keys()) & state.missed_since.keys() & state.linked_once)
    state = _with_links_at_work(replace(state, nodes=nodes, missed_since=missed, silent=silent))
    commands: list[Command] = []
    for node_id in unasked:  # it was lost before its address was known
        state, probe = _probe(state, node_id)
        commands += probe
    return state, commands


def _of_node(state: CoordinationState, event: LinkOpened | LinkLost | Probed) -> Outcome:
    node_id, missed = event.node_id, state.missed_since
    match event:
        case LinkOpened():
            if node_id in missed:
                missed = {each: since for each, since in missed.items() if each != node_id}
            links, silent = state.links | {node_id}, state.silent - {node_id}
            linked_once = state.linked_once | {node_id}
            state = replace(state, links=links, linked_once=linked_once, missed_since=missed, silent=silent)
            return _heard(_with_links_at_work(state), node_id)
        case LinkLost():
            missed = {**missed, node_id: event.at}
            return _probe(replace(state, links=state.links - {node_id}, missed_since=missed), node_id)
    is_doubted = node_id in state.doubted
    state = replace(state, probing=state.probing - {node_id}, doubted=state.doubted - {node_id})
    is_missed = node_id in state.nodes and node_id not in state.links
    if event.answer is Answer.SILENT:
        if not is_missed:
            return replace(state, silent=state.silent - {node_id}), []
        return _probe(state, node_id) if is_doubted else _silent(state, node_id)
    state, commands = _heard(replace(state, silent=state.silent - {node_id}), node_id)
    if event.answer is Answer.REFUSED and is_missed:
        has_met = node_id in state.linked_once  # else something on the way may refuse what is sent to it
        state, remove = _remove(state, node_id, _ENDED if has_met else _NEVER_MET, has_ended=has_met)
        return state, commands + remove
    if node_id in missed:  # probed again if it does not come; soon, as one that ends closes its port last
        is_new = event.at - missed[node_id] < RECONNECT_S
        again_at = event.at - MISSED_S + (ANSWERED_S if is_new else MISSED_S)
        state = replace(state, missed_since={**state.missed_since, node_id: again_at})
    return state, commands


def _probe(state: CoordinationState, node_id: str) -> Outcome:
    node = state.nodes.get(node_id)
    if node is None:  # it came and went between two looks
        return replace(state, looked_at=float("-inf")), []
    if node_id in state.probing:
        return state, []
    return replace(state, probing=state.probing | {node_id}), [Probe(node_id, node.address)]


def _silent(state: CoordinationState, node_id: str) -> Outcome:
    """A silent node is removed once another one is heard: else it may be this node that is cut off."""
    if why_not(Decision.REMOVE_NODE, state.blind):
        return state, []
    state = replace(state, silent=state.silent | {node_id})
    elsewhere = _elsewhere(state)
    if not elsewhere - {node_id}:
        return _remove(state, node_id, _why_silent(state, node_id), has_ended=False)
    others = elsewhere - state.silent
    commands: list[Command] = []
    for witness in sorted(others, key=lambda each: (each not in state.links, each))[:WITNESSES]:
        state, probe = _probe(state, witness)
        commands += probe
    return replace(state, is_cut_off=not others), commands


def _elsewhere(state: CoordinationState) -> frozenset[str]:
    """The nodes that only a network leads to: one on this host answers also if that is cut off."""
    return frozenset(node_id for node_id in state.nodes if _is_elsewhere(state, node_id))


def _is_elsewhere(state: CoordinationState, node_id: str) -> bool:
    node = state.nodes.get(node_id)
    here = "" if state.leader is None else state.leader.host
    return node is not None and node.host != here


def _heard(state: CoordinationState, node_id: str) -> Outcome:
    """Another host is reached. After a cut the silence of before says nothing."""
    if not _is_elsewhere(state, node_id):
        return state, []
    was_cut_off, silent = state.is_cut_off, sorted(state.silent)
    commands: list[Command] = []
    if was_cut_off:
        state = replace(state, is_cut_off=False, silent=frozenset(), doubted=state.probing)
    for each in silent:
        why = _why_silent(state, each)
        state, more = _probe(state, each) if was_cut_off else _remove(state, each, why, has_ended=False)
        commands += more
    return state, commands


def _why_silent(state: CoordinationState, node_id: str) -> str:
    return _SILENT if node_id in state.linked_once else _NEVER_MET


def _with_links_at_work(state: CoordinationState) -> CoordinationState:
    """Return the state once a node of another host has had a connection to this coordinator."""
    if state.do_links_work or not any(_is_elsewhere(state, node_id) for node_id in state.linked_once):
        return state
    return replace(state, do_links_work=True)


def _remove(state: CoordinationState, node_id: str, why: str, *, has_ended: bool) -> Outcome:
    if why_not(Decision.REMOVE_NODE, state.blind) or state.leader is None:
        return state, []
    revision = state.leader.revision
    node = state.nodes[node_id]
    nodes = {each: known for each, known in state.nodes.items() if each != node_id}
    missed = {each: since for each, since in state.missed_since.items() if each != node_id}
    state = replace(state, nodes=nodes, missed_since=missed, silent=state.silent - {node_id})
    return state, [Remove(node, revision, f"{node.host} is lost: {why}.", has_ended)]


def _of_coordinator(state: CoordinationState, event: LinkOpened | LinkLost | Probed) -> Outcome:
    leader = state.leader
    if leader is None or event.node_id != leader.node_id:
        return state, []
    match event:
        case LinkOpened():
            withdrawn: list[Command] = [Withdraw()] if state.accusation else []
            do_links_work = state.do_links_work or leader.host != state.host
            state = replace(state, is_linked=True, was_linked=True, do_links_work=do_links_work, accusation="")
            return state, withdrawn
        case LinkLost():
            is_due = state.was_linked or (state.do_links_work and event.at - state.leader_seen_at >= MISSED_S)
            probe: list[Command] = [Probe(leader.node_id, leader.address)] if is_due else []
            return replace(state, is_linked=False, tried_at=event.at), probe
    if state.is_linked or state.accusation:
        return state, []
    if event.answer is Answer.ANSWERS:  # tried again soon: one that ends closes its port last
        return replace(state, tried_at=event.at - RECONNECT_S + ANSWERED_S / 2), []
    ended = event.answer is Answer.REFUSED
    ended = ended and state.was_linked  # else something on the way may refuse what is sent to it
    why = _ENDED if ended else _SILENT if state.was_linked else _NEVER_MET_IT
    state = replace(state, accusation=f"{leader.host} is lost: {why}.", has_ended=ended, looked_at=event.at)
    return state, [Accuse(leader.node_id, state.accusation), LookAtNodes()]


def _tried(state: CoordinationState, event: NodesSeen) -> Outcome:
    """Deposes the coordinator if more than half of the other nodes cannot reach it."""
    if state.leader is None or not state.accusation or why_not(Decision.COORDINATE, state.blind):
        return state, []
    others = {node.node_id for node in event.nodes} - {state.leader.node_id}
    accusers = (state.accusers | {state.me}) & others
    if 2 * len(accusers) <= len(others):
        return state, []
    known = {node.node_id: node for node in event.nodes}
    if state.me not in known:
        return state, []
    node = known.get(state.leader.node_id)
    return state, [Depose(state.leader, node, known[state.me], state.accusation, state.has_ended)]
