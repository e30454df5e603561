"""Overviews for the tests of what people see of a cluster."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from unicron_elastic.launcher.view.cluster.overview import (
    ClusterVerdict,
    CoordinatorLine,
    IncidentLine,
    JobLine,
    NodeLine,
    Overview,
    PlanLine,
)
from unicron_elastic.launcher.view.cluster.verdict import verdict_of

NOW = 1_800_000_000.0  # 2027-01-15 08:00 UTC
COORDINATOR = CoordinatorLine(host="n1", node_id="n1/1", is_dedicated=False, since_unix_s=NOW - 3600)


def to_utc(moment: float) -> datetime:
    """The reader's time of day is UTC."""
    return datetime.fromtimestamp(moment, timezone.utc)


def node(host: str, state: str = "working", job: str = "chat", health: str = "well", **more: Any) -> NodeLine:
    """One that works for chat."""
    return NodeLine(host=host, node_id=f"{host}/1", health=health, state=state, job=job, **more)


def lost(host: str, since: float | None, why: str = "its process has ended") -> NodeLine:
    """One that belongs to the cluster and is not there."""
    told = f"{host} is lost: {why}." if why else ""
    return NodeLine(host=host, node_id="", health="well", state="lost", lost_why=told, lost_unix_s=since)


def job(name: str = "chat", state: str = "training", **more: Any) -> JobLine:
    """One that trains on two nodes and has just stepped."""
    told = {
        "nodes": 2,
        "wanted_nodes": 2,
        "stepped_unix_s": NOW - 1.0,
        "generation": 1,
        "step": 1200,
        "steps_per_s": 2.5,
    }
    return JobLine(job=name, run_id=name, state=state, **{**told, **more})


def incident(number: int = 1, host: str = "n1", seconds_ago: float = 60.0, **more: Any) -> IncidentLine:
    """One that is over."""
    told: dict[str, Any] = {
        "run_id": "chat",
        "rank": 3,
        "severity": 2,
        "status": "killed by signal",
        "method": "process supervision",
        "reason": f"rank 3 was killed by signal 9 (SIGKILL), for the {number}. time.",
        "action": "restart",
        "decision": "Restart 1 of 3.",
        "is_open": False,
        "total_ms": 3900.0,
        "phases_ms": (("noticed", 4.0),),
    }
    return IncidentLine(number=number, host=host, time=to_utc(NOW - seconds_ago).isoformat(), **{**told, **more})


def plan(revision: int = 7) -> PlanLine:
    """One that is carried out."""
    return PlanLine(
        revision=revision,
        made_unix_s=NOW - 60.0,
        reason="A node joined; chat gets an idle node.",
        overtaken="",
        waf_flops=2e13,
        achieved_waf_flops=1.5e13,
        next_fault_s=864_000.0,
    )


def overview(**more: Any) -> Overview:
    """A cluster with one job on two nodes and the verdict that follows."""
    told: dict[str, Any] = {
        "where": "etcd1:2379",
        "at_unix_s": NOW,
        "verdict": ClusterVerdict(level="fine", reason=""),
        "coordinator": COORDINATOR,
        "jobs": (job(),),
        "nodes": (node("n1", is_coordinator=True), node("n2")),
        **more,
    }
    found = Overview(**told)
    return replace(found, verdict=verdict_of(found))
