"""What the coordinator's copy of the plan comes to in numbers, for the metrics. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from unicron_elastic.base.quarantine import Quarantined
from unicron_elastic.metrics.definitions import NODE_STATES
from unicron_elastic.metrics.figures import PlanFigures, PlannedJobFigures
from unicron_elastic.planning.coordinate.node_status import NodeState
from unicron_elastic.planning.coordinate.published import Published
from unicron_elastic.planning.coordinate.snapshot import ClusterSnapshot, JobStatus
from unicron_elastic.planning.model.measured import (
    achieved_flops_now,
    are_flops_told,
)
from unicron_elastic.rendezvous.plan.mirror import PlannedJob

_BUSY = tuple(state for state in NODE_STATES if state != NodeState.IDLE.value)


def plan_figures(
    snapshot: ClusterSnapshot,
    jobs: Mapping[str, PlannedJob],
    quarantined: Iterable[Quarantined],
    at_unix_s: float,
) -> PlanFigures:
    """The figures at ``at_unix_s``. Jobs that are over have none, so that their number stays bounded."""
    published = snapshot.published
    states = Counter(node.state.value for node in snapshot.nodes)
    of_jobs: dict[str, Counter[str]] = {}
    for node in snapshot.nodes:  # once, as there may be thousands
        of_jobs.setdefault(node.job, Counter())[node.state.value] += 1
    kept_out = {each.node for each in quarantined if each.until is None or each.until > at_unix_s}
    return PlanFigures(
        nodes=tuple((state, states[state]) for state in NODE_STATES),
        quarantined=tuple(sorted(kept_out)),
        made_unix_s=None if published is None else published.made_unix_s or None,
        waf_flops=None if published is None else published.plan.waf_after_flops,
        jobs=tuple(
            _job(job, of_jobs.get(job.name, Counter()), published, jobs.get(job.name), at_unix_s)
            for job in snapshot.jobs
            if job.is_alive
        ),
    )


def _job(
    job: JobStatus, states: Counter[str], published: Published | None, known: PlannedJob | None, at_unix_s: float
) -> PlannedJobFigures:
    planned = 0 if published is None else published.plan.counts.get(job.name, 0)
    units, rest = divmod(planned, job.spec.unit_nodes)
    rate_flops = job.rates_flops[units] if not rest and units < len(job.rates_flops) else 0.0
    measured = None if known is None else known.measured
    return PlannedJobFigures(
        run_id=job.name,
        plan_nodes=planned,
        plan_flops=job.spec.weight * rate_flops,
        achieved_flops=job.spec.weight * achieved_flops_now(job.spec, measured, job.rates_flops, at_unix_s),
        nodes=tuple((state, states[state]) for state in _BUSY),
        is_estimate=not are_flops_told(job.spec, measured),
    )
