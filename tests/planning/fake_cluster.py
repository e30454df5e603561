"""A small cluster without processes: agents that obey, refuse, dawdle and die, and a store that compares and sets.

Time is a number of seconds. ``wall`` is what the coordinator's clock shows, which may jump. How long an agent takes
depends on its id and on how often it has moved, so that what one does cannot change what happens to another.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from unicron_elastic.planning.allocate.plan_table import build_table
from unicron_elastic.planning.coordinate.coordinator import (
    AdoptRates,
    BuildTable,
    Command,
    CoordinatorState,
    PublishPlan,
    SnapshotSeen,
    TableBuilt,
    handle,
)
from unicron_elastic.planning.coordinate.node_status import Health, NodeState, NodeStatus, Refusal
from unicron_elastic.planning.coordinate.published import Published
from unicron_elastic.planning.coordinate.reconcile import LendNode, ReturnNode, StartJob, StopJob
from unicron_elastic.planning.coordinate.snapshot import ClusterSnapshot, JobPhase, JobStatus
from unicron_elastic.planning.model.jobs import GivenRates, JobSpec
from unicron_elastic.planning.model.tasks import Transition

MOVING = (NodeState.JOINING, NodeState.LEAVING)
START_UNIX_S = 1.7e9


def spec(name: str, **options: object) -> JobSpec:
    """A job that runs anything."""
    told = {"name": name, "command": ("train",), "directory": "/", "throughput": GivenRates((0.0, 1.0)), **options}
    return JobSpec(**told)  # type: ignore[arg-type]


def job(name: str, rates: list[float], **options: object) -> JobStatus:
    """A submitted job with rates in TFLOP/s that are known."""
    found = tuple(rate * 1e12 for rate in rates)
    return JobStatus(spec=spec(name, **options), rates_flops=found, newest_flops=found, transition=Transition.of(60.0))


def nodes(count: int, **options: object) -> list[NodeStatus]:
    """Idle nodes n0, n1, ... on hosts h0, h1, ..."""
    return [NodeStatus(node_id=f"n{place}", host=f"h{place}", **options) for place in range(count)]  # type: ignore[arg-type]


A = job("a", [0, 3, 6, 8.5, 9], min_nodes=1)
B = job("b", [0, 1, 2, 3, 4, 5, 6], min_nodes=2, weight=2.0)


@dataclass
class FakeCluster:
    """The store and the agents."""

    seed: int = 0
    nodes: dict[str, NodeStatus] = field(default_factory=dict)
    jobs: dict[str, JobStatus] = field(default_factory=dict)
    catalogue: dict[str, JobStatus] = field(default_factory=dict)  # what may be submitted
    published: Published | None = None
    now_s: float = 0.0
    skew_s: float = 0.0  # of the coordinator's clock
    revision: int = 1
    started: int = 0  # agents so far
    refusing: set[tuple[str, str]] = field(default_factory=set)  # (host, job)
    moves: dict[str, int] = field(default_factory=dict)
    due_s: dict[str, float] = field(default_factory=dict)
    on_their_way: list[tuple[float, Command]] = field(default_factory=list)
    state: CoordinatorState = field(default_factory=CoordinatorState)
    most_delay_s: float = 0.0  # of a command
    lost_share: float = 0.0  # of commands that never arrive
    builds_tables: bool = True
    chance: random.Random = field(default_factory=lambda: random.Random(0))

    @property
    def wall(self) -> float:
        return START_UNIX_S + self.now_s + self.skew_s

    def snapshot(self) -> ClusterSnapshot:
        return ClusterSnapshot(
            nodes=tuple(self.nodes.values()), jobs=tuple(self.jobs.values()), published=self.published
        )

    def copy(self) -> FakeCluster:
        """Another one that goes its own way from here on, and whose agents obey."""
        own = {"nodes": dict(self.nodes), "jobs": dict(self.jobs), "moves": dict(self.moves), "due_s": dict(self.due_s)}
        return replace(self, **own, on_their_way=[], refusing=set())  # type: ignore[arg-type]

    def next_revision(self) -> int:
        self.revision += 1
        return self.revision

    # -- what happens to it ----------------------------------------------------------------------------------------

    def start(self, host: str, label: str = "") -> None:
        """An agent starts on a host that has none."""
        if all(node.host != host for node in self.nodes.values()):
            self.started += 1
            node_id = f"{host}/{self.started}"
            self.nodes[node_id] = NodeStatus(node_id=node_id, host=host, label=label)

    def lose(self, node_id: str) -> None:
        del self.nodes[node_id]

    def submit(self, found: JobStatus) -> None:
        old = self.jobs.get(found.name)
        if old is None or not old.is_alive:
            self.jobs[found.name] = replace(found, revision=self.next_revision())

    def end(self, name: str, phase: JobPhase) -> None:
        self.jobs[name] = replace(self.jobs[name], phase=phase)

    def respec(self, name: str, **options: object) -> None:
        old = self.jobs[name]
        changed = replace(old.spec, **options)  # type: ignore[arg-type]
        self.jobs[name] = replace(old, spec=changed, revision=self.next_revision())

    def measure(self, name: str, factor: float) -> None:
        found = tuple(rate * factor for rate in self.jobs[name].newest_flops)
        self.jobs[name] = replace(self.jobs[name], newest_flops=found)

    # -- the agents ------------------------------------------------------------------------------------------------

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        arrived = [each for each in self.on_their_way if each[0] <= self.now_s]
        self.on_their_way = [each for each in self.on_their_way if each[0] > self.now_s]
        for _, command in arrived:
            self.obey(command)
        for node in list(self.nodes.values()):
            self._work(node)

    def _work(self, node: NodeStatus) -> None:
        alive = {name for name, each in self.jobs.items() if each.is_alive}
        if node.state in (NodeState.WORKING, NodeState.JOINING) and node.job not in alive:
            return self._become(node, state=NodeState.LEAVING)
        if node.state not in MOVING or self.now_s < self.due_s.get(node.node_id, 0.0):
            return None
        if node.state is NodeState.JOINING:
            if self.jobs[node.job].phase is JobPhase.RUNNING:
                self._become(node, state=NodeState.WORKING)
            return None
        target = node.towards if node.towards in alive else ""
        if target and (node.host, target) in self.refusing:
            return self._refuse(replace(node, state=NodeState.IDLE, job="", towards=""), target)
        state = NodeState.JOINING if target else NodeState.IDLE
        return self._become(node, state=state, job=target, towards="")

    def _become(self, node: NodeStatus, **options: object) -> None:
        self.moves[node.node_id] = self.moves.get(node.node_id, 0) + 1
        takes_s = random.Random(f"{self.seed} {node.node_id} {self.moves[node.node_id]}").uniform(0.0, 20.0)
        self.due_s[node.node_id] = self.now_s + takes_s
        self.nodes[node.node_id] = replace(node, **options)  # type: ignore[arg-type]

    def _refuse(self, node: NodeStatus, target: str) -> None:
        self.nodes[node.node_id] = replace(node, refusals=(Refusal(target, self.wall),))

    # -- the store -------------------------------------------------------------------------------------------------

    def obey(self, command: Command) -> None:
        """A command arrives; one of a plan that was replaced has no effect."""
        match command:
            case PublishPlan():
                if command.expected_revision == (0 if self.published is None else self.published.revision):
                    self.published = replace(command.published, revision=self.next_revision())
            case AdoptRates():
                old = self.jobs[command.job]
                if old.revision == command.expected_revision:
                    revision = self.next_revision()
                    self.jobs[command.job] = replace(old, rates_flops=command.rates_flops, revision=revision)
            case LendNode() | ReturnNode() | StartJob() | StopJob():
                if self.published is not None and command.plan_revision == self.published.revision:
                    self._obey(command)
            case BuildTable():
                if self.builds_tables:
                    table = build_table(command.cluster, command.expected, with_pairs=command.with_pairs)
                    self.state, _ = handle(self.state, TableBuilt(self.wall, table))

    def _obey(self, command: LendNode | ReturnNode | StartJob | StopJob) -> None:
        if isinstance(command, StartJob | StopJob):
            phase = JobPhase.RUNNING if isinstance(command, StartJob) else JobPhase.SUBMITTED
            if self.jobs[command.job].is_alive:
                self.end(command.job, phase)
            return None
        node = self.nodes.get(command.node_id)
        if node is None or node.job != command.source:
            return None
        target = command.target if isinstance(command, LendNode) else ""
        if target and (node.host, target) in self.refusing:
            return self._refuse(node, target)
        if node.state is NodeState.IDLE:
            return self._become(node, state=NodeState.JOINING, job=target)
        if node.state is NodeState.LEAVING:
            self.nodes[node.node_id] = replace(node, towards=target)
            return None
        return self._become(node, state=NodeState.LEAVING, towards=target)

    # -- the coordinator -------------------------------------------------------------------------------------------

    def coordinate(self) -> tuple[Command, ...]:
        """The coordinator sees what there is; its commands go on their way."""
        self.state, commands = handle(self.state, SnapshotSeen(self.wall, self.snapshot()))
        for command in commands:
            if self.chance.random() < self.lost_share:
                continue
            delay_s = self.chance.uniform(0.0, self.most_delay_s)
            if delay_s:
                self.on_their_way.append((self.now_s + delay_s, command))
            else:
                self.obey(command)
        return commands

    def reasons(self, seconds: float = 120.0) -> list[str]:
        """Why plans were published meanwhile."""
        found = []
        for _ in range(int(seconds / 5.0)):
            found += [each.reason for each in self.coordinate() if isinstance(each, PublishPlan)]
            self.pass_time(5.0)
        return found

    def is_settled(self) -> bool:
        return not self.on_their_way and all(node.state not in MOVING for node in self.nodes.values())

    def settle(self, most_rounds: int = 200) -> None:
        """Until nothing happens any more, also not by time alone. Who refuses for ever is asked for ever: none does."""
        self.refusing.clear()
        quiet = 0
        for _ in range(most_rounds):
            commands = [each for each in self.coordinate() if not isinstance(each, BuildTable)]
            quiet = 0 if commands or not self.is_settled() else quiet + 1
            if quiet > 3:
                return
            self.pass_time(7.0 if not quiet else 650.0)  # longer than dwelling and refusing
        raise AssertionError(f"the cluster does not settle: {self.coordinate()}")

    def held(self) -> dict[str, int]:
        """The working nodes of each job that is alive."""
        return {
            name: sum(node.job == name and node.state is NodeState.WORKING for node in self.nodes.values())
            for name, each in self.jobs.items()
            if each.is_alive
        }

    def node_of(self, name: str) -> str:
        """The first node of a job."""
        return next(node.node_id for node in self.nodes.values() if node.job == name)

    def drain(self, node_id: str, *, is_drained: bool = True) -> None:
        health = Health.DRAINING if is_drained else Health.OK
        self.nodes[node_id] = replace(self.nodes[node_id], health=health)


def two_jobs(hosts: int = 6) -> FakeCluster:
    """A and B, which run on three nodes each: no other division earns as much."""
    cluster = FakeCluster()
    for place in range(hosts):
        cluster.start(f"h{place}", f"rack{place % 2}")
    for each in (A, B):
        cluster.submit(each)
    cluster.settle()
    return cluster
