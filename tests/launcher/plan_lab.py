"""A small cluster that is planned for, as the store has it: for the tests of what people see of plans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unicron_elastic.planning.coordinate.node_status import NodeState, NodeStatus
from unicron_elastic.planning.coordinate.proposal import propose
from unicron_elastic.planning.coordinate.snapshot import ClusterSnapshot, JobPhase, JobStatus
from unicron_elastic.planning.model.jobs import GivenRates, JobSpec
from unicron_elastic.rendezvous.records.plan import PhaseRecord, phase_text, spec_text, status_text
from unicron_elastic.rendezvous.records.plan_keys import CURRENT, PlannedJobKeys, status_key
from unicron_elastic.rendezvous.store.interface import Store

NOW = 1_800_000_000.0  # unix seconds
TERA = 1e12


def spec(name: str, per_node: float = 1.0, most: int = 8, **options: Any) -> JobSpec:
    """A job whose FLOP/s grow with nodes, a little less with each: ``per_node`` TFLOP/s on the first."""
    rates = tuple(per_node * TERA * count * (1.0 - 0.02 * count) for count in range(most + 1))
    told = {"name": name, "command": ("train.py",), "directory": "/", "throughput": GivenRates(rates), **options}
    return JobSpec(**told)


def node(host: str, job: str = "", state: NodeState | None = None, **options: Any) -> NodeStatus:
    """An agent that works for a job, or is idle for ""."""
    if state is None:
        state = NodeState.WORKING if job else NodeState.IDLE
    return NodeStatus(node_id=f"{host}/agent", host=host, state=state, job=job, **options)


def job(found: JobSpec, phase: JobPhase = JobPhase.RUNNING, **options: Any) -> JobStatus:
    """As the store's mirror has it before anything is measured."""
    assert isinstance(found.throughput, GivenRates)
    return JobStatus(spec=found, phase=phase, rates_flops=found.throughput.rates_flops, **options)


def two_jobs() -> ClusterSnapshot:
    """chat on n1 to n3, code on n4 and n5, n6 idle; nothing is published."""
    places = {"n1": "chat", "n2": "chat", "n3": "chat", "n4": "code", "n5": "code", "n6": ""}
    return ClusterSnapshot(
        nodes=tuple(node(host, name) for host, name in places.items()),
        jobs=(job(spec("chat", 3.0, 3, weight=1.5)), job(spec("code", 2.0, 8, min_nodes=2))),
    )


def put_cluster(store: Store, snapshot: ClusterSnapshot, reasons: Mapping[str, str] | None = None) -> None:
    """Writes what agents and jobs of a snapshot have in the store."""
    for each in snapshot.nodes:
        store.put(status_key(each.node_id), status_text(each).encode())
    for found in snapshot.jobs:
        keys = PlannedJobKeys(found.name)
        store.put(keys.spec, spec_text(found.spec))
        reason = (reasons or {}).get(found.name, f"{found.name} was started.")
        store.put(keys.phase, phase_text(PhaseRecord(phase=found.phase, reason=reason)))


def publish(store: Store, snapshot: ClusterSnapshot, at_unix_s: float) -> None:
    """Writes the plan that would be made of the snapshot, as the store's mirror has it."""
    store.put(CURRENT, propose(snapshot, at_unix_s).to_json().encode())
