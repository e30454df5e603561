"""The copy of what planning has in the store: the same however it came about, and never spoilt by one bad record."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unicron_elastic.base.quarantine import Quarantined
from unicron_elastic.planning.coordinate.coordinator import CoordinatorState, PublishPlan, SnapshotSeen, handle
from unicron_elastic.planning.coordinate.node_status import Health, NodeState, NodeStatus
from unicron_elastic.planning.coordinate.proposal import propose
from unicron_elastic.planning.coordinate.snapshot import ClusterSnapshot, JobPhase, JobStatus
from unicron_elastic.planning.model.configurations import Workload
from unicron_elastic.planning.model.faulting import FaultRate
from unicron_elastic.planning.model.jobs import GPU_FLOPS, GivenRates, JobSpec, MeasuredSteps, Modelled
from unicron_elastic.planning.model.measured import MeasuredJob, Now, Stay
from unicron_elastic.planning.model.tasks import Transition
from unicron_elastic.rendezvous.plan.mirror import MOST_UNITS, PlanMirror, health_of
from unicron_elastic.rendezvous.records.plan import (
    PhaseRecord,
    faults_text,
    phase_text,
    rates_text,
    spec_text,
    status_text,
)
from unicron_elastic.rendezvous.records.plan_keys import (
    CURRENT,
    FAULTS,
    ORDERS,
    PLAN,
    PlannedJobKeys,
    order_key,
    status_key,
)
from unicron_elastic.rendezvous.store.interface import Change, Entry
from unicron_elastic.rendezvous.store.interface import Snapshot as StoreSnapshot

RATES = (0.0, 1e12, 1.9e12)
CHAT = PlannedJobKeys("chat")
SNAPSHOT_MS_MAX = 200.0  # 2 ms on an idle machine


def spec(name: str, **options: Any) -> JobSpec:
    return JobSpec(**{"name": name, "command": ("train",), "directory": "/", **options})


def node(host: str, **options: Any) -> NodeStatus:
    return NodeStatus(node_id=f"{host}/agent", host=host, **options)


def node_text(host: str, **options: Any) -> bytes:
    return status_text(node(host, **options)).encode()


def phase(found: JobPhase) -> bytes:
    return phase_text(PhaseRecord(phase=found, reason=f"It is {found.value}."))


def measured(nodes: int = 1, step_s: float = 1.0, flops: float | None = None) -> bytes:
    stay = Stay(since_unix_s=1.0, step_s=step_s, steps=60, flops_per_step=flops)
    now = Now(nodes=nodes, step_s=step_s, at_unix_s=1.0)
    found = MeasuredJob().with_steps(nodes, stay, is_global_batch_fixed=True, now=now)
    return found.with_transition("grow", 7.0).to_json()


def a_plan(*hosts: str) -> bytes:
    job = JobStatus(spec=spec("chat"), rates_flops=RATES)
    found = propose(ClusterSnapshot(nodes=tuple(node(host) for host in hosts), jobs=(job,)), 1e9)
    return found.to_json().encode()


class Mirrored:
    """Keys as the store has them, and a mirror that follows each change."""

    def __init__(self, **texts: bytes) -> None:
        self.revision = 1
        self.entries: dict[str, Entry] = {}
        self.mirror = PlanMirror(StoreSnapshot(prefix=PLAN, revision=1, entries=()))
        for key, text in texts.items():
            self.write(key, text)

    def write(self, key: str, text: bytes | None) -> None:
        """None: the key is deleted."""
        self.revision += 1
        entry = None
        if text is not None:
            entry = Entry(key=key, value=text, revision=self.revision, created=1, lease_id=None)
            self.entries[key] = entry
        elif self.entries.pop(key, None) is None:
            return
        self.mirror.apply([Change(key=key, revision=self.revision, entry=entry)])

    def read_afresh(self) -> PlanMirror:
        entries = tuple(self.entries[key] for key in sorted(self.entries))
        return PlanMirror(StoreSnapshot(prefix=PLAN, revision=self.revision, entries=entries))

    def snapshot(self) -> ClusterSnapshot:
        return snapshot_of(self.mirror)


def snapshot_of(mirror: PlanMirror) -> ClusterSnapshot:
    return mirror.planning_snapshot(lambda host: Health.DRAINING if host == "h1" else Health.OK)


def one_job(**texts: bytes) -> Mirrored:
    """The job chat with two nodes; ``texts`` by the last part of its keys."""
    found = Mirrored(**{CHAT.spec: spec_text(spec("chat")), **{f"{CHAT.prefix}{key}": t for key, t in texts.items()}})
    for host in ("h1", "h2"):
        found.write(status_key(f"{host}/agent"), node_text(host))
    return found


def only_job(mirrored: Mirrored) -> JobStatus:
    (job,) = mirrored.snapshot().jobs
    return job


# -- one by one is as all at once ----------------------------------------------------------------------------------

TEXTS: dict[str, list[bytes | None]] = {
    CURRENT: [a_plan("h1"), a_plan("h1", "h2")],
    FAULTS: [faults_text(FaultRate(faults=3, node_s=5.0)), b'{"faults": 1, "node_s": 1e999}'],
    status_key("h1/agent"): [node_text("h1"), node_text("h1", state=NodeState.WORKING, job="chat"), node_text("h2")],
    status_key("h2/agent"): [node_text("h2", label="rack")],
    order_key("h1/agent"): [b"{}"],
    f"{PLAN}else": [b"{}"],
}
for _name in ("chat", "code/1"):
    _keys = PlannedJobKeys(_name)
    TEXTS |= {
        _keys.spec: [
            spec_text(spec(_name)),
            spec_text(spec(_name, max_nodes=4, weight=2.0)),
            spec_text(spec(_name, throughput=GivenRates(RATES))),
            spec_text(spec("another")),
        ],
        _keys.phase: [phase(each) for each in JobPhase],
        _keys.rates: [rates_text(RATES), b'{"rates_flops": [0]}'],
        _keys.measured: [measured(), measured(2, 3.0, 1e12), b'{"grow_s": []}'],
        _keys.output: [b"host:1", b"\xff"],
        _keys.refused("h1/agent"): [b"It has no such folder."],
    }
ODD: list[bytes | None] = [None, None, b"", b"\xff", b"[]", b'{"phase": 1}']
CHANGES = st.sampled_from(sorted(TEXTS)).flatmap(lambda key: st.tuples(st.just(key), st.sampled_from(TEXTS[key] + ODD)))


@settings(max_examples=120, deadline=None)
@given(st.lists(CHANGES, max_size=40), st.integers(min_value=1, max_value=5))
def test_change_by_change_is_the_same_as_all_at_once(changes: list[tuple[str, bytes | None]], often: int) -> None:
    followed = Mirrored()
    for count, (key, text) in enumerate(changes):
        followed.write(key, text)
        if count % often == 0:
            followed.snapshot()  # what was kept for the next one must not be old
    afresh = followed.read_afresh()
    assert followed.snapshot() == snapshot_of(afresh)
    assert followed.mirror.jobs() == afresh.jobs()
    assert set(afresh.odd) <= set(followed.mirror.odd) <= set(followed.entries)
    assert followed.mirror.is_empty == (not followed.entries)


# -- jobs ----------------------------------------------------------------------------------------------------------


def test_a_job_without_a_phase_is_submitted() -> None:
    found = one_job()
    assert only_job(found).phase is JobPhase.SUBMITTED
    job = found.mirror.jobs()["chat"]
    assert (job.phase.reason, job.phase_revision) == ("chat was submitted.", 0)


def test_a_job_without_a_spec_is_none() -> None:
    found = Mirrored(**{CHAT.phase: phase(JobPhase.RUNNING)})
    assert (found.snapshot().jobs, found.mirror.jobs()) == ((), {})
    found.write(CHAT.spec, spec_text(spec("chat")))
    assert only_job(found).phase is JobPhase.RUNNING
    found.write(CHAT.spec, None)
    assert found.snapshot().jobs == ()


@pytest.mark.parametrize("over", [JobPhase.FINISHED, JobPhase.CANCELLED])
def test_a_job_that_is_over_stays_known_and_is_planned_no_more(over: JobPhase) -> None:
    found = one_job(phase=phase(over))
    assert (only_job(found).phase, only_job(found).is_planned) == (over, False)


def test_its_revision_is_that_of_what_it_is_planned_by() -> None:
    found = one_job()
    spec_revision = only_job(found).revision
    found.write(CHAT.phase, phase(JobPhase.RUNNING))
    found.write(CHAT.measured, measured())
    assert only_job(found).revision == spec_revision
    found.write(CHAT.rates, rates_text(RATES))
    assert only_job(found).revision == found.revision


def test_rates_are_first_assumed_then_measured_then_adopted() -> None:
    found = one_job()
    assert only_job(found).rates_flops[:3] == (0.0, GPU_FLOPS, 2 * GPU_FLOPS)
    assert only_job(found).newest_flops == ()
    found.write(CHAT.measured, measured(1, 1.0, 3e12))
    assert only_job(found).newest_flops[:2] == (0.0, 3e12)
    assert only_job(found).transition == Transition.of(7.0)
    found.write(CHAT.rates, rates_text(only_job(found).newest_flops))
    assert only_job(found).rates_flops == only_job(found).newest_flops


@pytest.mark.parametrize(
    ("options", "units"),
    [
        ({}, 8),
        ({"max_nodes": 12}, 12),
        ({"max_nodes": 12, "unit_nodes": 4}, 3),
        ({"max_nodes": 1_000_000}, MOST_UNITS),
        ({"min_nodes": 10}, 16),
        ({"min_nodes": 10, "unit_nodes": 5}, 8),
        ({"min_nodes": 1_000_000}, MOST_UNITS),
    ],
    ids=str,
)
def test_rates_are_known_for_what_there_is_and_what_is_needed(options: dict[str, Any], units: int) -> None:
    found = one_job(spec=spec_text(spec("chat", **options)))
    assert len(only_job(found).rates_flops) == units + 1


def test_who_needs_more_nodes_than_there_are_waits_for_them() -> None:
    """It is neither paused, nor can nobody tell for how many it waits."""
    found = one_job(spec=spec_text(spec("chat", min_nodes=10)))
    (wait,) = propose(found.snapshot(), 1e9).plan.waits
    assert wait.reason == "chat waits: it needs at least 10 nodes, and there is 1."


def test_rates_change_their_length_seldom() -> None:
    found = one_job()
    lengths = []
    for count in range(3, 40):
        found.write(status_key(f"h{count}/agent"), node_text(f"h{count}"))
        lengths.append(len(only_job(found).rates_flops) - 1)
    assert sorted(set(lengths)) == [8, 16, 32, 64]


def test_a_status_is_made_once_for_as_long_as_its_job_stays_as_it_is() -> None:
    found = one_job()
    before = only_job(found)
    found.write(status_key("h1/agent"), node_text("h1", label="rack"))
    assert only_job(found) is before
    found.write(CHAT.rates, rates_text(RATES))
    assert only_job(found) is not before


# -- odd records ---------------------------------------------------------------------------------------------------


def two_jobs() -> Mirrored:
    found = one_job(phase=phase(JobPhase.RUNNING))
    found.write(PlannedJobKeys("code").spec, spec_text(spec("code")))
    return found


def test_an_odd_node_costs_itself_alone() -> None:
    found = two_jobs()
    found.write(status_key("h2/agent"), b"{}")
    assert [each.host for each in found.snapshot().nodes] == ["h1"]
    assert list(found.mirror.odd) == [status_key("h2/agent")]
    found.write(status_key("h2/agent"), node_text("h2"))
    assert ([each.host for each in found.snapshot().nodes], found.mirror.odd) == (["h1", "h2"], {})


def test_an_odd_spec_costs_its_job_alone() -> None:
    found = two_jobs()
    found.write(CHAT.spec, b"{}")
    assert [job.name for job in found.snapshot().jobs] == ["code"]
    assert "plan/jobs/chat/spec holds no job's spec" in found.mirror.odd[CHAT.spec]
    found.write(CHAT.spec, spec_text(spec("chat")))
    assert ([job.name for job in found.snapshot().jobs], found.mirror.odd) == (["chat", "code"], {})


@pytest.mark.parametrize("key", [CHAT.rates, CHAT.measured])
def test_what_is_odd_about_its_speed_leaves_the_job(key: str) -> None:
    found = two_jobs()
    before = found.snapshot().jobs
    found.write(key, b"[]")
    now = found.snapshot().jobs
    assert [(each.name, each.phase, each.rates_flops) for each in now] == [
        (each.name, each.phase, each.rates_flops) for each in before
    ]
    assert list(found.mirror.odd) == [key]


def test_odd_faults_are_none() -> None:
    """Also for who knew better ones: all who coordinate must come to the same."""
    found = two_jobs()
    found.write(FAULTS, faults_text(FaultRate(faults=3, node_s=5.0)))
    assert found.snapshot().faults.faults == 3
    found.write(FAULTS, b"[]")
    assert found.snapshot().faults == FaultRate()


def test_a_job_whose_rates_nobody_can_compute_costs_itself_alone() -> None:
    """Its numbers are numbers, each by itself, and too large for the model."""
    odd = spec("odd", throughput=Modelled(Workload(global_batch=10**400, gpus_per_unit=1)))
    found = two_jobs()
    found.write(PlannedJobKeys("odd").spec, spec_text(odd))
    assert [job.name for job in found.snapshot().jobs] == ["chat", "code"]
    assert "holds a job whose rates nobody can compute" in found.mirror.odd[PlannedJobKeys("odd").spec]


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", json.dumps({"plan": 10**400}).encode()])
def test_a_published_plan_that_nobody_can_read_is_replaced(text: bytes) -> None:
    found = two_jobs()
    found.write(CURRENT, a_plan("h1", "h2"))
    found.write(CURRENT, text)
    assert (found.snapshot().published, list(found.mirror.odd)) == (None, [CURRENT])
    _, commands = handle(CoordinatorState(), SnapshotSeen(1e9, found.snapshot()))
    assert [each.expected_revision for each in commands if isinstance(each, PublishPlan)] == [0]
    assert found.mirror.revision(CURRENT) == found.revision  # by which it is overwritten
    found.write(CURRENT, a_plan("h1", "h2"))
    published = found.snapshot().published
    assert published is not None
    assert (published.revision, found.mirror.odd) == (found.revision, {})


# -- health --------------------------------------------------------------------------------------------------------


def kept_out(host: str, until: float | None = None, *, is_broken: bool = False) -> Quarantined:
    return Quarantined(node=host, reason="why", since=0.0, until=until, by="unicron-runner", is_broken=is_broken)


def test_a_broken_node_leaves_at_once_whoever_said_so() -> None:
    health = health_of([kept_out("h1"), kept_out("h2", is_broken=True)], 100.0)
    assert [health(host) for host in ("h1", "h2", "h3")] == [Health.DRAINING, Health.BROKEN, Health.OK]


def test_a_quarantine_ends_with_its_time() -> None:
    entries = [kept_out("h1", until=100.0)]
    assert [health_of(entries, at)("h1") for at in (99.9, 100.0)] == [Health.DRAINING, Health.OK]


def test_nodes_are_told_apart_by_their_hosts() -> None:
    found = two_jobs()
    nodes = found.mirror.planning_snapshot(health_of([kept_out("h2", is_broken=True)], 1.0)).nodes
    assert [each.health for each in nodes] == [Health.OK, Health.BROKEN]


# -- how long it takes ---------------------------------------------------------------------------------------------


def large(nodes: int = 2000, jobs: int = 64) -> Mirrored:
    """Every other job was measured."""
    found = Mirrored()
    for place in range(jobs):
        keys = PlannedJobKeys(f"job{place}")
        found.write(keys.spec, spec_text(spec(f"job{place}", throughput=MeasuredSteps())))
        if place % 2:
            found.write(keys.measured, measured(4, 1.0 + place, 1e14))
    for place in range(nodes):
        found.write(status_key(f"h{place}/agent"), node_text(f"h{place}", label=f"rack{place % 50}"))
    return found


def milliseconds(found: Mirrored, writes: Iterable[tuple[str, bytes]]) -> list[float]:
    """For each change until there is a snapshot of it."""
    times = []
    for key, text in writes:
        began = time.perf_counter()
        found.write(key, text)
        found.snapshot()
        times.append(1e3 * (time.perf_counter() - began))
    return sorted(times)


def test_a_change_among_2000_nodes_and_64_jobs_costs_milliseconds() -> None:
    found = large()
    found.snapshot()
    nodes = milliseconds(found, [(status_key("h7/agent"), node_text("h7", label=str(n))) for n in range(9)])
    steps = milliseconds(found, [(PlannedJobKeys("job1").measured, measured(4, 1.0 + n, 1e14)) for n in range(9)])
    print(f"2000 nodes, 64 jobs: {nodes[4]:.1f} ms after a change of a node, {steps[4]:.1f} ms after one of a job")
    assert max(nodes[4], steps[4]) < SNAPSHOT_MS_MAX


def test_orders_change_nothing_that_is_decided_from() -> None:
    found = two_jobs()
    before = found.snapshot()
    found.write(f"{ORDERS}h1%2Fagent", b"[]")
    assert (found.snapshot(), found.mirror.odd) == (before, {})
