"""A job's spec: what can be said in it, and what is told to whoever gets it wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unicron_elastic.planning.model.jobs import GivenRates, JobSpec, MeasuredSteps, Modelled, parse_job, parse_jobs

LEAST: dict[str, Any] = {"name": "llama", "command": ["python", "train.py"], "directory": "/home/me"}
WORKLOAD = {
    "global_batch": 512,
    "micro_batch_sizes": [1, 2],
    "gpus_per_unit": 16,
    "transformer": {"layers": 32, "hidden": 4096, "heads": 32, "sequence": 2048, "vocabulary": 51200},
}


def test_the_least_that_must_be_said() -> None:
    assert parse_job(LEAST) == JobSpec(name="llama", command=("python", "train.py"), directory="/home/me")


def test_everything_that_can_be_said() -> None:
    found = parse_job(
        {
            **LEAST,
            "env": {"NCCL_DEBUG": "WARN"},
            "nproc_per_node": 8,
            "min_nodes": 3,
            "max_nodes": 16,
            "unit_nodes": 2,
            "weight": 0.5,
            "pinned_nodes": 4,
            "paused": True,
            "throughput": {"workload": WORKLOAD},
        }
    )
    assert isinstance(found.throughput, Modelled)
    assert (found.least_nodes, found.weight, found.paused) == (4, 0.5, True)
    assert parse_job(json.loads(json.dumps(found.to_json()))) == found


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"wieght": 2}, "job llama has the unknown key 'wieght': did you mean weight?"),
        ({"colour": 2}, "unknown key 'colour': known are name, command"),
        ({"weight": -1}, "job llama: weight is -1: it must be a number, 0 or more"),
        ({"weight": float("nan")}, "weight is nan"),
        ({"weight": "2"}, "weight is '2'"),
        ({"min_nodes": 4, "max_nodes": 2}, "min_nodes is 4: it must be at most max_nodes, which is 2"),
        ({"min_nodes": 0}, "min_nodes is 0: it must be a whole number, at least 1"),
        ({"min_nodes": 3, "max_nodes": 3, "unit_nodes": 2}, "a multiple of it must lie between"),
        ({"nproc_per_node": True}, "nproc_per_node is True"),
        ({"command": []}, r"command is \[\]: it must be a list of words, those after unicron-run"),
        ({"command": ["  "]}, "those after unicron-run"),
        ({"command": "python train.py"}, "it must be a list of words, such as"),
        ({"command": ["a\0b"]}, "must hold no NUL"),
        ({"directory": "here"}, "directory is 'here': it must be an absolute path"),
        ({"env": {"A": 1}}, "env must be an object of texts"),
        ({"env": ["A=1"]}, "env must be an object of texts"),
        ({"name": " "}, "its name must have 1 to 200 characters"),
        ({"paused": "no"}, "paused is 'no': it must be true or false"),
        ({"pinned_nodes": 0}, "pinned_nodes is 0: it must be a whole number, at least 1"),
        ({"pinned_nodes": 3, "max_nodes": 2}, "to let it wait, set paused"),
        ({"throughput": {}}, "throughput: it has nothing: it must have one of rates_flops, workload, gpu_flops"),
        ({"throughput": {"rates_flops": [0, 1], "gpu_flops": 1.0}}, "it must have one of"),
        ({"throughput": {"rates": [0]}}, "did you mean rates_flops"),
        ({"throughput": {"rates_flops": [0]}}, "must have FLOP/s for 0 units, 1 unit and so on"),
        ({"throughput": {"rates_flops": [1, 2]}}, "rates_flops of 0 units is 1: it must be 0"),
        ({"throughput": {"rates_flops": [0, -2]}}, "rates_flops of 1 units is -2"),
        ({"throughput": {"rates_flops": 3}}, "it must be a list of FLOP/s"),
        ({"throughput": {"gpu_flops": 0}}, "gpu_flops is 0: it must be FLOP/s, more than 0"),
        ({"throughput": {"workload": {"global_batch": 0}}}, "throughput: global_batch is 0"),
        ({"throughput": {"workload": WORKLOAD}}, "it must be nproc_per_node times unit_nodes, 1"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_job({**LEAST, **changes})


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match="job llama has no command: it must be given"):
        parse_job({"name": "llama", "directory": "/"})
    with pytest.raises(ValueError, match="a job is 3: it must be an object"):
        parse_job(3)


def test_two_jobs_have_two_names() -> None:
    assert [job.name for job in parse_jobs([LEAST, {**LEAST, "name": "b"}])] == ["llama", "b"]
    with pytest.raises(ValueError, match="two jobs are called llama"):
        parse_jobs([LEAST, LEAST])
    with pytest.raises(ValueError, match="they must be a list of jobs"):
        parse_jobs(LEAST)


@settings(max_examples=60, deadline=None)
@given(
    env=st.dictionaries(
        st.text(st.characters(exclude_characters="\0")), st.text(st.characters(exclude_characters="\0"))
    ),
    least=st.integers(1, 5),
    more=st.one_of(st.none(), st.integers(0, 9)),
    weight=st.floats(0, 1e9),
    throughput=st.one_of(
        st.builds(MeasuredSteps, st.floats(1.0, 1e18)),
        st.lists(st.floats(0, 1e18), min_size=1, max_size=5).map(lambda rates: GivenRates((0.0, *rates))),
    ),
)
def test_json_keeps_everything(
    env: dict[str, str], least: int, more: int | None, weight: float, throughput: MeasuredSteps | GivenRates
) -> None:
    found = JobSpec(
        name="a",
        command=("x", ""),
        directory="/",
        env=env,
        min_nodes=least,
        max_nodes=None if more is None else least + more,
        weight=weight,
        throughput=throughput,
    )
    assert parse_job(json.loads(json.dumps(found.to_json()))) == found
