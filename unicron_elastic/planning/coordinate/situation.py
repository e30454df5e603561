"""The snapshot as the planner sees it: tasks with numbers of nodes, and what has happened since the published plan.

What has happened is not remembered by anybody: it is the difference between the published plan, which names the nodes
and jobs that it was made for, and what is there now. So every coordinator comes to the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from unicron_elastic.planning.allocate.cluster import (
    Cluster,
    Event,
    NodesJoined,
    NodesLost,
    NothingChanged,
    TaskFinished,
    TaskSubmitted,
)
from unicron_elastic.planning.coordinate.node_status import Health, NodeState, NodeStatus
from unicron_elastic.planning.coordinate.published import Published, Seat
from unicron_elastic.planning.coordinate.snapshot import ClusterSnapshot, JobStatus
from unicron_elastic.planning.model.tasks import Floats, Task

TASKS_KEPT = 4096
_tasks: dict[tuple[object, ...], tuple[JobStatus, Task]] = {}  # by what they follow from

EXPECTED_MOST = 16  # tasks that are planned for although nobody has submitted them


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a plan must keep to beside the specs.

    ``holds``: jobs that are left with so many nodes; ``most``: jobs that cannot have more; ``kept``: draining nodes
    that stay where they are for now, by id.
    """

    holds: Mapping[str, int] = field(default_factory=dict)
    most: Mapping[str, int] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDifferences:
    """What is different from the published plan.

    ``lost``: seats whose node is gone or may work no more; ``joined``: nodes that had no seat; ``ended``, ``new`` and
    ``altered``: jobs by name.
    """

    lost: tuple[Seat, ...] = ()
    joined: tuple[NodeStatus, ...] = ()
    ended: tuple[str, ...] = ()
    new: tuple[str, ...] = ()
    altered: tuple[str, ...] = ()


def usable_nodes(snapshot: ClusterSnapshot, kept: frozenset[str] = frozenset()) -> tuple[NodeStatus, ...]:
    """The nodes that a plan may count on: all that are well, and the draining ones that are ``kept``."""
    if not snapshot.draining_ids:
        return snapshot.sound_nodes
    return tuple(node for node in snapshot.sound_nodes if node.health is Health.OK or node.node_id in kept)


def held_nodes(nodes: Iterable[NodeStatus]) -> Counter[str]:
    """How many nodes count for each job, as ``NodeStatus.held_by`` has it."""
    leaving = NodeState.LEAVING
    return Counter(["" if node.state is leaving else node.job for node in nodes])


def changes_of(snapshot: ClusterSnapshot, kept: frozenset[str] = frozenset()) -> PlanDifferences:
    """What has happened since the published plan; before the first one, everything is new."""
    usable = usable_nodes(snapshot, kept)
    planned = {job.name: job.revision for job in snapshot.jobs if job.is_planned}
    if snapshot.published is None:
        return PlanDifferences(joined=usable, new=tuple(planned))
    ids = snapshot.sound_ids if usable is snapshot.sound_nodes else tuple(node.node_id for node in usable)
    seats, before = snapshot.published.seats, dict(snapshot.published.jobs)
    gone, come = _gone_and_come(ids, snapshot.published)
    return PlanDifferences(
        lost=tuple(seat for seat in seats if seat.node_id in gone) if gone else (),
        joined=tuple(node for node in usable if node.node_id in come) if come else (),
        ended=tuple(name for name in before if name not in planned),
        new=tuple(name for name in planned if name not in before),
        altered=tuple(name for name in planned if before.get(name, planned[name]) != planned[name]),
    )


def _gone_and_come(ids: tuple[str, ...], published: Published) -> tuple[set[str], set[str]]:
    """The nodes that had seats and are not here, and those that are here and had none."""
    if ids == published.node_ids and not published.draining_ids:
        return set(), set()
    # A draining node that was sent away has no job in the plan: it is not lost a second time.
    away = {node_id for node_id in published.draining_ids if not published.job_of[node_id]}
    here, seated = set(ids), set(published.node_ids) - away
    return seated - here, here - seated


def situation_of(snapshot: ClusterSnapshot, changes: PlanDifferences, bounds: Bounds) -> tuple[Cluster, Event]:
    """The situation before the last event, and the event, so that a table that was built for it has the plan.

    What is no single event is planned for as it stands, with ``NothingChanged``.
    """
    usable = usable_nodes(snapshot, bounds.kept)
    held = snapshot.held() if usable is snapshot.sound_nodes else held_nodes(usable)
    lost = Counter(seat.job for seat in changes.lost)
    tasks = {
        job.name: _task(job, bounds, held_nodes=held[job.name], lost_nodes=lost[job.name])
        for job in snapshot.jobs
        if job.is_planned
    }
    now = _cluster(snapshot, list(tasks.values()), len(usable))
    happened = [changes.lost, changes.joined, changes.ended, changes.new]
    if changes.altered or sum(map(bool, happened)) != 1:
        return now, NothingChanged()
    found: tuple[Cluster, Event] | None = None
    if changes.lost:
        found = _before_loss(snapshot, tasks, changes, len(usable))
    elif changes.joined:
        found = _before_joining(snapshot, now, len(changes.joined))
    elif changes.ended:
        found = _before_end(snapshot, changes, tasks, len(usable))
    elif len(changes.new) == 1 and not tasks[changes.new[0]].nodes:
        others = tuple(task for task in now.tasks if task.name != changes.new[0])
        found = replace(now, tasks=others), TaskSubmitted(tasks[changes.new[0]])
    return (now, NothingChanged()) if found is None else found


def expected_tasks(snapshot: ClusterSnapshot, size: int) -> tuple[Task, ...]:
    """Jobs that may be submitted again, as they were not long ago; of a cluster of ``size`` nodes at most."""
    over = [job for job in snapshot.jobs if not job.is_alive and len(job.rates_flops) > 1]
    tasks = (_task(job, Bounds(), held_nodes=0, lost_nodes=0) for job in over)
    return tuple(task for task in tasks if max(task.min_nodes, task.pinned_nodes or 0) <= size)[:EXPECTED_MOST]


def _before_loss(
    snapshot: ClusterSnapshot, tasks: Mapping[str, Task], changes: PlanDifferences, nodes: int
) -> tuple[Cluster, Event] | None:
    lost = Counter(seat.job if seat.job in tasks else "" for seat in changes.lost)
    if any(tasks[name].lost_nodes != count for name, count in lost.items() if name):
        return None  # units are broken: numbers of nodes do not tell the whole of it
    whole = [replace(task, lost_nodes=0) if task.lost_nodes else task for task in tasks.values()]
    nodes += len(changes.lost)
    if sum(task.nodes for task in whole) + lost[""] > nodes:
        return None
    names = tuple(seat.job for seat in changes.lost if seat.job in tasks)
    return _cluster(snapshot, whole, nodes), NodesLost(names, lost[""])


def _before_joining(snapshot: ClusterSnapshot, now: Cluster, count: int) -> tuple[Cluster, Event] | None:
    if now.idle_nodes < count:
        return None  # they came with a job
    return _cluster(snapshot, list(now.tasks), now.nodes - count), NodesJoined(count)


def _before_end(
    snapshot: ClusterSnapshot, changes: PlanDifferences, tasks: Mapping[str, Task], nodes: int
) -> tuple[Cluster, Event] | None:
    ended = snapshot.job(changes.ended[0])
    if len(changes.ended) > 1 or ended is None or len(ended.rates_flops) < 2 or snapshot.published is None:
        return None
    had = snapshot.published.plan.counts.get(ended.name, 0)
    task = _task(ended, Bounds(), held_nodes=had, lost_nodes=0)
    if sum(each.nodes for each in tasks.values()) + task.nodes > nodes:
        return None
    return _cluster(snapshot, [*tasks.values(), task], nodes), TaskFinished(ended.name)


def _cluster(snapshot: ClusterSnapshot, tasks: list[Task], nodes: int) -> Cluster:
    """Make a cluster as large as any task could need: one that needs more than there is waits, and is no mistake."""
    size = max([nodes, *(max(task.min_nodes, task.pinned_nodes or 0) for task in tasks)])
    return Cluster(tasks=tuple(tasks), nodes=nodes, size=size, faults=snapshot.faults)


def _task(job: JobStatus, bounds: Bounds, *, held_nodes: int, lost_nodes: int) -> Task:
    """The job as the planner sees it. Nodes that are no whole number of units count as idle: it does not use them.

    Most jobs of a large cluster are as they were at the look before, and so are their tasks.
    """
    key = job.name, held_nodes, lost_nodes, bounds.holds.get(job.name), bounds.most.get(job.name)
    known = _tasks.get(key)
    if known is None or known[0] is not job:
        if len(_tasks) >= TASKS_KEPT:
            _tasks.clear()
        known = _tasks[key] = job, _new_task(job, bounds, held_nodes=held_nodes, lost_nodes=lost_nodes)
    return known[1]


def _new_task(job: JobStatus, bounds: Bounds, *, held_nodes: int, lost_nodes: int) -> Task:
    spec, unit = job.spec, job.spec.unit_nodes
    end = (len(job.rates_flops) - 1) * unit
    nodes = min((held_nodes + lost_nodes) // unit * unit, end)
    lost = min(lost_nodes, nodes)
    # What is over a whole number of units may have been lost as well; never more is held than there is.
    lost = max(lost, nodes - held_nodes)
    limits = [limit for limit in (spec.max_nodes, bounds.most.get(job.name)) if limit is not None]
    most = min([*limits, end])
    return Task(
        name=job.name,
        rates_flops=_array(job.rates_flops),
        weight=spec.weight,
        min_nodes=spec.min_nodes,
        max_nodes=None if most < spec.min_nodes else most,
        unit_nodes=unit,
        nodes=nodes,
        lost_nodes=lost,
        pinned_nodes=_pin(job, bounds, most),
        transition=job.transition,
    )


@lru_cache(maxsize=1024)  # the same tuple comes with every snapshot
def _array(rates_flops: tuple[float, ...]) -> Floats:
    found = np.array(rates_flops, dtype=np.float64)
    found.setflags(write=False)
    return found


def _pin(job: JobStatus, bounds: Bounds, most: int) -> int | None:
    """So many nodes or none: by its spec, or because it is held; 0 if it can have none of what it could run on."""
    spec = job.spec
    can_have = (
        units * spec.unit_nodes
        for units, rate in enumerate(job.rates_flops)
        if rate > 0.0 and spec.min_nodes <= units * spec.unit_nodes <= most
    )
    if spec.paused or (least := next(can_have, None)) is None:
        return 0
    if spec.pinned_nodes is not None:
        return spec.pinned_nodes if spec.pinned_nodes in (least, *can_have) else 0
    held = bounds.holds.get(job.name)
    return held if held is not None and held in (least, *can_have) else None
