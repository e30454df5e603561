"""Jobs for the benchmark of the coordinator, as specs, and which node is worth losing."""

from __future__ import annotations

from collections.abc import Iterator

from _planning_cases import cluster

from unicron_elastic.planning.coordinate.node_status import Health, NodeState, NodeStatus
from unicron_elastic.planning.coordinate.proposal import propose
from unicron_elastic.planning.coordinate.snapshot import ClusterSnapshot
from unicron_elastic.planning.model.jobs import GivenRates, JobSpec
from unicron_elastic.planning.model.measured import MeasuredJob
from unicron_elastic.rendezvous.plan.mirror import PlanMirror
from unicron_elastic.rendezvous.records.plan import spec_text
from unicron_elastic.rendezvous.records.plan_keys import PlannedJobKeys
from unicron_elastic.rendezvous.store.interface import Put

STANDS_STILL_S = 0.5  # a job, whenever its nodes change: then it rests for DWELL_LEAST_S
MOST = 1.5  # times its equal share: so much the largest job can use


def specs(nodes: int, jobs: int, seed: int) -> tuple[JobSpec, ...]:
    """Jobs of ``_planning_cases`` that have a useful maximum: the best ones reach it, the last ones have the rest."""
    most = max(2, round(MOST * nodes / jobs))
    found = []
    for task in cluster(nodes, jobs, seed).tasks:
        most_units = max(most // task.unit_nodes, -(-task.min_nodes // task.unit_nodes))
        rates = tuple(float(rate) for rate in task.rates_flops[: most_units + 1])
        found.append(
            JobSpec(
                name=task.name,
                command=("true",),
                directory="/",
                min_nodes=task.min_nodes,
                max_nodes=most_units * task.unit_nodes,
                unit_nodes=task.unit_nodes,
                weight=task.weight,
                throughput=GivenRates(rates),
            )
        )
    return tuple(found)


def submission(spec: JobSpec) -> list[Put]:
    """What stands in the store of a job that is new, but that has told how long it stands still."""
    keys = PlannedJobKeys(spec.name)
    still = (STANDS_STILL_S,)
    measured = MeasuredJob(grow_s=still, shrink_s=still, replace_s=still)
    return [Put(keys.spec, spec_text(spec)), Put(keys.measured, measured.to_json())]


def needs_regrouping(mirror: PlanMirror, jobs: list[str], at_unix_s: float) -> NodeStatus | None:
    """A working node of one of ``jobs``, the first one of which this holds: without it others would move."""
    snapshot = mirror.planning_snapshot(lambda _host: Health.OK)
    for job in jobs:
        node = next(working(snapshot, job), None)
        if node is None:
            continue
        left = ClusterSnapshot(
            nodes=tuple(each for each in snapshot.nodes if each is not node),
            jobs=snapshot.jobs,
            published=snapshot.published,
            faults=snapshot.faults,
        )
        if any(move.source and move.target for move in propose(left, at_unix_s).plan.moves):
            return node
    return None


def working(snapshot: ClusterSnapshot, job: str) -> Iterator[NodeStatus]:
    """The nodes that work for a job."""
    return (node for node in snapshot.nodes if node.state is NodeState.WORKING and node.job == job)
