"""A cluster of agents in memory, to try what ``coordination`` decides: a store, a network, and faults by a seed.

The times of the network are those that ``links`` and the kernel bring about: see its constants. A fault of the
implementation around the decisions is not found here.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from unicron_elastic.membership import coordination as c
from unicron_elastic.membership.coordination import Answer, CoordinationState, Leader, Node

TTL_S = 3.0
TICK_S = 0.1
GREETING_S = 2.0
PROBE_S = 0.25
SYN_AGAIN_S = 1.0
FAULT_S_MAX = 5.0


@dataclass(eq=False)
class Agent:
    """One process. What it ``accuses`` gets into the store as soon as that can be reached."""

    node_id: str
    host: str
    state: CoordinationState
    is_alive: bool = True
    is_stopped: bool = False
    is_blind: bool = False
    lease_ends_at: float = TTL_S
    store_free_at: float = 0.0
    accuses: str = ""
    is_put_out: bool = False  # by another one: it does not come back before it is reached
    waiting: list[Callable[[], None]] = field(default_factory=list)  # until it goes on


@dataclass(eq=False)
class Link:
    """A connection; each end is dropped by its own process."""

    client: Agent
    server: Agent
    client_is_up: bool = True
    server_is_up: bool = False
    is_greeted: bool = False


class Cluster:
    """Some hosts with an agent each, and all that befalls them."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 0.0
        self.story: list[str] = []
        self.hosts = [f"h{n}" for n in range(self.random.randint(2, 6))]
        self.off: set[str] = set()
        self.cut: dict[frozenset[str], float] = {}  # pairs of hosts, and since when
        self.troubled_at: dict[str, float] = {}  # hosts and agents: when they last were not well
        self.is_down = False
        self.slow_s = 0.0  # that a call of the store may take
        self.revision = 1
        self.leader: Leader | None = None
        self.nodes: dict[str, Node] = {}
        self.accusations: dict[str, str] = {}
        self.known: Mapping[str, Node] = {}  # to who decides at this moment
        self.links: list[Link] = []
        self.agents: list[Agent] = []
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        for host in self.hosts:
            self.start_agent(host)

    # -- time ----------------------------------------------------------------------------------------------------------

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Does something later."""
        heapq.heappush(self._heap, (self.now + seconds, next(self._numbers), call))

    def run(self, until: float) -> None:
        """Lets time pass."""
        while self._heap and self._heap[0][0] <= until:
            self.now, _, call = heapq.heappop(self._heap)
            call()
        self.now = until

    def soon(self) -> float:
        """Seconds that something usual takes."""
        return self.random.choice((0.001, 0.003, 0.01, 0.05))

    def tell(self, words: str) -> None:
        """Remembers what happened, for whoever reads of a failure."""
        self.story.append(f"{self.now:7.3f} {words}")

    # -- agents --------------------------------------------------------------------------------------------------------

    def start_agent(self, host: str) -> None:
        """Another process on a host."""
        number = next(self._numbers)
        state = CoordinationState(me=f"{host}/{number}", host=host)
        agent = Agent(f"{host}/{number}", host, state, lease_ends_at=self.now + TTL_S)
        self.agents.append(agent)
        self.tell(f"{agent.node_id} begins")
        self._enter(agent)
        self.after(self.soon(), lambda: self.see(agent))
        self.after(self.random.random() * TICK_S, lambda: self._tick(agent))
        self.after(self.random.random(), lambda: self._beat(agent))

    def does(self, agent: Agent, call: Callable[[], None]) -> None:
        """Does something in a process: once it goes on, never if it has ended."""
        if agent.is_alive:
            (agent.waiting.append if agent.is_stopped else lambda now: now())(call)

    def handle(self, agent: Agent, event: c.Event) -> None:
        """One event, and all that comes of it."""
        before = agent.state
        self.known = before.nodes
        agent.state, commands = c.handle(before, event)
        was, now = before.leader, agent.state.leader
        if was is not now and (was is None or now is None or was.node_id != now.node_id):
            for link in self._links_of(agent):
                self._close(agent, link)
        for command in commands:
            self._do(agent, command)

    def see(self, agent: Agent) -> None:
        """What the agent sees in the store."""
        if agent.is_blind != bool(agent.state.blind):
            self.handle(agent, c.Sight(self.now, "no answer" if agent.is_blind else ""))
        if agent.is_blind:
            return
        if agent.state.leader != self.leader:
            self.handle(agent, c.CoordinatorSeen(self.now, self.leader))
        leader = "" if self.leader is None else self.leader.node_id
        accusers = frozenset(who for who, whom in self.accusations.items() if whom == leader)
        self.handle(agent, c.Accused(self.now, leader, accusers))

    def decided(self, agent: Agent, node: Node, command: c.Remove | c.Depose) -> None:
        """An agent wants to remove a node, which the store may not do any more."""
        self.tell(f"{agent.node_id} decides on {node.node_id}: {command.reason}")

    def _tick(self, agent: Agent) -> None:
        if agent.is_alive:
            if not agent.is_stopped:
                self.handle(agent, c.MembershipTick(self.now))
            self.after(TICK_S, lambda: self._tick(agent))

    def _do(self, agent: Agent, command: c.Command) -> None:
        match command:
            case c.Connect():
                self._connect(agent, command.leader.node_id)
            case c.Probe():
                self._probe(agent, command.node_id)
            case c.Remove():
                self.decided(agent, command.node, command)
                self._ask_store(agent, lambda: self._remove(agent, command))
            case c.Depose():
                if command.node is not None:
                    self.decided(agent, command.node, command)
                self._ask_store(agent, lambda: self._depose(agent, command))
            case c.Accuse() | c.Withdraw():
                self._ask_store(agent, lambda: self._enter(agent))
                agent.accuses = command.leader if isinstance(command, c.Accuse) else ""
            case _:
                self._ask_store(agent, lambda: self._say(agent, command))

    # -- the store -----------------------------------------------------------------------------------------------------

    def _ask_store(self, agent: Agent, call: Callable[[], None]) -> None:
        agent.store_free_at = max(agent.store_free_at, self.now) + self.soon() + self.random.random() * self.slow_s
        self.after(
            agent.store_free_at - self.now,
            lambda: self.does(agent, lambda: None if agent.is_blind or self.is_down else call()),
        )

    def _say(self, agent: Agent, command: c.Command) -> None:
        match command:
            case c.BecomeCoordinator():
                if command.revision == (0 if self.leader is None else self.leader.revision):
                    self._lead(agent)
            case c.LookAtNodes():
                nodes = tuple(self.nodes.values())
                self.after(
                    self.soon(), lambda: self.does(agent, lambda: self.handle(agent, c.NodesSeen(self.now, nodes)))
                )

    def _lead(self, agent: Agent) -> None:
        if agent.lease_ends_at > self.now:
            self.revision += 1
            self.leader = Leader(agent.node_id, agent.host, f"{agent.host}:1", self.revision)
            self._changed(f"{agent.node_id} leads")

    def _remove(self, agent: Agent, command: c.Remove) -> None:
        held, leader = self.nodes.get(command.node.node_id), self.leader
        if held != command.node or leader is None or leader.revision != command.leader_revision:
            return
        assert leader.node_id == agent.node_id, f"{agent.node_id} removes {held.node_id}, and {leader.node_id} leads"
        self._put_out(command.node.node_id)
        self._changed(f"{agent.node_id} removes {command.node.node_id}")

    def _depose(self, agent: Agent, command: c.Depose) -> None:
        if self.leader is not None and self.leader.revision == command.leader.revision:
            if agent.lease_ends_at > self.now:
                self._put_out(command.leader.node_id)
            self._lead(agent)

    def _enter(self, agent: Agent) -> None:
        """What an agent has said is there, under its lease."""
        agent.is_put_out = agent.is_put_out and bool(agent.state.why_unreached)
        if agent.node_id not in self.nodes and not agent.is_put_out:
            self.revision += 1
            address = f"{agent.host}:{agent.node_id.partition('/')[2]}"
            self.nodes[agent.node_id] = Node(agent.node_id, agent.host, address, "job", self.revision)
        if self.accusations.get(agent.node_id, "") != agent.accuses:
            self.accusations.pop(agent.node_id, None)
            self.accusations |= {agent.node_id: agent.accuses} if agent.accuses else {}
            self._changed(f"{agent.node_id} accuses {agent.accuses or 'nobody'}")

    def _beat(self, agent: Agent) -> None:
        """A third of its lease: it is kept alive, and what was removed is said again, as the next round does."""
        if not agent.is_alive:
            return
        if not (agent.is_stopped or agent.is_blind or self.is_down):
            agent.lease_ends_at = self.now + TTL_S
            self._enter(agent)
            self.see(agent)
        self.after(TTL_S / 3, lambda: self._beat(agent))
        self.after(TTL_S, self.end_leases)

    def end_leases(self) -> None:
        """Those whose time is over."""
        ended = {agent.node_id for agent in self.agents if agent.lease_ends_at <= self.now}
        for node_id in ended & (self.nodes.keys() | self.accusations.keys()) if not self.is_down else ():
            self._forget(node_id)
            self._changed(f"the lease of {node_id} is gone")

    def _put_out(self, node_id: str) -> None:
        self._forget(node_id)
        self.agent(node_id).is_put_out = True

    def _forget(self, node_id: str) -> None:
        self.nodes.pop(node_id, None)
        self.accusations.pop(node_id, None)
        if self.leader is not None and self.leader.node_id == node_id:
            self.leader = None

    def _changed(self, words: str) -> None:
        self.tell(words)
        for agent in self.agents:
            self.after(self.soon(), lambda agent=agent: self.does(agent, lambda: self.see(agent)))  # type: ignore[misc]

    # -- the network ---------------------------------------------------------------------------------------------------

    def reaches(self, one: str, other: str) -> bool:
        """Whether what one host sends arrives at the other."""
        return not {one, other} & self.off and (one == other or frozenset((one, other)) not in self.cut)

    def agent(self, node_id: str) -> Agent:
        """Whoever is called so, alive or not."""
        return next(agent for agent in self.agents if agent.node_id == node_id)

    def _links_of(self, agent: Agent) -> list[Link]:
        return [link for link in self.links if agent in (link.client, link.server)]

    def _connect(self, agent: Agent, node_id: str) -> None:
        for link in [link for link in self.links if link.client is agent]:
            self._close(agent, link)
        link = Link(agent, self.agent(node_id))
        self.links.append(link)
        self.after(GREETING_S, lambda: None if link.is_greeted else self._break(link, agent))
        if self.reaches(agent.host, link.server.host):
            self.after(self.soon(), lambda: self._arrive(link))

    def _arrive(self, link: Link) -> None:
        server = link.server
        if not server.is_alive:
            self._break(link, link.client)
        else:
            self.does(server, lambda: self._greet(link))

    def _greet(self, link: Link) -> None:
        client, server = link.client, link.server
        if not link.client_is_up or not self.reaches(client.host, server.host):
            return
        if not server.state.leads:
            self.after(self.soon(), lambda: self._break(link, client))
            return
        for old in [old for old in self.links if old.server is server and old.client is client and old is not link]:
            self._close(server, old)
        link.is_greeted = link.server_is_up = True
        self.handle(server, c.LinkOpened(self.now, client.node_id))
        self.after(self.soon(), lambda: self.does(client, lambda: self._opened(link)))

    def _opened(self, link: Link) -> None:
        if link.client_is_up:
            self.handle(link.client, c.LinkOpened(self.now, link.server.node_id))

    def _close(self, agent: Agent, link: Link) -> None:
        """One end goes without a word to its own process; the other kernel hears of it if it can."""
        if agent is link.client:
            link.client_is_up, other = False, link.server
        else:
            link.server_is_up, other = False, link.client
        if not (link.client_is_up or link.server_is_up):
            self.links = [each for each in self.links if each is not link]
        is_heard = self.reaches(link.client.host, link.server.host)
        self.after(self.soon() if is_heard else 0.6, lambda: self._break(link, other))

    def _break(self, link: Link, agent: Agent) -> None:
        self.does(agent, lambda: self._lose(link, agent))

    def _lose(self, link: Link, agent: Agent) -> None:
        is_up = link.client_is_up if agent is link.client else link.server_is_up
        if is_up:
            self._close(agent, link)
            other = link.server if agent is link.client else link.client
            self.handle(agent, c.LinkLost(self.now, other.node_id))

    def _probe(self, agent: Agent, node_id: str) -> None:
        asked, began = self.agent(node_id), self.now
        is_reached = self.reaches(agent.host, asked.host)

        def answer() -> None:
            is_late = self.now > began + SYN_AGAIN_S  # this process was stopped meanwhile, and its kernel was not
            is_heard = is_reached or (is_late and self.reaches(agent.host, asked.host))
            told = Answer.SILENT if not is_heard else Answer.ANSWERS if asked.is_alive else Answer.REFUSED
            self.handle(agent, c.Probed(self.now, node_id, told))

        self.after(self.soon() if is_reached else PROBE_S, lambda: self.does(agent, answer))

    # -- faults --------------------------------------------------------------------------------------------------------

    def fault(self) -> None:
        """One of all that may happen."""
        host, agent = self.random.choice(self.hosts), self.random.choice(self.agents)
        seconds = self.random.choice((0.2, 0.5, 0.7, 1.0, 1.5, 3.0, FAULT_S_MAX))
        pairs = [frozenset((host, other)) for other in self.hosts if other != host]
        faults = ("pair", "cut", "cut", "split", "kill", "stop", "blind", "down", "slow", "power", "join")
        match self.random.choice(faults):
            case "pair":
                self._cut([self.random.choice(pairs)], seconds)
            case "split":
                self.split(self.random.sample(self.hosts, self.random.randint(1, len(self.hosts) - 1)), seconds)
            case "cut":
                self._cut(pairs, seconds)
            case "kill":
                self.end(agent)
            case "stop" if agent.is_alive:
                self.tell(f"{agent.node_id} is stopped for {seconds} s")
                agent.is_stopped = True
                self.after(seconds, lambda: self._go_on(agent))
            case "blind":
                self.tell(f"{agent.node_id} is blind for {seconds} s")
                self._blind(agent, is_blind=True)
                self.after(seconds, lambda: self._blind(agent, is_blind=False))
            case "down":
                self._store_is_down(is_down=True)
                self.after(seconds, lambda: self._store_is_down(is_down=False))
            case "slow":
                self.slow_s = seconds / 10
                self.after(seconds, lambda: setattr(self, "slow_s", 0.0))
            case "power":
                self.tell(f"{host} is off for {seconds} s")
                self.off.add(host)
                self._watch_links()
                for each in self.agents:
                    if each.host == host:
                        self.end(each)
                self.after(seconds, lambda: self._power_on(host))
            case "join" if host not in self.off:
                self.start_agent(host)

    def split(self, side: Sequence[str], seconds: float) -> None:
        """Cuts all hosts of one side off from all others."""
        others = [host for host in self.hosts if host not in side]
        self._cut([frozenset(pair) for pair in itertools.product(side, others)], seconds)

    def end(self, agent: Agent) -> None:
        """SIGKILL, unless it is the last one."""
        if agent.is_alive and sum(each.is_alive for each in self.agents) > 1:
            self.tell(f"{agent.node_id} ends")
            agent.is_alive, agent.waiting = False, []
            for link in self._links_of(agent):
                self._close(agent, link)

    def _power_on(self, host: str) -> None:
        self.off.discard(host)
        self.start_agent(host)

    def _go_on(self, agent: Agent) -> None:
        agent.is_stopped = False
        self.troubled_at[agent.node_id] = self.now
        waiting, agent.waiting = agent.waiting, []
        for call in waiting:
            call()

    def _blind(self, agent: Agent, *, is_blind: bool) -> None:
        agent.is_blind = is_blind
        self.after(self.soon(), lambda: self.does(agent, lambda: self.see(agent)))

    def _store_is_down(self, *, is_down: bool) -> None:
        self.tell(f"the store is {'down' if is_down else 'up'}")
        self.is_down = is_down
        for agent in self.agents:
            self._blind(agent, is_blind=is_down)
            agent.lease_ends_at = max(agent.lease_ends_at, self.now + TTL_S) if agent.node_id in self.nodes else 0.0

    def _cut(self, pairs: list[frozenset[str]], seconds: float) -> None:
        self.tell(f"cut for {seconds} s: {sorted(sorted(pair) for pair in pairs)}")
        for pair in pairs:
            self.cut.setdefault(pair, self.now)
        self._watch_links()
        self.after(seconds, lambda: self._mend(pairs))

    def _mend(self, pairs: list[frozenset[str]]) -> None:
        for pair in pairs:
            if self.cut.pop(pair, None) is not None:
                self.troubled_at |= dict.fromkeys(pair, self.now)
                self.tell(f"mended: {sorted(pair)}")

    def _watch_links(self) -> None:
        """The kernels give up what is silent for half a second after the next beat."""
        for link in self.links:
            pair = frozenset((link.client.host, link.server.host))
            if not self.reaches(*(link.client.host, link.server.host)):
                self.after(0.5 + self.random.random() * 0.2, lambda link=link, pair=pair: self._give_up(link, pair))  # type: ignore[misc]

    def _give_up(self, link: Link, pair: frozenset[str]) -> None:
        if pair & self.off or self.now - self.cut.get(pair, self.now) >= 0.5:
            self._break(link, link.client)
            self._break(link, link.server)
