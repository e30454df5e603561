"""Who coordinates and who is removed: the rules are scenarios in ``golden/``; then lives of whole clusters by seeds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import decisions
import pytest
from heartbeat_lab import FAULT_S_MAX, Agent, Cluster

from unicron_elastic.membership.coordination import (
    Accused,
    Answer,
    BecomeCoordinator,
    Command,
    CoordinationState,
    CoordinatorSeen,
    Depose,
    Event,
    Leader,
    LinkLost,
    LinkOpened,
    MembershipTick,
    Node,
    NodesSeen,
    Probed,
    Remove,
    Sight,
    handle,
)

SEEDS = 2000
FAULTS_S = 7.0  # so long faults begin
SETTLE_S = 15.0  # so long it may take after the last one until all is well
BELIEVED_FOR_S = 0.5  # so long what a probe said may be acted upon: it takes half of that
ACCUSED_FOR_S = 2.0  # so long an accusation may be: the accuser tries again each half second

GOLDEN = Path(__file__).parent / "golden"
ME, ONE, TWO, THREE = "me/1", "one/1", "two/1", "three/1"
ENDED, SILENT = "its process has ended", "it answers neither on its connection nor on a new one"


def leader(node_id: str, revision: int = 7, *, is_dedicated: bool = False) -> Leader:
    """Who holds the key."""
    host = node_id.partition("/")[0]
    return Leader(node_id, host, f"{host}:1", revision, is_dedicated)


def node(node_id: str) -> Node:
    """An agent as the store knows it."""
    host = node_id.partition("/")[0]
    return Node(node_id, host, f"{host}:1", "job", 3)


def after(*events: Event, state: CoordinationState | None = None) -> tuple[CoordinationState, list[Command]]:
    """The state after some events, and what the last of them brought about."""
    commands: list[Command] = []
    state = state or CoordinationState(me=ME)
    for event in events:
        state, commands = handle(state, event)
    return state, commands


def coordinator(*nodes: str, revision: int = 7) -> CoordinationState:
    """One that all of ``nodes`` have a connection to, at second 1."""
    known = NodesSeen(1.0, tuple(node(each) for each in (ME, *nodes)))
    opened = [LinkOpened(1.0, each) for each in nodes]
    return after(CoordinatorSeen(0.5, leader(ME, revision)), *opened, known)[0]


def follower(*, is_linked: bool = True) -> CoordinationState:
    """One whose coordinator is ``ONE``, at second 1."""
    seen = CoordinatorSeen(1.0, leader(ONE))
    return after(seen, *[LinkOpened(1.0, ONE)] * is_linked)[0]


def accuser() -> CoordinationState:
    """The same, after its coordinator has ended, at second 2."""
    return after(LinkLost(2.0, ONE), Probed(2.0, ONE, Answer.REFUSED), state=follower())[0]


def removed(commands: list[Command]) -> list[str]:
    """Whom they remove."""
    return [command.node.node_id for command in commands if isinstance(command, Remove)]


def silent_at(at: float, node_id: str) -> Probed:
    """A probe without an answer."""
    return Probed(at, node_id, Answer.SILENT)


class LoneAgent:
    """`LoneAgent` is one that hears what the words of a scenario say, and decides; time goes on by ``later`` alone."""

    def __init__(self, **more: Any) -> None:
        self.state = CoordinationState(me=ME, **more)
        self.now = 1.0
        self.answers: list[Command] = []

    def feed(self, event: Event) -> None:
        self.state, commands = handle(self.state, event)
        self.answers += commands

    def leads(self, who: str, revision: int = 7, *, is_dedicated: bool = False) -> None:
        found = None if who == "nobody" else leader(node_id(who), revision, is_dedicated=is_dedicated)
        self.feed(CoordinatorSeen(self.now, found))

    def later(self, seconds: float) -> None:
        self.now = round(self.now + seconds, 6)
        self.feed(MembershipTick(self.now))

    def nodes(self, *who: str) -> None:
        """The store knows these."""
        self.feed(NodesSeen(self.now, tuple(node(node_id(each)) for each in who)))

    def opened(self, who: str) -> None:
        self.feed(LinkOpened(self.now, node_id(who)))

    def lost(self, who: str) -> None:
        self.feed(LinkLost(self.now, node_id(who)))

    def probed(self, who: str, answer: Answer) -> None:
        self.feed(Probed(self.now, node_id(who), answer))

    def accused(self, who: str, *by: str) -> None:
        self.feed(Accused(self.now, node_id(who), frozenset(node_id(each) for each in by)))

    def sight(self, blind: str = "") -> None:
        self.feed(Sight(self.now, blind))


def node_id(who: str) -> str:
    """Return what a host's agent is called in the store; one of several on a host is given in full."""
    return who if "/" in who else f"{who}/1"


def answer(agent: LoneAgent, event: Callable[[], object]) -> Iterator[str]:
    """Yield what an agent answers to an event, and whether it leads from then on, or not any more."""
    led = agent.state.leads
    agent.answers.clear()
    event()
    for command in agent.answers:
        yield decisions.shown(
            command, lambda each: f"<{each.node_id}>" if isinstance(each, Leader | Node) else repr(each)
        )
    if agent.state.leads is not led:
        yield "(leads)" if agent.state.leads else "(does not lead)"


def short(each: Any) -> str:
    """Return a field's value in a few words."""
    return f"<{each.node_id}>" if isinstance(each, Leader | Node) else repr(each)


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.txt")), ids=lambda path: path.stem)
def test_an_agent_answers_as_it_is_written(path: Path, request: pytest.FixtureRequest) -> None:
    text = path.read_text(encoding="utf-8")
    decisions.check(path, decisions.played(text, {"agent": LoneAgent}, decisions.names_of(Answer), answer), request)


def test_every_command_occurs_in_a_scenario() -> None:
    assert decisions.never_told(GOLDEN, get_args(Command)) == []


def random_event(chance: random.Random, at: float) -> Event:
    """Anything that an agent may hear of which another one coordinates."""
    who = chance.choice((ONE, TWO, THREE))
    some = frozenset(chance.sample((ME, ONE, TWO, THREE), 3))
    found = (None, leader(who, chance.randrange(9), is_dedicated=chance.random() < 0.3))
    return chance.choice(
        (
            CoordinatorSeen(at, chance.choice(found)),
            MembershipTick(at),
            LinkOpened(at, who),
            LinkLost(at, who),
            Probed(at, who, chance.choice(tuple(Answer))),
            NodesSeen(at, tuple(node(each) for each in sorted(some))),
            Accused(at, who, some),
            Sight(at, chance.choice(("", "the store is away"))),
        )
    )


@pytest.mark.parametrize("is_dedicated", [False, True])
def test_whatever_it_hears_who_may_not_lead_does_all_but_that(is_dedicated: bool) -> None:
    kept_back = set()
    for seed in range(100):
        chance = random.Random(seed)
        willing = CoordinationState(me=ME, is_dedicated=is_dedicated)
        state = replace(willing, may_lead=False)
        for tick in range(60):
            event = random_event(chance, tick / 4)
            willing, all_of_them = handle(willing, event)
            state, commands = handle(state, event)
            assert commands == [each for each in all_of_them if not isinstance(each, BecomeCoordinator | Depose)]
            assert state == replace(willing, may_lead=False)
            kept_back |= {type(each) for each in all_of_them} - {type(each) for each in commands}
    assert kept_back == {BecomeCoordinator, Depose}


# -- what the coordinator does -------------------------------------------------------------------------------------


@pytest.mark.parametrize("apart_s", [0.0, 0.1, 0.4])
def test_who_is_cut_off_from_all_removes_none(apart_s: float) -> None:
    """Whatever the order: connections do not break at the very same moment."""
    state, gone = coordinator(ONE, TWO, THREE), []
    nodes = (ONE, TWO, THREE)
    events: list[Event] = [LinkLost(2.0 + n * apart_s, node_id) for n, node_id in enumerate(nodes)]
    events += [silent_at(2.25 + n * apart_s, node_id) for n, node_id in enumerate(nodes)]
    for event in sorted(events, key=lambda event: event.at):
        state, commands = after(event, state=state)
        gone += removed(commands)
    state, commands = after(NodesSeen(4.0, tuple(map(node, (ONE, TWO, THREE)))), state=state)
    assert gone + removed(commands) == []


# -- what the others do --------------------------------------------------------------------------------------------


def test_who_is_not_linked_knows_that_it_may_not_be_reached() -> None:
    assert follower().why_unreached == ""
    assert coordinator(ONE).why_unreached == ""
    assert follower(is_linked=False).why_unreached == "it has no connection to one, which coordinates"
    assert CoordinationState(me=ME).why_unreached == "nobody coordinates the cluster at the moment"


@pytest.mark.parametrize(
    ("accusers", "others", "is_deposed"),
    [
        ([], [ME], True),  # the only other one
        ([], [ME, TWO], False),  # half is not more than half
        ([TWO], [ME, TWO], True),
        ([TWO], [ME, TWO, THREE], True),
        ([], [ME, TWO, THREE], False),
        ([TWO], [ME, TWO, THREE, "four/1"], False),
        (["gone/1", "former/1"], [ME, TWO, THREE], False),  # who is no node has no voice
        ([ONE], [ME, TWO], False),  # nor has the coordinator
        ([TWO], [TWO, THREE], False),  # this one was removed
        ([TWO, THREE], [], False),
    ],
)
def test_more_than_half_of_the_others_depose(accusers: list[str], others: list[str], is_deposed: bool) -> None:
    nodes = tuple(map(node, [ONE, *others]))
    state, _ = after(Accused(2.1, ONE, frozenset(accusers)), state=accuser())
    _, commands = after(NodesSeen(2.2, nodes), state=state)
    assert commands == [Depose(leader(ONE), node(ONE), node(ME), f"one is lost: {ENDED}.", has_ended=True)] * is_deposed


# -- whole lives ---------------------------------------------------------------------------------------------------


class Watched(Cluster):
    """A cluster in which each decision is judged by who knows all."""

    def decided(self, agent: Agent, node: Node, command: Remove | Depose) -> None:
        """Nobody is removed who is well, nor by one that hears nobody."""
        super().decided(agent, node, command)
        if isinstance(command, Remove) and (self.leader is None or self.leader.node_id != agent.node_id):
            return  # its own key is gone, and the store will not do it
        for_s = BELIEVED_FOR_S if isinstance(command, Remove) else ACCUSED_FOR_S
        lost = self.agent(node.node_id)
        is_cut = any(lost.host in pair for pair in self.cut) or agent.host in self.off
        since = max(self.troubled_at.get(lost.node_id, 0.0), self.troubled_at.get(lost.host, 0.0))
        is_well = lost.is_alive and not lost.is_stopped and not is_cut and self.now - since > for_s
        assert not is_well, f"{agent.node_id} removes {lost.node_id}, which is well since {since:.3f}"
        if isinstance(command, Remove) and lost.is_alive:
            hosts = {known.host for known in self.known.values()}
            cut_since = [self.cut.get(frozenset((agent.host, host)), self.now) for host in hosts]
            is_cut_off = len(hosts) > 1 and self.now - max(cut_since) > BELIEVED_FOR_S
            assert not is_cut_off, f"{agent.node_id}, which is cut off, removes {lost.node_id}"

    def wrongs(self) -> Iterator[str]:
        """What is not yet as it should be, when nothing happens any more."""
        alive = {agent.node_id: agent for agent in self.agents if agent.is_alive}
        leading = {agent.node_id for agent in alive.values() if agent.state.leads}
        if self.leader is None or leading != {self.leader.node_id}:
            yield f"{sorted(leading)} lead, and the store says {self.leader}"
            return
        if self.nodes.keys() != alive.keys():
            yield f"the store knows {sorted(self.nodes)}, and {sorted(alive)} live"
        if self.accusations or any(agent.state.accusation for agent in alive.values()):
            yield f"there are accusations: {self.accusations}"
        others, links = alive.keys() - leading, alive[self.leader.node_id].state.links
        linked = {node_id for node_id in others if alive[node_id].state.is_linked}
        if not linked == others == links & others:
            yield f"{sorted(linked)} of {sorted(others)} are linked, by the leader {sorted(links)}"


def live_through(seed: int) -> float:
    """A life with faults by the seed; the seconds in which all was well again afterwards."""
    cluster = Watched(seed)
    try:
        for _ in range(cluster.random.randint(1, 8)):
            cluster.after(cluster.random.random() * FAULTS_S, cluster.fault)
        cluster.run(FAULTS_S + FAULT_S_MAX)
        began = cluster.now
        while wrongs := list(cluster.wrongs()):
            assert cluster.now < began + SETTLE_S, "; ".join(wrongs)
            cluster.run(cluster.now + 0.25)
        settled_s = cluster.now - began
        cluster.run(cluster.now + 1.0)
        assert not list(cluster.wrongs()), f"it does not stay so: {list(cluster.wrongs())}"
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}\n" + "\n".join(cluster.story)) from None
    return settled_s


@pytest.mark.parametrize("first", range(0, SEEDS, 200))
def test_whatever_happens_it_comes_to_rest_and_no_one_well_is_removed(first: int) -> None:
    for seed in range(first, first + 200):
        live_through(seed)


@pytest.mark.parametrize("seed", range(200))
def test_while_the_network_is_split_one_side_is_left_in_the_store_and_it_stays_so(seed: int) -> None:
    """The coordinator's; the others come back once they are reached."""
    cluster = Watched(seed)
    cluster.run(3.0)
    side = frozenset(cluster.random.sample(cluster.hosts, cluster.random.randint(1, len(cluster.hosts) - 1)))
    cluster.split(sorted(side), 40.0)
    cluster.run(18.0)
    story = "\n".join(cluster.story)
    assert cluster.leader is not None, story
    sides = side, frozenset(cluster.hosts) - side
    (led,) = (each for each in sides if cluster.leader.host in each)
    assert {each.host for each in cluster.nodes.values()} == led, story
    told = len(cluster.story)
    cluster.run(42.9)
    assert [each for each in cluster.story[told:] if "removes" in each or "leads" in each] == []
    cluster.run(50.0)
    assert list(cluster.wrongs()) == [], "\n".join(cluster.story)
