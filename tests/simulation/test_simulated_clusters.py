"""Nodes come and go under the live coordinator, and where nodes are divided once."""

from __future__ import annotations

import pytest
from small_cluster import DAY_S, TERA, cluster, fault, history, job, linear, ran

from unicron_elastic.faults import Status
from unicron_elastic.simulation.history.events import JobArrives, JobEnds, NodeJoins, NodeLeaves
from unicron_elastic.simulation.model.durations import DURATIONS
from unicron_elastic.simulation.model.published import COSTS
from unicron_elastic.simulation.model.study_result import SeedResult
from unicron_elastic.simulation.policies.policies import POLICIES
from unicron_elastic.simulation.study.run import Simulation

GONE = Status.LOST_CONNECTION
IN_PLACE = ("unicron", "no-plan")


def at(result: SeedResult, at_s: float) -> float:
    """TFLOP/s at a moment."""
    return next(point.waf_flops for point in reversed(result.curve) if point.at_s <= at_s) / TERA


def test_nothing_is_lost_where_nothing_happens() -> None:
    scenario = cluster(6, linear("a", 4), linear("b", 4, weight=0.5))
    for name, policy in POLICIES.items():
        found = ran(scenario, name)
        assert found.lost_waf.detection == found.lost_waf.transition == 0.0, name
        assert found.incidents == ()
        if policy.costs is None and name != "no-nearest" and policy.division in ("coordinator", "planned", "oracle"):
            assert found.waf_ratio == pytest.approx(1.0), name
            assert found.effective_ratio == pytest.approx(1.0)


def test_the_coordinator_takes_a_node_from_the_job_that_loses_least() -> None:
    scenario = cluster(4, linear("dear", 2, 10.0, min_nodes=2), linear("cheap", 2, 1.0))
    found = ran(scenario, "unicron", fault(GONE, node=3, repair_s=10_000.0), days=0.5)
    assert at(found, 0.0) == 22.0
    assert at(found, 5000.0) == 21.0  # "dear" has a node of "cheap"
    assert at(found, 40_000.0) == 22.0
    assert found.moves >= 2
    keeps = ran(scenario, "no-plan", fault(GONE, node=2, repair_s=10_000.0), days=0.5)
    assert at(keeps, 5000.0) < 21.0  # a job that may not go on with fewer waits for its own node


def test_an_idle_node_takes_the_place_of_a_lost_one_while_the_others_go_on() -> None:
    scenario = cluster(3, linear("a", 2), spares=0)
    for name in IN_PLACE:
        found = ran(scenario, name, fault(GONE, node=0, repair_s=DAY_S))
        (incident,) = found.incidents
        assert at(found, 1010.0) == 1.0, name
        assert at(found, 1000.0 + DURATIONS.process.value + 60.0) == 2.0, name
        assert incident.transition_s < 20.0, name


def test_a_node_that_comes_back_is_used_again() -> None:
    scenario = cluster(4, linear("a", 4))
    for name in POLICIES:
        found = ran(scenario, name, fault(GONE, node=1, repair_s=20_000.0), days=1.0)
        full = at(found, 0.0)
        assert 0.0 < at(found, 15_000.0) < full or name == "megatron-waits", name
        assert at(found, 50_000.0) == pytest.approx(full), name


def test_a_job_that_cannot_go_on_with_fewer_waits() -> None:
    scenario = cluster(2, linear("a", 2, min_nodes=2))
    found = ran(scenario, "unicron", fault(GONE, node=1, repair_s=10_000.0))
    assert at(found, 9000.0) == 0.0
    assert at(found, 11_500.0) == 2.0


def test_megatron_waits_for_the_repair_where_it_cannot_shrink() -> None:
    scenario = cluster(4, linear("a", 4))
    event = fault(GONE, node=1, repair_s=20_000.0)
    shrinks, waits = ran(scenario, "megatron", event), ran(scenario, "megatron-waits", event)
    assert at(shrinks, 15_000.0) > 0.0
    assert at(waits, 15_000.0) == 0.0
    assert at(waits, 40_000.0) == at(shrinks, 40_000.0)


def test_megatron_takes_its_time_for_a_crash_and_computes_again_since_the_checkpoint() -> None:
    (found,) = ran(cluster(4, linear("a", 4)), "megatron", fault(Status.CUDA_ERROR, at_s=1800.0 + 300.0)).incidents
    costs = COSTS["megatron"]
    assert found.detection_s == pytest.approx(30 * 60.0)
    assert found.transition_s == pytest.approx(costs.transition_s(7e9) + 300.0)


def test_others_go_on_without_a_replica_under_torchft_and_a_node_under_oobleck() -> None:
    scenario = cluster(4, linear("a", 4))
    for name in ("torchft", "oobleck", "bamboo"):
        found = ran(scenario, name, fault(Status.KILLED_BY_SIGNAL))
        assert 0.0 < at(found, 1040.0) < at(found, 0.0), name
        assert at(found, 4000.0) == at(found, 0.0), name


def test_spares_take_the_place_of_lost_nodes_under_every_policy() -> None:
    few, more = (cluster(4, linear("a", 4, max_nodes=4), spares=spares) for spares in (0, 1))
    event = fault(GONE, node=0, repair_s=DAY_S / 2)
    for name in POLICIES:
        assert ran(more, name, event).waf > ran(few, name, event).waf, name


def test_jobs_arrive_and_end() -> None:
    scenario = cluster(4, linear("a", 4), linear("b", 4, 2.0))
    events = (JobArrives(at_s=10_000.0, job="b"), JobEnds(at_s=50_000.0, job="b"))
    found = ran(scenario, "unicron", *events)
    assert (at(found, 5000.0), at(found, 30_000.0), at(found, 60_000.0)) == (4.0, 8.0, 4.0)
    assert found.waf_ideal == pytest.approx(TERA * (4.0 * (DAY_S - 40_000.0) + 8.0 * 40_000.0))
    oracle = ran(scenario, "oracle", *events)
    assert oracle.waf_ratio == pytest.approx(1.0)


def test_nodes_that_are_absent_join_and_leave() -> None:
    scenario = cluster(4, linear("a", 4))
    events = (NodeJoins(at_s=10_000.0, node=3), NodeLeaves(at_s=40_000.0, node=3, notice_s=120.0))
    for name in ("unicron", "no-plan", "megatron", "torchft", "oracle"):
        found = ran(scenario, name, *events, absent=frozenset({3}))
        assert at(found, 30_000.0) > at(found, 5000.0), name
        assert at(found, 80_000.0) == pytest.approx(at(found, 5000.0)), name


def test_a_node_that_is_announced_to_go_is_out_of_its_job_before_it_goes() -> None:
    scenario = cluster(4, linear("a", 4))
    told, untold = (
        ran(scenario, "unicron", NodeLeaves(at_s=40_000.0, node=3, notice_s=notice_s)) for notice_s in (120.0, 0.0)
    )
    assert told.incidents[0].job == ""
    assert untold.incidents[0].job == "a"
    assert told.lost_waf.detection == 0.0


def test_a_history_brings_only_jobs_that_are_known() -> None:
    with pytest.raises(ValueError, match="brings the job c: the scenario must have it"):
        ran(cluster(2, linear("a", 2)), "unicron", JobArrives(at_s=1.0, job="c"))


def test_a_fault_on_a_node_that_is_away_or_idle_disturbs_nobody() -> None:
    scenario = cluster(3, linear("a", 2))
    events = [
        fault(GONE, 0, 1000.0, 50_000.0),
        fault(Status.CUDA_ERROR, 0, 2000.0),
        fault(Status.CUDA_ERROR, 0, 60_000.0),
    ]
    found = ran(scenario, "unicron", *events)
    assert [each.job for each in found.incidents] == ["a", ""]
    assert found.incidents[1].lost_flop == 0.0


def test_nobody_stands_still_for_good_whatever_happens() -> None:
    """Every policy, two days of faults sixteen times as often as in trace-b, and a quiet day after them."""
    from unicron_elastic.simulation.history.generate import generate

    faults = generate("trace-b", 3, nodes=6, duration_s=2 * DAY_S, fault_factor=16.0).events
    rates = [0.0, 1.0, 2.0, 2.5, 4.0, 4.0, 5.0]
    scenario = cluster(
        6, job("a", rates), job("b", rates, weight=2.0, min_nodes=2), reattempt_fails=0.3, restart_fails=0.3
    )
    written = history(6, *faults, days=4.0)
    assert len(faults) > 100
    for policy in POLICIES.values():
        simulation = Simulation(scenario, policy, 0, written)
        found = simulation.run()
        for name in ("a", "b"):
            training = simulation.training(name)
            assert not training.stands, (policy.name, name)
            assert training.lost_part() == 0.0, (policy.name, name)
        assert found.waf == pytest.approx(found.waf_ideal - found.lost_waf.total), policy.name
        assert found.effective_ratio == pytest.approx(1.0 - found.lost_gpu_s.total / found.gpu_s)
        assert all(0.0 <= point.waf_flops <= found.waf_ideal / found.duration_s * 1.001 for point in found.curve)
