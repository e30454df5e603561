"""The situation that is planned for: the tasks, the nodes, and what may happen to them next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from unicron_elastic.base.require import require, require_count
from unicron_elastic.planning.model.faulting import FaultRate
from unicron_elastic.planning.model.tasks import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """All tasks, in order of their names, and the nodes that can be given to them.

    ``nodes``: n', the healthy ones, idle ones included. ``size``: how many there are when all are well; by default as
    many as now. Raises ``ValueError`` if tasks share a name, hold more nodes than there are, or one needs more than
    there can be.
    """

    tasks: tuple[Task, ...]
    nodes: int
    size: int = 0
    faults: FaultRate = field(default_factory=FaultRate)

    def __post_init__(self) -> None:
        require_count("nodes", self.nodes)
        require_count("size", self.size)
        object.__setattr__(self, "size", max(self.size, self.nodes))
        object.__setattr__(self, "tasks", tuple(sorted(self.tasks, key=lambda task: task.name)))
        names = [task.name for task in self.tasks]
        twice = {name for name, following in pairwise(names) if name == following}
        require(not twice, f"two tasks are called {min(twice, default='')}: each must have a name of its own")
        held = sum(task.held_nodes for task in self.tasks)
        require(
            held <= self.nodes, f"the tasks hold {held} nodes: there must be at least as many, and are {self.nodes}"
        )
        for task in self.tasks:
            needed = max(task.min_nodes, task.pinned_nodes or 0)
            require(
                needed <= self.size,
                f"task {task.name} needs {needed} nodes: it must be at most the size of the cluster, {self.size}",
            )

    @property
    def idle_nodes(self) -> int:
        """Healthy nodes that no task has."""
        return self.nodes - sum(task.held_nodes for task in self.tasks)

    @property
    def running_s(self) -> float:
        """D_running(n')."""
        return self.faults.running_s(self.nodes)

    @property
    def are_pins_held(self) -> bool:
        """Whether all pinned tasks can have their nodes; if not, each of them has them or waits."""
        return sum(task.pinned_nodes or 0 for task in self.tasks) <= self.nodes

    def task(self, name: str) -> Task:
        """The task called so. Raises ``ValueError`` if there is none."""
        for task in self.tasks:
            if task.name == name:
                return task
        raise ValueError(f"there is no task {name}: the tasks are {', '.join(each.name for each in self.tasks)}")


@dataclass(frozen=True, slots=True)
class NothingChanged:
    """The plan was asked for without an event, say after all tasks were submitted."""


@dataclass(frozen=True, slots=True)
class NodesLost:
    """``tasks`` lost a node each (one that is named twice lost two), and ``idle`` nodes that no task had are gone."""

    tasks: tuple[str, ...] = ()
    idle: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "tasks", tuple(sorted(self.tasks)))
        require_count("idle", self.idle)
        require(bool(self.tasks) or self.idle > 0, "no node is lost: name a task, or a number of idle nodes")


@dataclass(frozen=True, slots=True)
class NodesJoined:
    """``count`` healthy nodes more."""

    count: int = 1

    def __post_init__(self) -> None:
        require_count("count", self.count, 1)


@dataclass(frozen=True, slots=True)
class TaskFinished:
    """The task is done; its nodes are idle."""

    task: str


@dataclass(frozen=True, slots=True)
class TaskSubmitted:
    """A new task waits; it has no nodes yet."""

    task: Task

    def __post_init__(self) -> None:
        require(
            self.task.nodes == 0,
            f"task {self.task.name} is submitted with {self.task.nodes} nodes: it must have none yet",
        )


Event = NothingChanged | NodesLost | NodesJoined | TaskFinished | TaskSubmitted


def after(cluster: Cluster, event: Event) -> Cluster:
    """The situation after ``event``, before any plan for it. Raises ``ValueError`` if it cannot happen."""
    match event:
        case NothingChanged():
            return cluster
        case NodesJoined(count):
            return replace(cluster, nodes=cluster.nodes + count)
        case TaskSubmitted(task):
            return replace(cluster, tasks=(*cluster.tasks, task))
        case TaskFinished(name):
            gone = cluster.task(name)
            return replace(cluster, tasks=tuple(task for task in cluster.tasks if task is not gone))
        case NodesLost(names, idle):
            return _without_nodes(cluster, names, idle)


def _without_nodes(cluster: Cluster, names: tuple[str, ...], idle: int) -> Cluster:
    require(idle <= cluster.idle_nodes, f"{idle} idle nodes are lost: there are only {cluster.idle_nodes}")
    lost = {name: names.count(name) for name in names}
    for name, count in lost.items():
        held = cluster.task(name).held_nodes
        require(count <= held, f"task {name} lost {count} nodes: it has only {held}")
    tasks = tuple(
        replace(task, lost_nodes=task.lost_nodes + lost[task.name]) if task.name in lost else task
        for task in cluster.tasks
    )
    return replace(cluster, tasks=tasks, nodes=cluster.nodes - len(names) - idle)


def next_events(cluster: Cluster, expected: Sequence[Task] = (), *, with_pairs: bool = False) -> Iterator[Event]:
    """What may happen next: every task loses a node or ends, an idle node is lost, one joins, a task of ``expected``
    is submitted; ``with_pairs``: any two nodes are lost at once.
    """
    yield NothingChanged()
    yield NodesJoined()
    if cluster.idle_nodes:
        yield NodesLost(idle=1)
    running = [task for task in cluster.tasks if task.held_nodes]
    yield from (NodesLost((task.name,)) for task in running)
    yield from (TaskFinished(task.name) for task in cluster.tasks)
    yield from (TaskSubmitted(task) for task in expected)
    if with_pairs:
        yield from _pairs(running, cluster.idle_nodes)


def _pairs(running: Sequence[Task], idle: int) -> Iterator[NodesLost]:
    if idle > 1:
        yield NodesLost(idle=2)
    for place, task in enumerate(running):
        if idle:
            yield NodesLost((task.name,), idle=1)
        if task.held_nodes > 1:
            yield NodesLost((task.name, task.name))
        yield from (NodesLost((task.name, other.name)) for other in running[place + 1 :])
