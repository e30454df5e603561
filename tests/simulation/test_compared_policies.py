"""Policies beside each other: the same faults for all, the oracle above all, and the same bytes each time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from small_cluster import cluster, job, linear

from unicron_elastic.simulation.model.scenario import Generated, Replayed, Scenario
from unicron_elastic.simulation.policies.policies import ABLATION, COMPARED, POLICIES
from unicron_elastic.simulation.study.report import to_json
from unicron_elastic.simulation.study.scenario_file import preset_scenario
from unicron_elastic.simulation.study.studies import VARIED, study, study_count, varied

UNEVEN = [0.0, 1.0, 2.0, 2.5, 4.0, 4.0, 5.0]
BUSY = replace(
    cluster(6, job("a", UNEVEN), job("b", UNEVEN, weight=2.0), linear("c", 2, 0.5)),
    source=Generated(preset="trace-b", duration_s=2 * 86_400.0, fault_factor=2.0),
    reattempt_fails=0.1,
    restart_fails=0.1,
)


@pytest.fixture(scope="module")
def compared() -> dict[str, list[float]]:
    """The share of the ideal that each policy achieves, by seed."""
    found = study(BUSY, list(POLICIES), range(3))
    return {each.policy: [seed.waf_ratio for seed in each.seeds] for each in found.policies}


def test_the_oracle_is_the_upper_limit(compared: dict[str, list[float]]) -> None:
    for name, ratios in compared.items():
        for ratio, best in zip(ratios, compared["oracle"], strict=True):
            assert 0.0 < ratio <= best * (1 + 1e-9), name


def test_each_part_of_unicron_is_worth_something(compared: dict[str, list[float]]) -> None:
    whole = sum(compared["unicron"])
    for name in ("no-detection", "no-partial", "no-nearest", "no-plan", "equal", "weighted", "sized"):
        assert sum(compared[name]) < whole, name
    for name in ("megatron", "torchrun", "varuna", "bamboo"):
        assert sum(compared[name]) < whole, name
    assert sum(compared["megatron-waits"]) < sum(compared["megatron"]) < sum(compared["torchrun"])


def test_the_same_seed_gives_the_same_bytes_however_many_processes_there_are() -> None:
    once, twice = (to_json(study(BUSY, ["unicron", "megatron"], [4, 5]), curves=True) for _ in range(2))
    assert once == twice
    assert once == to_json(study(BUSY, ["unicron", "megatron"], [4, 5], processes=2), curves=True)
    assert once != to_json(study(BUSY, ["unicron", "megatron"], [4, 6]), curves=True)


def test_faults_are_the_same_for_all_policies() -> None:
    quiet = replace(BUSY, reattempt_fails=0.0, restart_fails=0.0)
    found = study(quiet, list(COMPARED), [1])
    kinds = {each.policy: [(i.at_s, i.node) for i in each.seeds[0].incidents] for each in found.policies}
    assert len(kinds["unicron"]) > 20
    # Away is away: a node that one policy has isolated has no fault there, and all isolate for the same faults here.
    assert kinds["unicron"] == kinds["torchrun"] == kinds["oracle"]


def test_a_study_says_what_it_is_of_and_calls_after_each_simulation() -> None:
    calls = list[int]()
    found = study(BUSY, ["oracle"], [1, 2], done=lambda: calls.append(1))
    assert len(calls) == study_count(["oracle"], [1, 2]) == 2
    assert (found.scenario, found.nodes, found.gpus) == ("small", 6, 48)
    assert found.history.startswith("trace-b: like the Unicron paper's trace-b")


def test_unknown_policies_are_told() -> None:
    with pytest.raises(ValueError, match="there is no policy 'unicorn': known are unicron"):
        study(BUSY, ["unicorn"], [0])
    with pytest.raises(ValueError, match="there is nothing to simulate"):
        study(BUSY, ["unicron"], [])


@pytest.mark.parametrize("what", list(VARIED))
def test_what_can_be_varied_changes_something(what: str) -> None:
    name = "megatron" if what == "checkpoint-interval" else "unicron"
    least, most = VARIED[what][0], VARIED[what][-1]
    results = []
    for value in (least, most):
        scenario, told = varied(BUSY, what, value)
        assert f" {value:g} " in told
        results.append(study(scenario, [name], [0], told=told).policies[0].seeds[0].waf)
    assert results[0] != results[1]


def test_what_cannot_be_varied_is_told() -> None:
    replayed = replace(BUSY, source=Replayed(path=Path("x.csv")))
    with pytest.raises(ValueError, match="the fault rate of a history that is replayed is as it was"):
        varied(replayed, "fault-rate", 2.0)
    with pytest.raises(ValueError, match=r"1\.5 spares: it must be a whole number"):
        varied(BUSY, "spares", 1.5)


def test_policies_have_names_of_their_own_and_sources_for_what_they_cost() -> None:
    assert set(COMPARED) | set(ABLATION) <= set(POLICIES)
    assert len({policy.title for policy in POLICIES.values()}) == len(POLICIES)
    for policy in POLICIES.values():
        assert (policy.durations is None) or (policy.costs is None)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["trace-a", "trace-b"])
def test_all_policies_on_the_papers_kind_of_histories(preset: str) -> None:
    scenario: Scenario = preset_scenario(preset)
    found = study(scenario, list(POLICIES), range(2))
    by_name = {each.policy: sum(seed.waf_ratio for seed in each.seeds) for each in found.policies}
    assert max(by_name.values()) == by_name["oracle"]
    assert by_name["unicron"] > by_name["megatron"]
