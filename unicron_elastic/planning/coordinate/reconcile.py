"""From where the nodes are to where the plan wants them: one command for each that has to move, and none twice.

Commands are derived anew from every snapshot: what is under way in the store needs no command any more, what was lost
is commanded again, so that nothing has to be remembered and a repetition changes nothing. All carry the revision of
the plan, in the transaction's guard as well: the store refuses those of a plan that has been replaced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import compress
from operator import ne

from unicron_elastic.planning.coordinate.node_status import Health, NodeState, NodeStatus
from unicron_elastic.planning.coordinate.published import Published
from unicron_elastic.planning.coordinate.snapshot import ClusterSnapshot, JobPhase, JobStatus

KEEPERS_NAMED = 2  # of nodes that have the state of a job


@dataclass(frozen=True, slots=True)
class LendNode:
    """The node leaves ``source``, if that is not "", and then works for ``target``."""

    node_id: str
    source: str
    target: str
    plan_revision: int
    reason: str


@dataclass(frozen=True, slots=True)
class ReturnNode:
    """The node leaves ``source`` and is idle then."""

    node_id: str
    source: str
    plan_revision: int
    reason: str


@dataclass(frozen=True, slots=True)
class StartJob:
    """Enough nodes wait for the job: its workers may start."""

    job: str
    plan_revision: int
    reason: str


@dataclass(frozen=True, slots=True)
class StopJob:
    """The job waits from now on; its nodes have commands of their own."""

    job: str
    plan_revision: int
    reason: str


Movement = LendNode | ReturnNode | StartJob | StopJob


def reconcile(snapshot: ClusterSnapshot, published: Published) -> tuple[Movement, ...]:
    """What is to be done now: stops, then nodes by id, then starts. Empty when all is as planned, or on its way.

    A working node is taken from a job that goes on only while that keeps its minimum of working ones; so a node that
    is replaced leaves when the one in its place works.
    """
    return (
        *_stops(snapshot, published),
        *movements(snapshot, published),
        *_starts(snapshot, published),
    )


def movements(snapshot: ClusterSnapshot, published: Published) -> Iterator[LendNode | ReturnNode]:
    """The commands for nodes alone."""
    misplaced = _misplaced(snapshot, published)
    if not misplaced:
        return
    wanted, planned = published.job_of, set(snapshot.sound_ids)
    working = snapshot.working()
    counts = published.plan.counts
    spare = {job.name: working[job.name] - _needed_nodes(job, counts) for job in snapshot.jobs}
    for node in sorted(misplaced, key=lambda node: (node.health is Health.OK, node.node_id)):
        target = "" if node.health is Health.BROKEN else wanted.get(node.node_id, "")
        if node.heads_for == target or (node.node_id not in planned and node.health is not Health.BROKEN):
            continue
        if _is_bound(node):
            if spare.get(node.job, 1) < 1:
                continue
            spare[node.job] = spare.get(node.job, 1) - 1
        yield _command(node, target, published)


def _misplaced(snapshot: ClusterSnapshot, published: Published) -> list[NodeStatus]:
    """The nodes that may not head for where they are wanted. Nearly all do, and there may be thousands."""
    wanted = published.job_of
    if snapshot.sound_ids == published.node_ids:
        found = list(compress(snapshot.sound_nodes, map(ne, snapshot.heads, wanted.values())))
    else:
        pairs = zip(snapshot.sound_nodes, snapshot.heads, strict=True)
        found = [node for node, job in pairs if job != wanted.get(node.node_id, "")]
    return [*found, *snapshot.unsound_nodes]


def _is_bound(node: NodeStatus) -> bool:
    """Whether its job would miss it."""
    return node.state is NodeState.WORKING and node.health is not Health.BROKEN


def _needed_nodes(job: JobStatus, counts: Mapping[str, int]) -> int:
    """How many working nodes a job must keep meanwhile."""
    goes_on = job.phase is JobPhase.RUNNING and counts.get(job.name, 0) > 0
    return job.spec.min_nodes if goes_on else 0


def _command(node: NodeStatus, target: str, published: Published) -> LendNode | ReturnNode:
    revision, because = published.revision, f"by plan {published.revision}: {published.reason}"
    if not target:
        return ReturnNode(node.node_id, node.job, revision, f"{node.host} leaves {node.job} {because}")
    if node.job and node.job != target:
        return LendNode(
            node.node_id, node.job, target, revision, f"{node.host} goes from {node.job} to {target} {because}"
        )
    return LendNode(node.node_id, node.job, target, revision, f"{node.host} goes to {target} {because}")


def _stops(snapshot: ClusterSnapshot, published: Published) -> Iterator[StopJob]:
    waits = {wait.task: wait.reason for wait in published.plan.waits}
    for job in snapshot.jobs:
        if job.phase is JobPhase.RUNNING and job.name in waits:
            yield StopJob(job.name, published.revision, waits[job.name])


def _starts(snapshot: ClusterSnapshot, published: Published) -> Iterator[StartJob]:
    counts = published.plan.counts
    waiting = [job for job in snapshot.jobs if job.phase is JobPhase.SUBMITTED and counts.get(job.name)]
    if not waiting:
        return
    wanted = published.job_of
    # One that works has not heard of a stop yet, and counts as well.
    ready = Counter(node.held_by for node in snapshot.sound_nodes if node.held_by == wanted.get(node.node_id))
    for job in waiting:
        count = ready[job.name]
        if count >= job.least_nodes:
            waits = "1 node waits" if count == 1 else f"{count} nodes wait"
            reason = f"{job.name} starts, as {waits} for it and it needs {job.least_nodes}."
            reason += _without_state(snapshot, job.name, wanted)
            yield StartJob(job.name, published.revision, reason)


def _without_state(snapshot: ClusterSnapshot, job: str, wanted: Mapping[str, str]) -> str:
    """Says that the job begins without a state that is there, if that is so; who is on its way to the job has it."""
    keepers = [node for node in snapshot.nodes if job in node.keeps]
    if not keepers or any(job in (node.held_by, wanted.get(node.node_id)) for node in keepers):
        return ""
    hosts = [node.host for node in keepers[:KEEPERS_NAMED]]
    more = len(keepers) - len(hosts)
    names = f"{', '.join(hosts)} and {more} more keep" if more else f"{' and '.join(hosts)} {_keep(len(hosts))}"
    return f" It starts without its state that {names} in memory: the plan has other nodes for it."


def _keep(count: int) -> str:
    return "keeps" if count == 1 else "keep"
