"""Who coordinates and who is removed: each rule as a short test, then lives of whole clusters by seeds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from heartbeat_lab import FAULT_S_MAX, Agent, Cluster

from unicron_elastic.membership.coordination import (
    Accuse,
    Accused,
    Answer,
    BecomeCoordinator,
    Command,
    Connect,
    CoordinationState,
    CoordinatorSeen,
    Depose,
    Event,
    Leader,
    LinkLost,
    LinkOpened,
    LookAtNodes,
    MembershipTick,
    Node,
    NodesSeen,
    Probe,
    Probed,
    Remove,
    Sight,
    Withdraw,
    handle,
)

SEEDS = 2000
FAULTS_S = 7.0  # so long faults begin
SETTLE_S = 15.0  # so long it may take after the last one until all is well
BELIEVED_FOR_S = 0.5  # so long what a probe said may be acted upon: it takes half of that
ACCUSED_FOR_S = 2.0  # so long an accusation may be: the accuser tries again each half second

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


# -- who leads -----------------------------------------------------------------------------------------------------


def test_where_nobody_leads_one_tries_to() -> None:
    state, commands = after(CoordinatorSeen(1.0, None))
    assert (commands, state.leads) == ([BecomeCoordinator(0)], False)


def test_who_failed_to_lead_tries_again_but_not_at_each_tick() -> None:
    state, first = after(CoordinatorSeen(1.0, None), MembershipTick(1.0))
    state, soon = after(MembershipTick(1.1), state=state)
    _, later = after(MembershipTick(1.6), state=state)
    assert (first, soon, later) == ([BecomeCoordinator(0)], [], [BecomeCoordinator(0)])


def test_who_leads_looks_at_the_nodes_at_once_and_each_second() -> None:
    state, commands = after(CoordinatorSeen(1.0, leader(ME)))
    assert (commands, state.leads) == ([LookAtNodes()], True)
    state, soon = after(MembershipTick(1.9), state=state)
    _, later = after(MembershipTick(2.0), state=state)
    assert (soon, later) == ([], [LookAtNodes()])


def test_the_others_connect_and_try_again_each_half_second() -> None:
    state, commands = after(CoordinatorSeen(1.0, leader(ONE)))
    assert commands == [Connect(leader(ONE))]
    state, _ = after(LinkLost(1.0, ONE), state=state)
    _, soon = after(MembershipTick(1.4), state=state)
    _, later = after(MembershipTick(1.5), state=state)
    assert (soon, later) == ([], [Connect(leader(ONE))])


def test_who_is_linked_does_not_connect_again() -> None:
    assert after(MembershipTick(9.0), state=follower())[1] == []


def test_another_revision_of_the_same_leader_changes_nothing_but_the_revision() -> None:
    state, commands = after(CoordinatorSeen(2.0, leader(ONE, 8)), state=follower())
    assert (state.is_linked, state.leader, commands) == (True, leader(ONE, 8), [])


def test_another_leader_is_connected_to() -> None:
    state, commands = after(CoordinatorSeen(2.0, leader(TWO)), state=follower())
    assert (state.is_linked, commands) == (False, [Connect(leader(TWO))])


def test_a_dedicated_one_takes_over_from_a_node_and_not_from_its_like() -> None:
    dedicated = CoordinationState(me=ME, is_dedicated=True)
    assert after(CoordinatorSeen(1.0, leader(ONE, 7)), state=dedicated)[1] == [BecomeCoordinator(7)]
    other = leader(ONE, 7, is_dedicated=True)
    assert after(CoordinatorSeen(1.0, other), state=dedicated)[1] == [Connect(other)]


def test_who_may_not_lead_leaves_it_to_others() -> None:
    state = CoordinationState(me=ME, may_lead=False)
    state, commands = after(CoordinatorSeen(1.0, None), state=state)
    assert commands == []
    for tick in range(30):
        state, commands = after(MembershipTick(2.0 + tick), state=state)
        assert (commands, state.leads) == ([], False)
    state, commands = after(CoordinatorSeen(40.0, leader(ONE)), state=state)
    assert (commands, state.may_lead) == ([Connect(leader(ONE))], False)
    _, commands = after(CoordinatorSeen(41.0, None), state=state)
    assert commands == []


def test_who_may_not_lead_accuses_but_deposes_nobody() -> None:
    state = CoordinationState(me=ME, may_lead=False)
    state, _ = after(CoordinatorSeen(1.0, leader(ONE)), LinkOpened(1.0, ONE), LinkLost(2.0, ONE), state=state)
    state, commands = after(Probed(2.0, ONE, Answer.REFUSED), state=state)
    assert commands == [Accuse(ONE, f"one is lost: {ENDED}."), LookAtNodes()]
    everybody = NodesSeen(2.1, tuple(node(each) for each in (ME, ONE, TWO, THREE)))
    _, commands = after(Accused(2.1, ONE, frozenset({ME, TWO, THREE})), everybody, state=state)
    assert commands == []
    willing = replace(state, may_lead=True)
    _, commands = after(Accused(2.1, ONE, frozenset({ME, TWO, THREE})), everybody, state=willing)
    assert [type(each) for each in commands] == [Depose]


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


def test_a_lost_connection_is_followed_by_a_probe_and_nothing_else() -> None:
    assert after(LinkLost(2.0, ONE), state=coordinator(ONE, TWO))[1] == [Probe(ONE, "one:1")]


def test_who_is_refused_is_removed_by_the_right_of_the_leader_s_key() -> None:
    state = coordinator(ONE, TWO, revision=9)
    _, commands = after(LinkLost(2.0, ONE), Probed(2.0, ONE, Answer.REFUSED), state=state)
    assert commands == [Remove(node(ONE), 9, f"one is lost: {ENDED}.", has_ended=True)]


def test_who_answers_stays_and_is_asked_again_if_it_does_not_come() -> None:
    state, commands = after(LinkLost(2.0, ONE), Probed(2.1, ONE, Answer.ANSWERS), state=coordinator(ONE, TWO))
    assert commands == []
    asked = 0
    for tick in range(20):
        state, commands = after(MembershipTick(2.2 + tick / 10), state=state)
        asked += commands.count(Probe(ONE, "one:1"))
        assert removed(commands) == []
    assert asked == 1, "it may be stopped, and its queue of connections is not to be filled"


def test_who_answered_while_it_ended_is_asked_again_soon() -> None:
    """The kernel closes the connections of a process one by one, and its port last."""
    state, _ = after(LinkLost(2.0, ONE), Probed(2.0, ONE, Answer.ANSWERS), state=coordinator(ONE, TWO))
    _, commands = after(MembershipTick(2.5), state=state)
    assert Probe(ONE, "one:1") in commands


def test_who_is_back_before_the_answer_stays() -> None:
    lost = after(LinkLost(2.0, ONE), LinkOpened(2.1, ONE), state=coordinator(ONE, TWO))[0]
    for answer in Answer:
        assert removed(after(Probed(2.2, ONE, answer), state=lost)[1]) == []


@pytest.mark.parametrize("told", [Answer.ANSWERS, Answer.SILENT])
def test_a_silent_one_of_several_is_removed_once_another_one_is_heard(told: Answer) -> None:
    state, commands = after(LinkLost(2.0, ONE), Probed(2.3, ONE, Answer.SILENT), state=coordinator(ONE, TWO, THREE))
    gone = removed(commands)
    for witness, answer in ((TWO, told), (THREE, Answer.ANSWERS)):
        state, commands = after(Probed(2.4, witness, answer), state=state)
        gone += removed(commands)
    assert gone == [ONE]


def test_a_single_silent_one_is_removed() -> None:
    _, commands = after(LinkLost(2.0, ONE), Probed(2.3, ONE, Answer.SILENT), state=coordinator(ONE))
    assert commands == [Remove(node(ONE), 7, f"one is lost: {SILENT}.", has_ended=False)]


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


def test_who_comes_back_from_a_cut_does_not_believe_the_silence_of_before() -> None:
    state, gone = coordinator(ONE, TWO), []
    nodes = NodesSeen(3.0, (node(ONE), node(TWO)))
    lost, silent = [[make(2.0, each) for each in (ONE, TWO)] for make in (LinkLost, silent_at)]
    for event in (*lost, *silent, LinkOpened(2.9, ONE), nodes):
        state, commands = after(event, state=state)
        gone += removed(commands)
    assert gone == []


def test_what_was_silent_while_it_was_blind_is_asked_again() -> None:
    blind = Sight(1.5, "no answer"), LinkLost(2.0, ONE), silent_at(2.3, ONE), Sight(2.5, "")
    state, gone = after(*blind, state=coordinator(ONE, TWO))[0], []
    nodes = NodesSeen(2.6, (node(ONE), node(TWO)))
    events: list[Event] = [nodes, Probed(2.6, TWO, Answer.ANSWERS), LinkOpened(2.7, THREE)]
    for event in events:
        state, commands = after(event, state=state)
        gone += removed(commands)
    assert gone == []
    assert Probe(ONE, "one:1") in after(MembershipTick(4.1), state=state)[1]


def test_who_never_had_a_connection_is_left_to_its_lease() -> None:
    state, _ = after(CoordinatorSeen(1.0, leader(ME)), NodesSeen(1.0, (node(ME), node(ONE))))
    for tick in range(1, 100):
        state, commands = after(MembershipTick(1.0 + tick), state=state)
        assert commands == [LookAtNodes()]


@pytest.mark.parametrize("answer", [Answer.SILENT, Answer.REFUSED])
def test_who_does_not_connect_to_a_new_coordinator_and_cannot_be_reached_is_removed(answer: Answer) -> None:
    """It was elected while the network was cut: whoever is beyond the cut has never connected to it."""
    state, commands = after(NodesSeen(2.0, (node(ME), node(ONE), node(TWO))), state=coordinator(ONE))
    assert commands == []
    state, commands = after(MembershipTick(3.9), state=state)
    assert Probe(TWO, "two:1") not in commands, "it has a moment to connect"
    state, commands = after(MembershipTick(4.0), state=state)
    assert Probe(TWO, "two:1") in commands
    state, silent = after(Probed(4.2, TWO, answer), state=state)
    _, heard = after(Probed(4.3, ONE, Answer.ANSWERS), state=state)
    why = "two is lost: it has never connected to the coordinator, which cannot reach it either."
    assert [each for each in silent + heard if not isinstance(each, Probe)] == [
        Remove(node(TWO), 7, why, has_ended=False)
    ]


def test_who_led_before_remembers_that_connections_work() -> None:
    state = after(CoordinatorSeen(2.0, leader(ME, 8)), state=follower())[0]
    state = after(NodesSeen(2.1, (node(ME), node(ONE), node(TWO))), state=state)[0]
    _, commands = after(MembershipTick(4.2), state=state)
    assert {Probe(ONE, "one:1"), Probe(TWO, "two:1")} <= set(commands)


def test_a_connection_within_the_host_says_nothing_of_the_network() -> None:
    state = after(CoordinatorSeen(1.0, leader(ME)), state=CoordinationState(me=ME, host="me"))[0]
    here = Node("me/2", "me", "me:2", "job", 3)
    state, _ = after(LinkOpened(1.0, "me/2"), NodesSeen(1.1, (node(ME), here, node(ONE))), state=state)
    assert after(MembershipTick(4.0), state=state)[1] == [LookAtNodes()]


def test_who_was_lost_before_its_address_was_known_is_probed_once_it_is() -> None:
    state, _ = after(LinkOpened(1.0, ONE), state=coordinator(TWO))
    state, commands = after(LinkLost(1.1, ONE), state=state)
    assert commands == []  # its address is not known yet
    state, commands = after(MembershipTick(1.2), state=state)
    assert commands == [LookAtNodes()]
    assert after(NodesSeen(1.3, (node(ONE), node(TWO))), state=state)[1] == [Probe(ONE, "one:1")]


def test_one_probe_at_a_time() -> None:
    state, _ = after(LinkLost(2.0, ONE), state=coordinator(ONE, TWO))
    assert after(LinkOpened(2.0, ONE), LinkLost(2.0, ONE), state=state)[1] == []


def test_who_is_gone_from_the_store_is_not_removed_again() -> None:
    state, _ = after(LinkLost(2.0, ONE), NodesSeen(2.1, (node(TWO),)), state=coordinator(ONE, TWO))
    assert removed(after(Probed(2.2, ONE, Answer.REFUSED), state=state)[1]) == []


def test_a_blind_coordinator_removes_none_and_looks_at_nothing() -> None:
    state, _ = after(Sight(1.5, "no answer"), LinkLost(2.0, ONE), state=coordinator(ONE))
    for answer in Answer:
        assert after(Probed(2.2, ONE, answer), state=state)[1] == []
    assert LookAtNodes() not in after(MembershipTick(9.0), state=state)[1]


def test_with_sight_it_looks_at_once_and_asks_again() -> None:
    events = Sight(1.5, "no answer"), LinkLost(2.0, ONE), Probed(2.2, ONE, Answer.REFUSED), Sight(4.5, "")
    state, _ = after(*events, state=coordinator(ONE, TWO))
    _, commands = after(MembershipTick(4.5), state=state)
    assert commands == [LookAtNodes(), Probe(ONE, "one:1")]


def test_who_is_replaced_forgets_all_and_connects() -> None:
    state, commands = after(LinkLost(2.0, ONE), CoordinatorSeen(2.1, leader(TWO)), state=coordinator(ONE, TWO))
    assert commands == [Connect(leader(TWO))]
    assert after(Probed(2.2, ONE, Answer.REFUSED), state=state)[1] == []


# -- what the others do --------------------------------------------------------------------------------------------


def test_a_coordinator_that_never_answered_is_not_probed() -> None:
    for at in (2.0, 20.0):
        assert after(LinkLost(at, ONE), state=follower(is_linked=False))[1] == []


def test_it_is_probed_and_accused_where_connections_worked_before() -> None:
    state, _ = after(CoordinatorSeen(2.0, leader(TWO)), state=follower())
    state, soon = after(LinkLost(2.5, TWO), state=state)
    state, later = after(LinkLost(4.0, TWO), state=state)
    assert (soon, later) == ([], [Probe(TWO, "two:1")])
    why = "two is lost: it coordinates, and most of the other nodes have never reached it."
    for answer in (Answer.SILENT, Answer.REFUSED):
        accusing, commands = after(Probed(4.2, TWO, answer), state=state)
        assert commands == [Accuse(TWO, why), LookAtNodes()]
        assert not accusing.has_ended
    assert after(Probed(4.2, TWO, Answer.ANSWERS), state=state)[1] == []


def test_who_is_not_linked_knows_that_it_may_not_be_reached() -> None:
    assert follower().why_unreached == ""
    assert coordinator(ONE).why_unreached == ""
    assert follower(is_linked=False).why_unreached == "it has no connection to one, which coordinates"
    assert CoordinationState(me=ME).why_unreached == "nobody coordinates the cluster at the moment"


def test_a_lost_coordinator_is_probed_and_then_accused() -> None:
    state, commands = after(LinkLost(2.0, ONE), state=follower())
    assert commands == [Probe(ONE, "one:1")]
    for answer, why in ((Answer.REFUSED, ENDED), (Answer.SILENT, SILENT)):
        _, commands = after(Probed(2.2, ONE, answer), state=state)
        assert commands == [Accuse(ONE, f"one is lost: {why}."), LookAtNodes()]
    assert after(Probed(2.2, ONE, Answer.ANSWERS), state=state)[1] == []


def test_an_accusation_is_made_once() -> None:
    assert after(LinkLost(2.6, ONE), Probed(2.7, ONE, Answer.SILENT), state=accuser())[1] == []


def test_who_is_linked_again_takes_its_accusation_back() -> None:
    state, commands = after(LinkOpened(2.5, ONE), state=accuser())
    assert (state.accusation, commands) == ("", [Withdraw()])


def test_an_accusation_of_a_former_coordinator_is_taken_back() -> None:
    assert after(CoordinatorSeen(2.5, leader(TWO)), state=accuser())[1] == [Withdraw(), Connect(leader(TWO))]
    assert after(CoordinatorSeen(2.5, None), state=accuser())[1] == [Withdraw(), BecomeCoordinator(0)]


def test_an_accuser_looks_who_else_there_is() -> None:
    state, soon = after(MembershipTick(2.2), state=accuser())
    state, later = after(MembershipTick(2.3), state=state)
    assert (LookAtNodes() in soon, LookAtNodes() in later) == (False, True)
    state, _ = after(Sight(2.4, "no answer"), state=state)
    assert LookAtNodes() not in after(MembershipTick(3.0), state=state)[1]


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


def test_a_coordinator_that_is_no_node_is_deposed_as_well() -> None:
    _, commands = after(NodesSeen(2.2, (node(ME),)), state=accuser())
    assert commands == [Depose(leader(ONE), None, node(ME), f"one is lost: {ENDED}.", has_ended=True)]


def test_voices_against_another_coordinator_do_not_count() -> None:
    state, _ = after(Accused(2.1, THREE, frozenset({TWO})), state=accuser())
    assert after(NodesSeen(2.2, tuple(map(node, (ONE, ME, TWO)))), state=state)[1] == []


def test_the_blind_and_those_without_an_accusation_depose_nobody() -> None:
    nodes = NodesSeen(2.2, (node(ONE), node(ME)))
    assert after(Sight(2.1, "no answer"), nodes, state=accuser())[1] == []
    assert after(nodes, state=follower())[1] == []
    assert after(LinkOpened(2.1, ONE), nodes, state=accuser())[1] == []


def test_what_is_said_of_somebody_else_changes_nothing() -> None:
    state = follower()
    for event in (LinkLost(2.0, TWO), LinkOpened(2.0, TWO), Probed(2.0, TWO, Answer.SILENT)):
        assert after(event, state=state) == (state, [])


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
