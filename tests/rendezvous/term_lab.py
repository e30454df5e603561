"""A cluster that is planned for, in memory: agents that do as they are told, and a store that knows who wrote what."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from unicron_elastic.base.quarantine import LAUNCHER, Quarantined
from unicron_elastic.planning.coordinate.node_status import NodeState, NodeStatus, Refusal
from unicron_elastic.planning.coordinate.published import Published
from unicron_elastic.planning.coordinate.snapshot import JobPhase
from unicron_elastic.planning.model.jobs import GivenRates, JobSpec
from unicron_elastic.rendezvous.plan.term import Term
from unicron_elastic.rendezvous.records.cluster import LEADER, quarantine_key, quarantine_text
from unicron_elastic.rendezvous.records.plan import (
    Order,
    PhaseRecord,
    parse_node_status,
    parse_order,
    parse_phase,
    spec_text,
    status_text,
)
from unicron_elastic.rendezvous.records.plan_keys import CURRENT, ORDERS, PlannedJobKeys, order_key, status_key
from unicron_elastic.rendezvous.store.interface import Put, Store
from unicron_elastic.testing.memory_store import MemoryServer, MemoryStore

NOW = 1.7e9
LONG_S = 86_400.0


def spec(name: str, per_node: float = 1.0, most: int = 8, **options: Any) -> JobSpec:
    """A job whose FLOP/s grow with nodes, a little less with each: ``per_node`` TFLOP/s on the first."""
    rates = tuple(per_node * 1e12 * count * (1.0 - 0.4 * count / most) for count in range(most + 1))
    told = {"name": name, "command": ("train",), "directory": "/", "throughput": GivenRates(rates), **options}
    return JobSpec(**told)


@dataclass(frozen=True)
class Commit:
    """One that was tried. ``revision`` None: it was refused."""

    guards: Mapping[str, int]
    keys: tuple[str, ...]
    revision: int | None


class TermStore(MemoryStore):
    """What one coordinator has of the store. ``before`` is called with the keys of each commit, and may raise."""

    def __init__(self, server: MemoryServer) -> None:
        super().__init__(server)
        self.commits: list[Commit] = []
        self.before: Callable[[tuple[str, ...]], None] = lambda _keys: None

    def commit(
        self,
        guards: Mapping[str, int],
        puts: Iterable[Put] = (),
        deletes: Iterable[str] = (),
        *,
        timeout_s: float | None = None,
    ) -> int | None:
        puts = list(puts)
        keys = tuple(put.key for put in puts)
        self.before(keys)
        revision = super().commit(guards, puts, deletes, timeout_s=timeout_s)
        self.commits.append(Commit(guards, keys, revision))
        return revision

    def written(self, prefix: str = "") -> list[str]:
        """The keys of what was written, in order."""
        return [key for each in self.commits if each.revision for key in each.keys if key.startswith(prefix)]


def read_order(store: Store, host: str) -> Order | None:
    """What a node is told."""
    entry = store.read(order_key(f"{host}/agent")).entry
    return None if entry is None else parse_order(entry)


def read_published(store: Store) -> Published | None:
    """The plan."""
    entry = store.read(CURRENT).entry
    return None if entry is None else Published.from_json(entry.value, entry.revision)


class Cluster:
    """The store, agents that obey at once, and one coordinator's term after the other."""

    def __init__(self) -> None:
        self.monotonic = 0.0
        self.now = NOW
        self.server = MemoryServer(lambda: self.monotonic)
        self.store = MemoryStore(self.server)
        self.said: list[str] = []
        self.leases: dict[str, int] = {}
        self.refusing: set[tuple[str, str]] = set()  # (host, job)
        self._done: dict[str, int] = {}
        self.leader_revision = 0
        self.terms: list[tuple[TermStore, Term]] = []
        self.elect()

    # -- the coordinator -----------------------------------------------------------------------------------------------

    def elect(self) -> None:
        """Another coordinator, who begins with nothing."""
        self.leader_revision = self.store.put(LEADER, b"leader")
        self.begin()

    def begin(self) -> None:
        """The same, anew."""
        store = TermStore(self.server)
        self.terms.append((store, Term(store, self.leader_revision, self.said.append)))

    @property
    def term_store(self) -> TermStore:
        return self.terms[-1][0]

    @property
    def term(self) -> Term:
        return self.terms[-1][1]

    def look(self) -> None:
        """Once, with all news."""
        self.term.wait(0.0)
        self.term.look(self.now)

    def look_on(self) -> None:
        """Until nothing is written any more; no agent does anything."""
        for _ in range(50):
            before = self.server.revision
            self.look()
            if self.server.revision == before:
                return
        raise AssertionError(f"the coordinator writes for ever: {self.term_store.written()[-5:]}")

    def settle(self) -> None:
        """Until nothing is left to be done by anybody."""
        for _ in range(50):
            before = self.server.revision
            self.look_on()
            self.obey()
            if self.server.revision == before:
                return
        raise AssertionError(f"the cluster does not settle: {self.said[-5:]}")

    def commits_of(self, prefix: str) -> list[Commit]:
        """What the coordinator tried to write there."""
        return [each for each in self.term_store.commits if any(key.startswith(prefix) for key in each.keys)]

    # -- agents --------------------------------------------------------------------------------------------------------

    def start(self, *hosts: str, **options: Any) -> None:
        """Idle nodes."""
        for host in hosts:
            self.leases[host] = self.store.grant(LONG_S).lease_id
            self.say(NodeStatus(node_id=f"{host}/agent", host=host, **options))

    def say(self, status: NodeStatus) -> None:
        """What a node does."""
        self.store.put(status_key(status.node_id), status_text(status).encode(), self.leases[status.host])

    def status(self, host: str) -> NodeStatus:
        entry = self.store.read(status_key(f"{host}/agent")).entry
        assert entry is not None
        return parse_node_status(entry)

    def lose(self, host: str) -> None:
        """A node is gone, with all that is bound to its lease."""
        self.store.revoke(self.leases.pop(host))

    def remove(self, host: str) -> None:
        """A node is removed by the coordinator, while its lease still runs."""
        self.store.delete(status_key(f"{host}/agent"))
        self.leases.pop(host)

    def order(self, host: str) -> Order | None:
        return read_order(self.store, host)

    def orders(self) -> dict[str, str]:
        """Where each node is sent, by host."""
        found = self.store.read_prefix(ORDERS).entries
        return {each.key.removeprefix(ORDERS).partition("%2F")[0]: parse_order(each).target for each in found}

    def obey(self) -> None:
        """All agents go where they are sent, and work where the job runs."""
        for host in sorted(self.leases):
            entry = self.store.read(order_key(f"{host}/agent")).entry
            if entry is not None and entry.revision > self._done.get(host, 0):
                self._done[host] = entry.revision
                self._go(self.status(host), parse_order(entry).target)
        for host in sorted(self.leases):
            status = self.status(host)
            if status.state is NodeState.JOINING and self.phase(status.job) is JobPhase.RUNNING:
                self.say(replace(status, state=NodeState.WORKING))
            elif status.job and self.phase(status.job) in (JobPhase.FINISHED, JobPhase.CANCELLED):
                self._go(status, "")

    def _go(self, status: NodeStatus, target: str) -> None:
        if (status.host, target) in self.refusing:
            self.say(replace(status, refusals=(Refusal(target, self.now),)))
        elif target != status.job:
            state = NodeState.JOINING if target else NodeState.IDLE
            self.say(replace(status, state=state, job=target))

    # -- jobs and operators --------------------------------------------------------------------------------------------

    def submit(self, *specs: JobSpec) -> None:
        """Jobs, or other specs for those that there are."""
        for each in specs:
            self.store.put(PlannedJobKeys(each.name).spec, spec_text(each))

    def phase_record(self, name: str) -> PhaseRecord:
        entry = self.store.read(PlannedJobKeys(name).phase).entry
        return PhaseRecord(phase=JobPhase.SUBMITTED, reason="") if entry is None else parse_phase(entry)

    def phase(self, name: str) -> JobPhase:
        return self.phase_record(name).phase

    def working(self, name: str) -> list[str]:
        """The hosts on which a job works."""
        states = {host: self.status(host) for host in sorted(self.leases)}
        return [host for host, each in states.items() if each.job == name and each.state is NodeState.WORKING]

    def keep_out(self, host: str, by: str, until: float | None = None) -> None:
        found = Quarantined(node=host, reason="why", since=0.0, until=until, by=by, is_broken=by == LAUNCHER)
        self.store.put(quarantine_key(host), quarantine_text(found))

    @property
    def published(self) -> Published:
        found = read_published(self.store)
        assert found is not None, "there is no plan"
        return found


def two_jobs(nodes: int = 6) -> Cluster:
    """chat and code, which have what they are to have."""
    cluster = Cluster()
    cluster.start(*(f"h{place}" for place in range(nodes)))
    cluster.submit(spec("chat", 1.2), spec("code", 1.0, min_nodes=2))
    cluster.settle()
    return cluster
