"""Scenarios from files: what is wrong is told with the file, and with what would be right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_cluster import DAY_S, cluster, linear

from unicron_elastic.planning.model.jobs import GivenRates, Modelled
from unicron_elastic.simulation.history.presets import PRESETS
from unicron_elastic.simulation.model.scenario import Generated, Replayed, Scenario
from unicron_elastic.simulation.model.shape import shape_of
from unicron_elastic.simulation.study.job_set import JOB_SETS, default_jobs, gpt, job_set
from unicron_elastic.simulation.study.scenario_file import preset_scenario, read_scenario, replay_scenario

JOB = {"name": "a", "throughput": {"rates_flops": [0.0, 1e12, 2e12]}}
TOLD = {
    "name": "ours",
    "nodes": 4,
    "spares": 1,
    "jobs": [{**JOB, "weight": 2.0}, {"name": "b", "throughput": {"rates_flops": [0.0, 3e12]}, "min_nodes": 1}],
    "history": {"preset": "trace-a", "days": 3, "fault_factor": 2.0, "repair": "1h-2h"},
    "checkpoint_s": 600,
    "restart_fails": 0.25,
}


def written(folder: Path, told: object) -> Path:
    path = folder / "ours.json"
    path.write_text(json.dumps(told))
    return path


def test_a_scenario_says_all_that_can_be_said(tmp_path: Path) -> None:
    found = read_scenario(written(tmp_path, TOLD))
    assert (found.name, found.nodes, found.all_nodes, found.checkpoint_s) == ("ours", 4, 5, 600.0)
    assert (found.reattempt_fails, found.restart_fails) == (0.0, 0.25)
    assert [(job.name, job.weight, job.nproc_per_node) for job in found.jobs] == [("a", 2.0, 8), ("b", 1.0, 8)]
    assert isinstance(found.source, Generated)
    history = found.history(7)
    assert (history.nodes, history.duration_s) == (5, 3 * DAY_S)
    assert all(3600.0 <= event.repair_s <= 7200.0 for event in history.faults if event.repair_s is not None)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"nods": 4}, "the unknown key 'nods': did you mean nodes?"),
        ({"nodes": 0}, "nodes is 0: it must be a whole number, at least 1"),
        ({"nodes": 4.5}, "nodes is 4.5: it must be a whole number"),
        ({"name": " "}, "name must be a text that is not blank"),
        ({"jobs": []}, "there are no jobs: give at least one"),
        ({"jobs": [JOB, JOB]}, "two jobs have the same name"),
        ({"jobs": "case-9"}, "there are no jobs 'case-9': known are case-1, "),
        ({"jobs": 3}, "jobs are 3: they must be a list of jobs, or the name of a set"),
        ({"jobs": [{"name": "a"}]}, "job a has no throughput: a simulation needs rates_flops or workload"),
        ({"jobs": [{**JOB, "nproc_per_node": 4}]}, "nproc_per_node is 4: it must be gpus_per_node, which is 8"),
        ({"jobs": [{**JOB, "wieght": 1}]}, "the unknown key 'wieght': did you mean weight?"),
        ({"history": {"preset": "trace-z"}}, "there is no preset 'trace-z': known are trace-a"),
        ({"history": {}}, "history must have either preset or file"),
        ({"history": {"preset": "trace-a", "file": "x.csv"}}, "history must have either preset or file"),
        ({"history": {"file": "x.csv", "days": 3}}, "history has a file: what happens is in it"),
        ({"history": {"preset": "trace-a", "days": 0}}, "days is 0: it must be more than 0"),
        ({"history": {"preset": "trace-a", "repair": "soon"}}, "repair is 'soon': write a time"),
        ({"history": {"preset": "trace-a", "racks": {"nodes": 1, "share": 0.5}}}, "a rack has at least 2 nodes"),
        ({"checkpoint_s": 0}, "checkpoint_s is 0.0: it must be seconds, more than 0"),
        ({"checkpoint_s": "often"}, "checkpoint_s is 'often': it must be a number"),
        ({"restart_fails": 2}, "restart_fails is 2.0: it must be a probability"),
        ({"durations": {"proces_s": 1}}, "the unknown key 'proces_s': did you mean process_s?"),
        ({"durations": {"process_s": -1}}, "process_s is -1.0: it must be 0 or more"),
        ({"durations": {"peer_bytes_per_s": 0}}, "peer_bytes_per_s is 0.0: it must be more than 0"),
        ({"durations": {"process_s": "soon"}}, "process_s is 'soon': it must be a number"),
        ({"spares": -1}, "spares is -1: it must be a whole number, at least 0"),
    ],
)
def test_what_is_wrong_is_told(tmp_path: Path, changes: dict[str, object], told: str) -> None:
    path = written(tmp_path, {**TOLD, **changes})
    with pytest.raises(ValueError, match=r"ours\.json") as caught:
        read_scenario(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert told in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000])
def test_a_file_that_is_no_json_is_told(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ours.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="it must be JSON, and is not"):
        read_scenario(path)


def test_files_of_a_scenario_are_beside_it(tmp_path: Path) -> None:
    found = read_scenario(written(tmp_path, {**TOLD, "history": {"file": "faults.csv"}}))
    assert found.source == Replayed(path=tmp_path / "faults.csv")


def test_a_preset_has_jobs_that_suit_its_size() -> None:
    assert [job.name for job in preset_scenario("trace-a").jobs] == [
        f"job-{n}-{s}" for n, s in enumerate(JOB_SETS["case-3"][0], 1)
    ]
    assert [job.name for job in preset_scenario("llama3").jobs] == ["gpt"]
    assert preset_scenario("trace-b", "case-2").jobs[5].weight == 2.0
    for name, preset in PRESETS.items():
        assert preset_scenario(name).nodes == preset.nodes


def test_a_history_brings_its_own_number_of_nodes(tmp_path: Path) -> None:
    path = tmp_path / "faults.csv"
    path.write_text("# nodes: 5\n# duration_s: 1000\nat_s,event,node,kind,repair_s\n10,fault,2,ECC error,100\n")
    found = replay_scenario(path)
    assert found.nodes == 5
    assert len(found.history(0).faults) == 1
    assert found.history(0) == found.history(5)


def test_built_in_jobs_run_on_the_nodes_that_they_are_meant_for() -> None:
    for name in JOB_SETS:
        nodes = 16 if name != "one" else 64
        for job in job_set(name, nodes):
            shape = shape_of(job, nodes, uneven=False)
            assert shape.rate_flops(job.min_nodes) > 0.0, job.name
    assert len(default_jobs(16)) == 6
    with pytest.raises(ValueError, match=r"there is no size '3B': known are 1\.3B"):
        gpt("a", "3B")


def test_a_shape_leaves_idle_what_would_make_it_slower() -> None:
    job = gpt("a", "7B")
    even, uneven = (shape_of(job, 16, uneven=is_uneven) for is_uneven in (False, True))
    assert even.rates_flops[5] == 0.0  # 40 GPUs do not divide 1,024 samples
    assert even.rate_flops(5) == even.rate_flops(4)
    assert even.used_nodes(5) == 4
    assert uneven.rate_flops(5) > even.rate_flops(5)
    assert isinstance(job.throughput, Modelled)
    assert even.step_s(4) == pytest.approx(job.throughput.workload.step_flops / even.rate_flops(4))


def test_a_lost_rank_takes_its_replica_with_it() -> None:
    shape = shape_of(gpt("a", "70B"), 16, uneven=False)
    tensor, pipeline = shape.layout_on(8)
    replicas = shape.replicas_on(8)
    assert tensor * pipeline * replicas == 64
    assert shape.lost_part(8, 1) == 1.0 / replicas
    assert shape.lost_part(8, 8) == max(1.0, 8 / (tensor * pipeline)) / replicas
    assert shape.lost_part(8, 64) == 1.0


def test_a_job_that_would_have_to_be_measured_cannot_be_simulated() -> None:
    from dataclasses import replace

    from unicron_elastic.planning.model.jobs import MeasuredSteps

    with pytest.raises(ValueError, match="its throughput is to be measured, which a simulation cannot"):
        shape_of(replace(linear("a", 2), throughput=MeasuredSteps()), 2, uneven=False)
    assert isinstance(linear("a", 2).throughput, GivenRates)


def test_a_scenario_has_its_bounds() -> None:
    with pytest.raises(ValueError, match="nodes is 0"):
        cluster(0, linear("a", 1))
    with pytest.raises(ValueError, match="there are no jobs"):
        Scenario(name="x", nodes=1, jobs=(), source=Generated(preset="trace-a"))
