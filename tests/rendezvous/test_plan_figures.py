"""What a coordinator tells of its plan in numbers, and what any agent tells of its part in the cluster."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from term_lab import NOW, Cluster, spec, two_jobs

from unicron_elastic.membership.coordination import CoordinationState, Leader
from unicron_elastic.metrics.figures import PlanFigures
from unicron_elastic.planning.coordinate.snapshot import JobPhase
from unicron_elastic.planning.model.measured import MeasuredJob, Now, Stay
from unicron_elastic.rendezvous.cluster.cluster_answers import ClusterAnswers
from unicron_elastic.rendezvous.plan.planner import Planner
from unicron_elastic.rendezvous.records.plan import PhaseRecord, phase_text
from unicron_elastic.rendezvous.records.plan_keys import PlannedJobKeys

LEADER = Leader("n1/agent", "n1", "n1:1", revision=7)


def _measured(cluster: Cluster, job: str, nodes: int, at_unix_s: float) -> None:
    stay = Stay(since_unix_s=at_unix_s, step_s=2.0, steps=20, flops_per_step=None)
    now = Now(nodes=nodes, step_s=2.0, at_unix_s=at_unix_s)
    told = MeasuredJob().with_steps(nodes, stay, is_global_batch_fixed=True, now=now)
    cluster.store.put(PlannedJobKeys(job).measured, told.to_json())


def test_without_a_plan_there_are_no_numbers_of_one() -> None:
    cluster = Cluster()
    assert cluster.term.figures(NOW) == PlanFigures(
        nodes=(("idle", 0), ("joining", 0), ("working", 0), ("leaving", 0)), quarantined=(), jobs=()
    )


def test_a_plan_is_told_with_what_its_jobs_are_to_have() -> None:
    cluster = two_jobs()
    cluster.look()
    found = cluster.term.figures(NOW)
    plan = cluster.published.plan
    assert dict(found.nodes)["working"] == 6
    assert found.waf_flops == plan.waf_after_flops
    assert found.made_unix_s == NOW
    assert {job.run_id: job.plan_nodes for job in found.jobs} == plan.counts
    assert sum(job.plan_flops for job in found.jobs) == pytest.approx(found.waf_flops)
    assert all(job.achieved_flops == 0.0 for job in found.jobs)  # nobody has told how fast it is
    for job in found.jobs:
        assert dict(job.nodes)["working"] == len(cluster.working(job.run_id))


def test_what_a_job_achieves_counts_while_it_is_heard_of() -> None:
    cluster = two_jobs()
    nodes = len(cluster.working("chat"))
    _measured(cluster, "chat", nodes - 1, NOW)
    cluster.look()

    def achieved(at_unix_s: float) -> float:
        return {job.run_id: job.achieved_flops for job in cluster.term.figures(at_unix_s).jobs}["chat"]

    rates = spec("chat", 1.2).throughput.rates_flops  # type: ignore[union-attr]
    assert achieved(NOW + 5.0) == rates[nodes - 1]
    assert achieved(NOW + 60.0) == 0.0


def test_weights_count() -> None:
    cluster = Cluster()
    cluster.start("h1")
    cluster.submit(spec("chat", weight=3.0))
    cluster.settle()
    _measured(cluster, "chat", 1, NOW)
    cluster.look()
    (job,) = cluster.term.figures(NOW).jobs
    assert job.plan_flops == job.achieved_flops == 3.0 * spec("chat").throughput.rates_flops[1]  # type: ignore[union-attr]
    assert cluster.term.figures(NOW).waf_flops == pytest.approx(job.plan_flops)


def test_jobs_that_are_over_are_told_no_more() -> None:
    cluster = two_jobs()
    cluster.store.put(PlannedJobKeys("chat").phase, phase_text(PhaseRecord(phase=JobPhase.FINISHED, reason="")))
    cluster.settle()
    assert [job.run_id for job in cluster.term.figures(NOW).jobs] == ["code"]


def test_who_is_kept_out_is_told_until_that_is_over() -> None:
    cluster = Cluster()  # nothing is planned here
    cluster.keep_out("b", "ada", until=NOW + 60.0)
    cluster.keep_out("a", "ada")
    cluster.look()
    assert cluster.term.figures(NOW).quarantined == ("a", "b")
    assert cluster.term.figures(NOW + 61.0).quarantined == ("a",)


# -- any agent -----------------------------------------------------------------------------------------------------


def _heartbeats(**known: Any) -> Any:
    state = CoordinationState(me="n2/agent", **{"leader": LEADER, **known})
    return SimpleNamespace(state=state, lost_nodes=2, turned_at=time.monotonic())


@pytest.fixture
def planner() -> Planner:
    def open_store() -> Any:
        raise AssertionError("nobody leads here")

    return Planner(open_store, lambda _words: None)


def test_who_follows_is_ready_and_says_what_it_does(planner: Planner) -> None:
    answers = ClusterAnswers(_heartbeats(), planner)
    assert [each.value for each in answers.samples()] == [0, 1, 1, 2]
    assert (answers.why_not_ready(), answers.why_unwell()) == ("", "")
    assert answers.plan() is None


def test_who_does_not_see_the_store_is_not_ready(planner: Planner) -> None:
    answers = ClusterAnswers(_heartbeats(blind="away"), planner)
    assert answers.why_not_ready() == "The cluster's etcd cannot be read."
    assert answers.why_unwell() == ""  # nobody has to end it for that


def test_where_nobody_coordinates_nobody_is_ready(planner: Planner) -> None:
    assert ClusterAnswers(_heartbeats(leader=None), planner).why_not_ready() == "Nobody coordinates the cluster."


def test_who_has_not_entered_says_so(planner: Planner) -> None:
    answers = ClusterAnswers(None, planner)
    assert [each.value for each in answers.samples()] == [0, 0, 0, 0]
    assert answers.why_not_ready() == "The cluster's etcd cannot be read."
    assert answers.why_unwell() == ""


def test_loops_that_stand_are_unwell() -> None:
    heartbeats, planner = _heartbeats(), cast("Any", SimpleNamespace(turned_at=None))
    now = time.monotonic()
    moments = iter([now + 100.0, now + 100.0, now + 500.0])
    answers = ClusterAnswers(heartbeats, planner, lambda: next(moments))
    assert answers.why_unwell() == "The loop of the heartbeats has not gone round for 100 s."
    heartbeats.turned_at = now + 1000.0
    planner.turned_at = now
    assert answers.why_unwell() == ""
    assert answers.why_unwell() == "The planner's loop has not gone round for 500 s."
