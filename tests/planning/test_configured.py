"""The configuration of a job by number of nodes, and the environment variables that tell it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unicron_elastic.planning.model.best import NODES_MAX, configurations_of
from unicron_elastic.planning.model.configurations import Configuration, Workload
from unicron_elastic.planning.model.configured import (
    configuration_text,
    configurations_text,
    parse_configuration,
    parse_configurations,
    why_begin_again,
)
from unicron_elastic.planning.model.jobs import JobSpec, Modelled
from unicron_elastic.planning.model.shape import Transformer
from unicron_elastic.planning.model.throughput import ThroughputModel, estimate

LARGE = Workload(
    global_batch=1024,
    micro_batch_sizes=(1, 2, 4),
    gpus_per_unit=16,
    gpu_memory_bytes=80 * 2**30,
    transformer=Transformer(layers=80, hidden=8192, heads=64, sequence=4096, vocabulary=51200),
    max_tensor=8,
    max_pipeline=8,
    sharding="optimizer",
)
JOB = JobSpec(
    name="large",
    command=("train.py",),
    directory="/",
    nproc_per_node=8,
    unit_nodes=2,
    max_nodes=16,
    throughput=Modelled(LARGE),
)
TP2 = Configuration(replicas=4, tensor=2, micro_batch=2, recompute=True)


def test_it_is_the_one_that_the_planner_finds_best() -> None:
    found = configurations_of(JOB)
    assert min(found) > 2
    assert max(found) == 16
    for nodes, configuration in found.items():
        assert nodes % 2 == 0
        assert configuration.gpus == 8 * nodes
        assert configuration == estimate(ThroughputModel(workload=LARGE), nodes // 2).configuration


def test_a_job_without_a_maximum_is_told_of_many_nodes() -> None:
    found = configurations_of(replace(JOB, max_nodes=None))
    assert max(found) <= NODES_MAX
    assert len(configurations_text(found)) < 100_000  # what Linux takes in one variable is 128 KiB


def test_a_job_that_no_workload_describes_is_told_nothing() -> None:
    assert configurations_of(JobSpec(name="a", command=("train.py",), directory="/")) == {}


def test_what_is_written_is_read() -> None:
    known = configurations_of(JOB)
    assert parse_configurations(configurations_text(known)) == known
    assert parse_configuration(configuration_text(TP2)) == TP2
    assert parse_configuration('{"replicas": 3}') == Configuration(replicas=3)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("2", 'UNICRON_CONFIGURATION is \'2\': it must be a JSON object, such as {"replicas": 4, "tensor": 2}'),
        ("{", "UNICRON_CONFIGURATION is '{': it must be a JSON object"),
        ("{}", "UNICRON_CONFIGURATION has no replicas: it must be given"),
        ('{"replicas": 2, "tensors": 2}', "UNICRON_CONFIGURATION has the unknown key 'tensors': did you mean tensor?"),
        ('{"replicas": 0}', "UNICRON_CONFIGURATION: replicas is 0: it must be a whole number, at least 1"),
        ('{"replicas": 2.0}', "UNICRON_CONFIGURATION: replicas is 2.0: it must be a whole number"),
        ('{"replicas": 2, "recompute": 1}', "UNICRON_CONFIGURATION: recompute is 1: it must be true or false"),
    ],
)
def test_what_is_no_configuration_is_refused_with_a_sentence(text: str, error: str) -> None:
    with pytest.raises(ValueError) as raised:
        parse_configuration(text)
    assert str(raised.value).startswith(error)


@pytest.mark.parametrize("text", ["[]", '{"two": {"replicas": 2}}', '{"2": 2}', '{"2": {"replica": 2}}'])
def test_what_are_no_configurations_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^UNICRON_CONFIGURATIONS"):
        parse_configurations(text)


def test_a_job_begins_again_for_another_tp_or_pp_only() -> None:
    known = {2: TP2, 3: replace(TP2, replicas=6, micro_batch=1, recompute=False), 4: replace(TP2, pipeline=2)}
    assert why_begin_again(known, 2, 3) == ""
    assert why_begin_again(known, 2, 7) == ""
    assert why_begin_again(known, 1, 2) == ""
    assert why_begin_again(known, 2, 4) == (
        "On 4 nodes DP 4 x TP 2 x PP 2, micro-batch 2, recomputed activations is best, and it runs with TP 2 x PP 1: "
        "all workers begin again, from a checkpoint."
    )
