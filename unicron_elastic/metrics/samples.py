"""From values to samples: what each metric says of a job, an agent and a plan at one moment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from unicron_elastic.metrics import definitions as m
from unicron_elastic.metrics.definitions import Metric
from unicron_elastic.metrics.figures import (
    CoordinationFigures,
    Distribution,
    IncidentFigures,
    JobFigures,
    NodeFigures,
    PlanFigures,
    WorkerFigures,
)


@dataclass(frozen=True, slots=True)
class MetricSample:
    """One value of a metric; ``labels`` in the order of the metric's. A histogram's value is a distribution."""

    metric: Metric
    labels: tuple[str, ...]
    value: float | Distribution


def process_samples(version: str) -> Iterator[MetricSample]:
    """Return the samples of every process."""
    yield MetricSample(m.BUILD_INFO, (version,), 1)


def job_samples(job: JobFigures) -> Iterator[MetricSample]:
    """Return a job's samples, as one of its nodes sees it; what is not known is left out, so no alert counts it."""
    run = (job.run_id,)
    yield MetricSample(m.JOB_INFO, (*run, job.script, job.node), 1)
    yield MetricSample(m.JOB_START, run, job.started_unix_s)
    yield from _one_of(m.JOB_PHASE, run, m.JOB_PHASES, job.phase)
    for metric, value in (
        (m.GENERATION, job.generation),
        (m.RESTARTS_USED, job.restarts_used),
        (m.RESTARTS_LIMIT, job.restarts_limit),
        (m.NODES, job.nodes),
        (m.WORLD_SIZE, job.world_size),
        (m.INCIDENT_OPEN, int(job.is_incident_open)),
    ):
        yield MetricSample(metric, run, value)
    yield from _known(m.STEP, run, job.step)
    yield from _known(m.LAST_STEP, run, job.last_step_unix_s)
    yield from _known(m.ITERATION_TIME, run, job.step_time_s)
    for worker in job.workers:
        yield from _worker(run, worker)
    if job.incidents is not None:
        yield from _incidents(run, job.incidents)


def _worker(run: tuple[str], worker: WorkerFigures) -> Iterator[MetricSample]:
    labels = (*run, str(worker.rank))
    yield MetricSample(m.WORKER_UP, labels, int(worker.is_running))
    yield from _known(m.WORKER_STEP, labels, worker.step)
    yield from _known(m.WORKER_ITERATION_TIME, labels, worker.step_time_s)


def _incidents(run: tuple[str], found: IncidentFigures) -> Iterator[MetricSample]:
    for severity, status, count in found.counts:
        yield MetricSample(m.INCIDENTS, (*run, str(severity), status), count)
    for phase, lost_s in found.lost_gpu_s:
        yield MetricSample(m.LOST_GPU_SECONDS, (*run, phase), lost_s)
    yield MetricSample(m.RECOVERY_TIME, run, found.recovery)
    yield MetricSample(m.REUSED, run, found.reused)
    yield MetricSample(m.RECOMPUTED, run, found.recomputed)


def node_samples(node: NodeFigures) -> Iterator[MetricSample]:
    """Return the samples of an agent of the cluster."""
    yield from _one_of(m.NODE_STATE, (node.node,), m.NODE_STATES, node.state)


def coordination_samples(found: CoordinationFigures) -> Iterator[MetricSample]:
    """Return the samples of whoever may coordinate the cluster."""
    yield MetricSample(m.COORDINATES, (), int(found.leads))
    yield MetricSample(m.COORDINATOR_KNOWN, (), int(found.knows_coordinator))
    yield MetricSample(m.STORE_VISIBLE, (), int(found.sees_store))
    yield MetricSample(m.LOST_NODES, (), found.lost_nodes)


def plan_samples(plan: PlanFigures) -> Iterator[MetricSample]:
    """Return the samples of whoever coordinates the cluster."""
    for state, count in plan.nodes:
        yield MetricSample(m.CLUSTER_NODES, (state,), count)
    for host in plan.quarantined:
        yield MetricSample(m.QUARANTINED, (host,), 1)
    yield from _known(m.PLAN_TIMESTAMP, (), plan.made_unix_s)
    yield from _known(m.PLAN_WAF, (), plan.waf_flops)
    if plan.waf_flops is not None:
        yield MetricSample(m.ACHIEVED_WAF, (), sum(job.achieved_flops for job in plan.jobs))
    for job in plan.jobs:
        run = (job.run_id,)
        yield MetricSample(m.JOB_PLAN_WAF, run, job.plan_flops)
        yield MetricSample(m.JOB_ACHIEVED_WAF, run, job.achieved_flops)
        yield MetricSample(m.JOB_PLAN_NODES, run, job.plan_nodes)
        for state, count in job.nodes:
            yield MetricSample(m.JOB_NODES, (*run, state), count)


def _one_of(metric: Metric, labels: tuple[str, ...], states: Iterable[str], state: str) -> Iterator[MetricSample]:
    """1 for the present one of all states: so none of them is left standing when it changes."""
    for each in states:
        yield MetricSample(metric, (*labels, each), int(each == state))


def _known(metric: Metric, labels: tuple[str, ...], value: float | None) -> Iterator[MetricSample]:
    if value is not None:
        yield MetricSample(metric, labels, value)
