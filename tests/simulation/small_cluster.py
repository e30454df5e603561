"""A small cluster for tests: jobs whose rates are given, and histories that are written down."""

from __future__ import annotations

from unicron_elastic.faults import Status
from unicron_elastic.planning.model.jobs import GivenRates, JobSpec
from unicron_elastic.simulation.history.events import Event, FaultStruck, History
from unicron_elastic.simulation.model.scenario import Generated, Scenario
from unicron_elastic.simulation.model.study_result import SeedResult
from unicron_elastic.simulation.policies.policies import POLICIES
from unicron_elastic.simulation.study.run import simulate

DAY_S = 86_400.0
TERA = 1e12


def job(name: str, rates: list[float], **options: object) -> JobSpec:
    """A job with TFLOP/s by number of nodes, of 8 GPUs each."""
    told = {"command": ("train.py",), "directory": "/", "nproc_per_node": 8, **options}
    given = GivenRates(tuple(rate * TERA for rate in rates))
    return JobSpec(name=name, throughput=given, **told)  # type: ignore[arg-type]


def linear(name: str, most: int, per_node: float = 1.0, **options: object) -> JobSpec:
    """A job that is twice as fast on twice as many nodes, up to ``most``."""
    return job(name, [per_node * nodes for nodes in range(most + 1)], **options)


def cluster(nodes: int, *jobs: JobSpec, **options: object) -> Scenario:
    return Scenario(name="small", nodes=nodes, jobs=jobs, source=Generated(preset="trace-a"), **options)  # type: ignore[arg-type]


def history(nodes: int, *events: Event, days: float = 1.0, **options: object) -> History:
    return History.of(events, name="written", duration_s=days * DAY_S, nodes=nodes, source="a test", **options)


def fault(kind: Status, node: int = 0, at_s: float = 1000.0, repair_s: float | None = None) -> FaultStruck:
    return FaultStruck(at_s=at_s, node=node, kind=kind, repair_s=repair_s)


def ran(scenario: Scenario, policy: str, *events: Event, days: float = 1.0, **options: object) -> SeedResult:
    """One policy on these events."""
    written = history(scenario.all_nodes, *events, days=days, **options)
    return simulate(scenario, POLICIES[policy], 0, written)
