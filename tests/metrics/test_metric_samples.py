"""From values to samples: what is told, what is left out, and what it is called."""

from __future__ import annotations

from dataclasses import replace

import pytest
from metric_values import CLOSED, COORDINATION, PLAN, every_sample, job, totals

from unicron_elastic.metrics import definitions
from unicron_elastic.metrics.definitions import JOB_PHASES, METRICS, NODE_STATES
from unicron_elastic.metrics.figures import CoordinationFigures, NodeFigures, PlanFigures, WorkerFigures
from unicron_elastic.metrics.samples import MetricSample, coordination_samples, job_samples, node_samples, plan_samples
from unicron_elastic.metrics.samples_text import parse_samples, samples_text
from unicron_elastic.planning.coordinate.node_status import NodeState
from unicron_elastic.recovery.state import Phase

RANKS = {"worker_up", "worker_step", "worker_iteration_time_seconds"}


def _values(samples: list[MetricSample], name: str) -> dict[tuple[str, ...], object]:
    return {each.labels: each.value for each in samples if each.metric.name == f"unicron_{name}"}


def test_every_metric_has_a_sample_and_the_labels_that_it_declares() -> None:
    samples = every_sample()
    assert {each.metric for each in samples} == set(METRICS)
    assert all(len(each.labels) == len(each.metric.labels) for each in samples)
    assert len({(each.metric, each.labels) for each in samples}) == len(samples)


def test_names_are_as_prometheus_wants_them() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.name.startswith("unicron_")
        assert (metric.kind == "counter") == metric.name.endswith("_total"), metric.name
        assert (metric.kind == "info") == metric.name.endswith("_info"), metric.name
        assert not metric.name.endswith(("_ms", "_milliseconds", "_minutes", "_bytes_total")), metric.name
        assert not {"job", "instance", "le"} & set(metric.labels), metric.name  # Prometheus's own
        assert metric.help.endswith(".")
        if metric.unit or "timestamp" in metric.name:
            assert "econds" in metric.help or metric.name.endswith("timestamp_seconds"), metric.name
        if "_waf" in metric.name:
            assert "FLOP/s" in metric.help


def test_states_are_called_as_those_who_have_them_call_them() -> None:
    assert [phase.value for phase in Phase] == list(JOB_PHASES)
    assert [state.value for state in NodeState] == list(NODE_STATES)


def test_a_job_tells_the_furthest_step_and_the_median_time() -> None:
    found = list(job_samples(job()))
    assert _values(found, "step") == {("run",): 120}
    assert _values(found, "iteration_time_seconds") == {("run",): 0.5}
    assert _values(found, "worker_step") == {("run", "4"): 120, ("run", "5"): 119}
    assert _values(found, "last_step_timestamp_seconds") == {("run",): 1.7e9 + 60.5}
    assert _values(found, "restarts_used") == {("run",): 1}
    assert _values(found, "lost_gpu_seconds_total")["run", "regrouped"] == 8.0
    assert _values(found, "incidents_total")["run", "2", "killed by signal"] == 1


def test_what_is_not_known_is_left_out() -> None:
    silent = WorkerFigures(rank=0, is_running=False, step=None, step_time_s=None)
    found = list(job_samples(job(workers=(silent,), last_step_unix_s=None)))
    for name in ("step", "iteration_time_seconds", "last_step_timestamp_seconds", "worker_step"):
        assert _values(found, name) == {}
    assert _values(found, "worker_up") == {("run", "0"): 0}


def test_before_the_first_step_a_worker_has_made_none() -> None:
    new = WorkerFigures(rank=0, is_running=True, step=0, step_time_s=None)
    assert _values(list(job_samples(job(workers=(new,)))), "step") == {("run",): 0}


@pytest.mark.parametrize("phase", JOB_PHASES)
def test_a_job_is_in_one_phase(phase: str) -> None:
    found = _values(list(job_samples(job(phase=phase))), "job_phase")
    assert found == {("run", each): int(each == phase) for each in JOB_PHASES}


def test_a_node_is_in_one_state() -> None:
    found = _values(list(node_samples(NodeFigures(node="n", state="joining"))), "node_state")
    assert found == {("n", "idle"): 0, ("n", "joining"): 1, ("n", "working"): 0, ("n", "leaving"): 0}


def test_series_do_not_grow_with_steps_or_incidents() -> None:
    few = job(incidents=totals(CLOSED).figures())
    many = job(incidents=totals(*[replace(CLOSED, number=number, step=number) for number in range(500)]).figures())
    later = replace(many, workers=tuple(replace(worker, step=10**9) for worker in many.workers))
    assert {(s.metric.name, s.labels) for s in job_samples(few)} == {
        (s.metric.name, s.labels) for s in job_samples(later)
    }


def test_only_local_workers_have_ranks() -> None:
    ranked = {metric.name.removeprefix("unicron_") for metric in METRICS if "rank" in metric.labels}
    assert ranked == RANKS
    found = [each for each in job_samples(job(world_size=4096)) if "rank" in each.metric.labels]
    assert len(found) == 2 * len(RANKS)


def test_who_does_not_know_the_cluster_says_so() -> None:
    blind = CoordinationFigures(leads=False, knows_coordinator=False, sees_store=False, lost_nodes=0)
    assert [each.value for each in coordination_samples(blind)] == [0, 0, 0, 0]
    assert [each.value for each in coordination_samples(COORDINATION)] == [1, 1, 1, 2]


def test_before_the_first_plan_there_is_none() -> None:
    found = list(plan_samples(PlanFigures(nodes=(("idle", 2),), quarantined=("a", "b"))))
    assert {each.metric.name for each in found} == {"unicron_cluster_nodes", "unicron_node_quarantined"}
    assert _values(found, "node_quarantined") == {("a",): 1, ("b",): 1}


def test_what_is_achieved_is_the_sum_over_jobs() -> None:
    two = replace(PLAN, jobs=(*PLAN.jobs, replace(PLAN.jobs[0], run_id="other", achieved_flops=1e15)))
    found = list(plan_samples(two))
    assert _values(found, "achieved_waf") == {(): 3.5e15}
    assert _values(found, "job_achieved_waf") == {("run",): 2.5e15, ("other",): 1e15}
    assert _values(found, "plan_waf") == {(): 3e15}


def test_samples_survive_their_way_to_the_agent() -> None:
    samples = tuple(every_sample(run_id='odd "\n\\ ü'))
    assert parse_samples(samples_text(samples)) == samples


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{}", b"nonsense", b"[1]", b'[["unicron_step", ["run"]]]', b'[["unicron_step", [], 1]]',
        b'[["unicron_step", [1], 1]]', b'[["unicron_step", ["run"], "1"]]', b'[["unicron_step", ["run"], true]]',
        b'[["unicron_step", ["run"], NaN]]', b'[["unicron_nothing", ["run"], 1]]', b"[" * 100_000, b"\xff\xfe",
        b'[["unicron_recovery_time_seconds", ["run"], 1]]', b'[["unicron_recovery_time_seconds", ["run"], [[1], 1]]]',
    ],
)  # fmt: skip
def test_what_are_no_samples_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):
        parse_samples(text)


def test_all_definitions_are_found() -> None:
    named = {value.name for value in vars(definitions).values() if isinstance(value, definitions.Metric)}
    assert named == {metric.name for metric in METRICS}
