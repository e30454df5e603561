"""Agents without children, for the benchmark of the coordinator: what they decide is real, what they run is not.

Each has a lease and a record of its own, and decides by ``planning.agent``. They share one watch of ``plan/``, the
connections of a few threads that write, and one that keeps leases alive. A child starts, works and ends at once.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from unicron_elastic.planning.coordinate import agent
from unicron_elastic.planning.coordinate.agent import AgentState, handle
from unicron_elastic.planning.coordinate.node_status import NodeState, NodeStatus
from unicron_elastic.planning.coordinate.published import Published
from unicron_elastic.planning.coordinate.snapshot import JobPhase
from unicron_elastic.planning.model.jobs import JobSpec
from unicron_elastic.rendezvous.plan.mirror import PlanMirror
from unicron_elastic.rendezvous.records.plan import (
    PhaseRecord,
    parse_node_status,
    parse_order,
    parse_phase,
    parse_spec,
    status_text,
)
from unicron_elastic.rendezvous.records.plan_keys import (
    CURRENT,
    FAULTS,
    JOB_RECORDS,
    NODE_RECORDS,
    ORDERS,
    PLAN,
    PlannedJobKeys,
    job_of_key,
    order_key,
    status_key,
)
from unicron_elastic.rendezvous.store.interface import Change, Changes, Entry, LeaseGoneError, Put, Store, WatchItem

WRITERS = 4  # threads, each with a connection; an agent always has the same one
LEASE_TTL_S = 300.0
KINDS = {CURRENT: "plan", FAULTS: "faults", ORDERS: "orders", NODE_RECORDS: "agents", JOB_RECORDS: "jobs"}


@dataclass(slots=True)
class Seen:
    """One change of the store, at the moment (CLOCK_MONOTONIC) when the watch told of it."""

    at: float
    kind: str
    key: str
    revision: int
    entry: Entry | None


@dataclass(eq=False)
class Agent:
    """One node."""

    state: AgentState
    lease_id: int
    orders_done: int = 0
    is_lost: bool = False
    decided_at: float = 0.0  # when it had read its latest order
    todo: list[agent.Event] = field(default_factory=list)

    @property
    def node_id(self) -> str:
        """Another one each time that it comes."""
        return self.state.status.node_id


@dataclass(frozen=True, slots=True)
class JobNow:
    """What agents see of a job."""

    spec: JobSpec | None = None
    phase: PhaseRecord = field(default_factory=lambda: PhaseRecord(phase=JobPhase.SUBMITTED, reason=""))
    start: int = 0


class _Plan:
    """What the published plan wants. ``jobs_of``: by the key of a node's record."""

    def __init__(self, revision: int, jobs_of: dict[str, str], jobs: frozenset[str]) -> None:
        self.revision, self.jobs_of, self.jobs = revision, jobs_of, jobs
        self.seated = set(jobs_of.values()) - {""}


class Agents:
    """All of them, and what is seen of the store; as a context manager, it ends its threads."""

    def __init__(self, open_store: Callable[[], Store]) -> None:
        self._stores = [open_store() for _ in range(WRITERS)]
        self.store = open_store()
        self._inboxes: list[queue.SimpleQueue[tuple[Agent, agent.Event | Entry] | None]] = [
            queue.SimpleQueue() for _ in range(WRITERS)
        ]
        self._by_key: dict[str, Agent] = {}  # by the key of its orders
        self._jobs: dict[str, JobNow] = {}
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self.seen: list[Seen] = []
        self.statuses: dict[str, NodeStatus] = {}
        self.problems: list[str] = []
        self._unread: list[Change] = []  # for the mirror, which is read when a victim is wanted
        snapshot = self.store.read_prefix(PLAN)
        self._mirror = PlanMirror(snapshot)
        self._current: Entry | None = None
        self._plan: _Plan | None = None
        self.store.watch(snapshot, self._deliver)
        works = [(self._work, (inbox, store)) for inbox, store in zip(self._inboxes, self._stores, strict=True)]
        self._threads = [threading.Thread(target=do, args=args, daemon=True) for do, args in works]
        self._threads.append(threading.Thread(target=self._keep_alive, args=(open_store(),), daemon=True))
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for inbox in self._inboxes:
            inbox.put(None)
        for thread in self._threads:
            thread.join(10.0)
        for store in (*self._stores, self.store):
            store.close()

    def join(self, hosts: list[str], run: str) -> None:
        """Idle agents on these hosts; with ids that contain ``run``."""
        for number, host in enumerate(hosts):
            lease = self.store.grant(LEASE_TTL_S)
            status = NodeStatus(node_id=f"{host}/{run}", host=host, label=f"rack{number // 16:03}")
            found, node_id = Agent(AgentState(status=status), lease.lease_id), status.node_id
            self._by_key[order_key(status.node_id)] = found
            self.statuses[status_key(node_id)] = status  # at once: nothing is as planned from now on
            self.store.put(status_key(status.node_id), status_text(status).encode(), lease.lease_id)

    def lose(self, node_id: str, guards: dict[str, int]) -> float:
        """Removes a node as the coordinator of the heartbeats does. Returns the moment before that was sent."""
        self._by_key[order_key(node_id)].is_lost = True
        self.statuses.pop(status_key(node_id))
        at = time.monotonic()
        if self.store.commit(guards, deletes=[status_key(node_id)]) is None:
            raise RuntimeError(f"{node_id} could not be removed: the leader has changed")
        return at

    def submit(self, spec: JobSpec, puts: list[Put]) -> None:
        """A job comes."""
        self._jobs[spec.name] = JobNow(spec)
        self.store.commit({}, puts)

    def forget(self, node_id: str) -> None:
        """Ends the lease of one that is lost."""
        self.store.revoke(self._by_key.pop(order_key(node_id)).lease_id)

    def mirror(self) -> PlanMirror:
        """What the coordinator sees, brought up to date."""
        with self._lock:
            unread, self._unread = self._unread, []
        self._mirror.apply(unread)
        return self._mirror

    def settled_at(self, since: int) -> float:
        """When all was as planned, which it still is; 0.0 if it is not. ``since``: where in ``seen`` to begin."""
        plan = self._read_plan()
        if plan is None:
            return 0.0
        statuses, jobs = self.statuses.copy(), self._jobs.copy()
        if statuses.keys() != plan.jobs_of.keys() or jobs.keys() != plan.jobs:
            return 0.0
        for key, status in statuses.items():
            if status.state in (NodeState.JOINING, NodeState.LEAVING) or status.job != plan.jobs_of[key]:
                return 0.0
        if any((job.phase.phase is JobPhase.RUNNING) != (name in plan.seated) for name, job in jobs.items()):
            return 0.0
        if self._current is None or self._current.revision != plan.revision:
            return 0.0
        return max((each.at for each in self.seen[since:] if each.kind in ("plan", "agents", "jobs")), default=0.0)

    def _read_plan(self) -> _Plan | None:
        entry = self._current
        if entry is None:
            return None
        if self._plan is None or self._plan.revision != entry.revision:
            told = Published.from_json(entry.value, entry.revision)
            jobs_of = {status_key(node_id): job for node_id, job in told.job_of.items()}
            self._plan = _Plan(entry.revision, jobs_of, frozenset(name for name, _revision in told.jobs))
        return self._plan

    # -- what comes from the store -------------------------------------------------------------------------------------

    def _deliver(self, item: WatchItem) -> None:
        at = time.monotonic()
        if not isinstance(item, Changes):
            self.problems.append(f"{item!r}")
            return
        with self._lock:
            self._unread += item.changes
        for change in item.changes:
            kind = next(kind for prefix, kind in KINDS.items() if change.key.startswith(prefix))
            self._take(kind, change)
            self.seen.append(Seen(at, kind, change.key, change.revision, change.entry))

    def _take(self, kind: str, change: Change) -> None:
        entry = change.entry
        if kind == "plan":
            self._current = entry
        elif kind == "agents":
            if entry is None:
                self.statuses.pop(change.key, None)
            elif (found := self._by_key.get(ORDERS + change.key.removeprefix(NODE_RECORDS))) is not None:
                self.statuses[change.key] = _told(entry) or found.state.status
        elif kind == "orders" and entry is not None:
            if (found := self._by_key.get(change.key)) is not None and not found.is_lost:
                self._post(found, entry)
        elif kind == "jobs":
            self._take_job(job_of_key(change.key), change.key, entry)

    def _take_job(self, name: str, key: str, entry: Entry | None) -> None:
        keys, known = PlannedJobKeys(name), self._jobs.get(name, JobNow())
        if key == keys.spec:
            spec = None if entry is None else parse_spec(entry)
            self._jobs[name] = JobNow(spec, known.phase, known.start)
        elif key == keys.phase and entry is not None:
            self._jobs[name] = JobNow(known.spec, (found := parse_phase(entry)), found.start)
        else:
            return
        for each in list(self._by_key.values()):
            if each.state.status.job == name and not each.is_lost:
                self._post(each, self._job_seen(name))

    def _job_seen(self, name: str) -> agent.JobSeen:
        now = self._jobs.get(name, JobNow())
        return agent.JobSeen(
            at_unix_s=time.time(),
            job=name,
            spec=now.spec,
            phase=now.phase.phase,
            start=now.start,
            nodes=now.phase.nodes,
        )

    def _post(self, to: Agent, what: agent.Event | Entry) -> None:
        self._inboxes[hash(to.node_id) % WRITERS].put((to, what))

    # -- what agents do ------------------------------------------------------------------------------------------------

    def _work(self, inbox: queue.SimpleQueue[tuple[Agent, agent.Event | Entry] | None], store: Store) -> None:
        while (found := inbox.get()) is not None:
            to, what = found
            if to.is_lost:
                continue
            try:
                if isinstance(what, Entry):
                    self._obey(to, what, store)
                else:
                    self._handle(to, what, store)
                while to.todo:
                    self._handle(to, to.todo.pop(0), store)
            except LeaseGoneError:
                if not to.is_lost:
                    self.problems.append(f"the lease of {to.node_id} has run out")
            except Exception as error:
                self.problems.append(f"{to.node_id}: {error!r}")

    def _obey(self, to: Agent, entry: Entry, store: Store) -> None:
        """As ``unicron agent`` does, which reads the spec of the new job first to see whether it can run here."""
        if entry.revision <= to.orders_done:
            return
        order = parse_order(entry)
        if order.target:
            store.read(PlannedJobKeys(order.target).spec)
        to.orders_done, to.decided_at = entry.revision, time.monotonic()
        self._handle(to, agent.Ordered(at_unix_s=time.time(), target=order.target, reason=order.reason), store)

    def _handle(self, to: Agent, event: agent.Event, store: Store) -> None:
        to.state, commands = handle(to.state, event)
        for command in commands:
            match command:
                case agent.SayStatus():
                    text = status_text(command.status).encode()
                    store.put(status_key(to.node_id), text, to.lease_id)
                case agent.WatchJob():
                    if command.job:
                        to.todo.append(self._job_seen(command.job))
                case agent.StartChild():
                    to.todo.append(agent.ChildWorks(at_unix_s=time.time()))
                case agent.RecallChild() | agent.StopChild():
                    to.todo.append(agent.ChildEnded(at_unix_s=time.time(), exit_code=0))
                case agent.EndJob() | agent.TellJob():
                    self.problems.append(command.reason)

    def _keep_alive(self, store: Store) -> None:
        """Each lease three times in its time."""
        with store:
            while not self._is_over.is_set():
                alive = [each for each in list(self._by_key.values()) if not each.is_lost]
                for each in alive:
                    if self._is_over.wait(LEASE_TTL_S / 3.0 / len(alive)):
                        return
                    if not each.is_lost and store.keep_alive(each.lease_id) is None:
                        self.problems.append(f"the lease of {each.node_id} has run out")
                if not alive:
                    self._is_over.wait(0.5)


def _told(entry: Entry) -> NodeStatus | None:
    try:
        return parse_node_status(entry)
    except ValueError:
        return None
