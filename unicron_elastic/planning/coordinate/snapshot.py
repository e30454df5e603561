"""The cluster as the store has it at one revision: nodes, jobs, the published plan. All decisions are made from it.

What is asked for at every look, and would be a walk over all nodes, is kept up to date with each change of a node:
there may be ten thousand of them, and few change at a time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from operator import attrgetter
from typing import Any

from unicron_elastic.base.require import require_count
from unicron_elastic.planning.coordinate.node_status import Health, NodeState, NodeStatus
from unicron_elastic.planning.coordinate.published import Published
from unicron_elastic.planning.model.faulting import FaultRate
from unicron_elastic.planning.model.jobs import GPU_FLOPS, JobSpec
from unicron_elastic.planning.model.tasks import Transition

_ID = attrgetter("node_id")
_HEADS_FOR = attrgetter("heads_for")
FEW_CHANGES = 256  # with more of them, all is counted anew


class JobPhase(Enum):
    """How far a job is."""

    SUBMITTED = "submitted"  # it waits for nodes; also one that ran and was stopped
    RUNNING = "running"
    FINISHED = "finished"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """One job. ``revision``: of the store, when its spec or what it is planned by was last changed.

    ``rates_flops``: T(t, x) by units that plans are made from; empty: not known yet, then it waits. ``newest_flops``:
    the same by the newest measurements; it is adopted once it differs by enough. Raises ``ValueError`` for a negative
    revision.
    """

    spec: JobSpec
    phase: JobPhase = JobPhase.SUBMITTED
    revision: int = 1
    rates_flops: tuple[float, ...] = ()
    newest_flops: tuple[float, ...] = ()
    transition: Transition = field(default_factory=lambda: Transition.of(60.0))

    def __post_init__(self) -> None:
        require_count(f"revision of job {self.name}", self.revision)

    @property
    def name(self) -> str:
        """Return its spec's name."""
        return self.spec.name

    @property
    def is_alive(self) -> bool:
        """Whether it runs or is to run."""
        return self.phase in (JobPhase.SUBMITTED, JobPhase.RUNNING)

    @property
    def is_planned(self) -> bool:
        """Whether a plan can say anything about it."""
        return self.is_alive and len(self.rates_flops) > 1

    @property
    def least_nodes(self) -> int:
        """The fewest nodes on which it runs; of those that its rates know, if there is one."""
        pin = self.spec.pinned_nodes
        if pin is not None:
            return pin
        unit = self.spec.unit_nodes
        known = (units * unit for units, rate in enumerate(self.rates_flops) if rate > 0.0)
        return next((nodes for nodes in known if nodes >= self.spec.min_nodes), self.spec.least_nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSnapshot:
    """Everything at one revision of the store; nodes by id, jobs by name.

    ``published``: the plan, None before the first. ``faults``: how often nodes fail, as last agreed on.
    ``gpu_flops``: what a GPU achieves here, as jobs of which nothing is known are taken to do. Raises ``ValueError`` if
    two nodes or two jobs are called the same.

    ``sound_nodes``: those that a plan is about: all but broken ones, and those that work for a job of which too little
    is known to plan for it; draining ones are among them. ``unsound_nodes``: the others. ``sound_ids`` and ``heads``,
    the job that each heads for, are in the order of ``sound_nodes``. ``heading``: how many head for each job, "" for
    none. ``unsettled_nodes``: of the sound ones those that do not simply work or wait: they start or leave, are to be
    drained, or have refused a job. ``draining_ids``: of them.
    """

    nodes: tuple[NodeStatus, ...] = ()
    jobs: tuple[JobStatus, ...] = ()
    published: Published | None = None
    faults: FaultRate = field(default_factory=FaultRate)
    gpu_flops: float = GPU_FLOPS
    sound_nodes: tuple[NodeStatus, ...] = field(init=False, repr=False, compare=False)
    unsound_nodes: tuple[NodeStatus, ...] = field(init=False, repr=False, compare=False)
    unsettled_nodes: tuple[NodeStatus, ...] = field(init=False, repr=False, compare=False)
    ids: tuple[str, ...] = field(init=False, repr=False, compare=False)
    sound_ids: tuple[str, ...] = field(init=False, repr=False, compare=False)
    draining_ids: frozenset[str] = field(init=False, repr=False, compare=False)
    heads: tuple[str, ...] = field(init=False, repr=False, compare=False)
    heading: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        nodes, jobs = tuple(sorted(self.nodes, key=_ID)), _by_name(self.jobs)
        ids = tuple(map(_ID, nodes))
        _require_different("nodes", ids)
        known = _known_jobs(jobs)
        sound = tuple([node for node in nodes if _is_sound(node, known)])
        heads = tuple(map(_HEADS_FOR, sound))
        self._set(
            nodes=nodes,
            jobs=jobs,
            ids=ids,
            sound_nodes=sound,
            sound_ids=ids if len(sound) == len(ids) else tuple(map(_ID, sound)),
            unsound_nodes=() if len(sound) == len(ids) else tuple(n for n in nodes if not _is_sound(n, known)),
            unsettled_nodes=tuple([node for node in sound if _is_unsettled(node)]),
            heads=heads,
            heading=Counter(heads),
        )
        self._set(draining_ids=_draining(self.unsettled_nodes))

    def changed(
        self,
        nodes: Mapping[str, NodeStatus | None],
        *,
        jobs: Iterable[JobStatus],
        published: Published | None,
        faults: FaultRate,
    ) -> ClusterSnapshot:
        """What is there after some nodes, by id, have changed, come, or gone (None); the rest is as given.

        The same as a snapshot that is made anew. Raises ``ValueError`` if two jobs are called the same.
        """
        found = copy(self)
        found._set(jobs=_by_name(jobs), published=published, faults=faults)
        known = _known_jobs(found.jobs)
        if len(nodes) > FEW_CHANGES or known != _known_jobs(self.jobs):
            rest = [node for node in self.nodes if node.node_id not in nodes]
            found._set(nodes=(*rest, *(node for node in nodes.values() if node is not None)))
            found.__post_init__()
        elif nodes:
            found._change(nodes, known)
        return found

    def _change(self, changes: Mapping[str, NodeStatus | None], known: frozenset[str]) -> None:
        sound = {name: node if node is not None and _is_sound(node, known) else None for name, node in changes.items()}
        others = [node for node in changes.values() if node is not None and sound[node.node_id] is None]
        heading = Counter(self.heading)
        for name, node in sound.items():
            if (place := _place(self.sound_ids, name)) is not None:
                heading[self.heads[place]] -= 1
            if node is not None:
                heading[node.heads_for] += 1
        ids, nodes = _spliced(
            (self.ids, self.nodes), {name: None if node is None else (name, node) for name, node in changes.items()}
        )
        rows = {name: None if node is None else (name, node, node.heads_for) for name, node in sound.items()}
        sound_ids, sound_nodes, heads = _spliced((self.sound_ids, self.sound_nodes, self.heads), rows)
        unsettled = [node for node in sound.values() if node is not None and _is_unsettled(node)]
        self._set(
            ids=ids,
            nodes=nodes,
            sound_ids=sound_ids,
            sound_nodes=sound_nodes,
            heads=heads,
            heading=Counter({job: count for job, count in heading.items() if count}),
            unsettled_nodes=_amended(self.unsettled_nodes, changes, unsettled),
            unsound_nodes=_amended(self.unsound_nodes, changes, others),
        )
        self._set(draining_ids=_draining(self.unsettled_nodes))

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def plan_revision(self) -> int:
        """Return the revision of the published plan; 0: there is none."""
        return 0 if self.published is None else self.published.revision

    def job(self, name: str) -> JobStatus | None:
        """The job called so; None if there is none."""
        return next((job for job in self.jobs if job.name == name), None)

    def held(self) -> Counter[str]:
        """How many sound nodes count for each job, as ``NodeStatus.held_by`` has it; "": for none."""
        found = Counter(self.heading)
        for node in self.unsettled_nodes:
            found[node.heads_for] -= 1
            found[node.held_by] += 1
        return found

    def working(self) -> Counter[str]:
        """How many sound nodes work for each job."""
        found = Counter(self.heading)
        for node in self.unsettled_nodes:
            found[node.heads_for] -= 1
            found[node.job] += node.state is NodeState.WORKING
        del found[""]
        return found


def _by_name(jobs: Iterable[JobStatus]) -> tuple[JobStatus, ...]:
    found = tuple(sorted(jobs, key=lambda job: job.name))
    _require_different("jobs", tuple(job.name for job in found))
    return found


def _require_different(what: str, names: tuple[str, ...]) -> None:
    if len(set(names)) < len(names):
        twice = [name for name, following in pairwise(names) if name == following]
        raise ValueError(f"two {what} are called {twice[:1]}: each must have a name of its own")


def _known_jobs(jobs: tuple[JobStatus, ...]) -> frozenset[str]:
    """Jobs of which enough is known for a plan, or that need none any more."""
    return frozenset(["", *(job.name for job in jobs if job.is_planned or not job.is_alive)])


def _is_sound(node: NodeStatus, known: frozenset[str]) -> bool:
    return node.health is not Health.BROKEN and (node.state is NodeState.LEAVING or node.job in known)


def _is_unsettled(node: NodeStatus) -> bool:
    is_moving = node.state is NodeState.JOINING or node.state is NodeState.LEAVING
    return is_moving or node.health is not Health.OK or bool(node.refusals)


def _draining(nodes: Iterable[NodeStatus]) -> frozenset[str]:
    return frozenset([node.node_id for node in nodes if node.health is Health.DRAINING])


def _place(ids: tuple[str, ...], node_id: str) -> int | None:
    place = bisect_left(ids, node_id)
    return place if place < len(ids) and ids[place] == node_id else None


def _spliced(columns: tuple[tuple[Any, ...], ...], rows: Mapping[str, tuple[Any, ...] | None]) -> list[tuple[Any, ...]]:
    """The columns, of which the first are the ids in order, with rows put in, replaced, or taken out (None)."""
    found = [list(column) for column in columns]
    for node_id, row in rows.items():
        place = bisect_left(found[0], node_id)
        is_there = place < len(found[0]) and found[0][place] == node_id
        for number, column in enumerate(found):
            column[place : place + is_there] = () if row is None else (row[number],)
    return [tuple(column) for column in found]


def _amended(
    nodes: tuple[NodeStatus, ...], changes: Mapping[str, object], fresh: list[NodeStatus]
) -> tuple[NodeStatus, ...]:
    if not nodes and not fresh:
        return nodes
    return tuple(sorted([*(node for node in nodes if node.node_id not in changes), *fresh], key=_ID))
