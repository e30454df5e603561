"""Values that metrics are made from, for these tests: every metric has at least one sample of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from unicron_elastic.base.incident import Incident
from unicron_elastic.metrics.figures import (
    CoordinationFigures,
    JobFigures,
    NodeFigures,
    PlanFigures,
    PlannedJobFigures,
    WorkerFigures,
)
from unicron_elastic.metrics.incidents import IncidentTotals
from unicron_elastic.metrics.samples import (
    MetricSample,
    coordination_samples,
    job_samples,
    node_samples,
    plan_samples,
    process_samples,
)

ODD = 'a "job"\nwith \\ and ü'

INCIDENT = Incident(
    number=1,
    run_id="run",
    job="train.py",
    host="n1",
    time="2026-01-02T03:04:05.678+01:00",
    generation=1,
    rank=1,
    status="killed by signal",
    severity=2,
    method="process supervision",
    reason="rank 1 was killed.",
    action="",
    decision="",
    restarts_used=0,
    max_restarts=3,
    workers=4,
    occurred_at=100.0,
    noticed_at=100.5,
)
DECIDED = replace(INCIDENT, action="restart", decision="Restart 1 of 3.", stopped_at=101.5)
REGROUPED = replace(DECIDED, regrouped_at=103.5)
CLOSED = replace(REGROUPED, first_step_at=107.5)


def totals(*records: Incident) -> IncidentTotals:
    found = IncidentTotals()
    for record in records:
        found.add(record)
    return found


def job(**known: Any) -> JobFigures:
    worker = WorkerFigures(rank=4, is_running=True, step=120, step_time_s=0.25)
    told: dict[str, Any] = {
        "run_id": "run",
        "script": "train.py",
        "node": "n1",
        "phase": "running",
        "generation": 2,
        "restarts_used": 1,
        "restarts_limit": 3,
        "nodes": 2,
        "world_size": 8,
        "workers": (worker, replace(worker, rank=5, step=119, step_time_s=0.75)),
        "is_incident_open": False,
        "started_unix_s": 1.7e9,
        "last_step_unix_s": 1.7e9 + 60.5,
        "incidents": totals(CLOSED).figures(),
    }
    return JobFigures(**{**told, **known})


PLAN = PlanFigures(
    nodes=(("idle", 1), ("joining", 0), ("working", 3), ("leaving", 0)),
    quarantined=("gpu-7",),
    made_unix_s=1.7e9,
    waf_flops=3e15,
    jobs=(
        PlannedJobFigures(
            run_id="run",
            plan_nodes=3,
            plan_flops=3e15,
            achieved_flops=2.5e15,
            nodes=(("joining", 0), ("working", 3), ("leaving", 0)),
        ),
    ),
)
COORDINATION = CoordinationFigures(leads=True, knows_coordinator=True, sees_store=True, lost_nodes=2)


def every_sample(**known: Any) -> list[MetricSample]:
    return [
        *process_samples("1.2.3"),
        *job_samples(job(**known)),
        *node_samples(NodeFigures(node="n1", state="working")),
        *coordination_samples(COORDINATION),
        *plan_samples(PLAN),
    ]
