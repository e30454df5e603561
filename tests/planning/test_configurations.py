"""In which ways a number of GPUs can share a step."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_elastic.planning.model.configurations import Configuration, Workload
from unicron_elastic.planning.model.memory import memory_bytes
from unicron_elastic.planning.model.search import configurations, why_none
from unicron_elastic.planning.model.shape import Transformer

GIB = 2**30
GPT_7B = Transformer(layers=32, hidden=4096, heads=32, sequence=2048, vocabulary=51200)


def layouts(workload: Workload, units: int) -> set[tuple[int, int, int]]:
    return {(each.replicas, each.tensor, each.pipeline) for each in configurations(workload, units)}


def test_a_plain_job_runs_where_replicas_divide_the_batch() -> None:
    workload = Workload(global_batch=12, micro_batch_sizes=(2,))
    assert [units for units in range(14) if configurations(workload, units)] == [1, 2, 3, 6]
    assert why_none(workload, 4) == "4 GPUs cannot share a batch of 12 evenly"


def test_uneven_shares_need_a_micro_batch_for_each() -> None:
    workload = Workload(global_batch=12, micro_batch_sizes=(2,), uneven=True)
    assert [units for units in range(14) if configurations(workload, units)] == [1, 2, 3, 4, 5, 6]


def test_minimum_and_maximum() -> None:
    workload = Workload(global_batch=64, minimum=2, maximum=8)
    assert [units for units in range(65) if configurations(workload, units)] == [2, 4, 8]
    assert why_none(workload, 1) == "less than the minimum of 2"
    assert why_none(workload, 16) == "more than the maximum of 8"
    assert why_none(workload, 4) == ""


def test_tensor_parallelism_stays_in_the_node_and_divides_the_heads() -> None:
    shape = Transformer(layers=6, hidden=768, heads=12, sequence=1024, vocabulary=50257)
    workload = Workload(global_batch=64, transformer=shape, max_tensor=16, max_pipeline=4)
    assert layouts(workload, 8) == {(8, 1, 1), (4, 2, 1), (2, 4, 1), (4, 1, 2), (2, 2, 2), (1, 4, 2)}


def test_nodes_as_units() -> None:
    workload = Workload(global_batch=64, gpus_per_unit=8, transformer=GPT_7B, max_tensor=8)
    assert layouts(workload, 2) == {(16, 1, 1), (8, 2, 1), (4, 4, 1), (2, 8, 1)}
    assert configurations(workload, 0) == ()


def test_a_large_model_needs_several_gpus() -> None:
    workload = Workload(global_batch=512, transformer=GPT_7B, gpu_memory_bytes=80 * GIB, max_tensor=8, recompute=None)
    assert configurations(workload, 1) == ()
    assert why_none(workload, 1) == "a GPU would need 113.0 GiB and has 80.0 GiB"
    assert layouts(workload, 2) == {(1, 2, 1)}
    assert {each.recompute for each in configurations(workload, 2)} == {False, True}
    assert (8, 1, 1) not in layouts(workload, 8)


def test_sharding_makes_it_fit() -> None:
    kept = {"global_batch": 512, "transformer": GPT_7B, "gpu_memory_bytes": 48 * GIB, "recompute": True}
    first = {
        sharding: min(units for units in range(1, 65) if layouts(Workload(sharding=sharding, **kept), units))  # type: ignore[arg-type]
        for sharding in ("optimizer", "full")
    }
    assert first == {"optimizer": 8, "full": 4}
    assert not any(layouts(Workload(**kept), units) for units in range(65))  # type: ignore[arg-type]


def test_what_has_run_fits() -> None:
    workload = Workload(global_batch=8, transformer=GPT_7B, gpu_memory_bytes=80 * GIB)
    alone = Configuration(replicas=1)
    assert configurations(workload, 1, memory_bytes(workload, alone)) == (alone,)


@pytest.mark.parametrize(
    ("tensor", "pipeline", "replicas", "zero_gib", "plain_gib"),
    # Megatron-LM's theoretical_memory_usage.py for 6.65e9 parameters, with ZeRO-1 and without.
    [(2, 1, 8, 23.2, 55.8), (4, 1, 4, 13.9, 27.9)],
)
def test_state_agrees_with_megatron(
    tensor: int, pipeline: int, replicas: int, zero_gib: float, plain_gib: float
) -> None:
    configuration = Configuration(replicas=replicas, tensor=tensor, pipeline=pipeline)
    for sharding, expected in (("optimizer", zero_gib), ("none", plain_gib)):
        workload = Workload(global_batch=256, parameters=6_650_000_000, sharding=sharding)  # type: ignore[arg-type]
        # Without a transformer the state is not divided by TP.
        assert memory_bytes(workload, configuration) / tensor / GIB == pytest.approx(expected, rel=0.01)


@given(
    batch=st.integers(1, 96),
    sizes=st.lists(st.integers(1, 8), min_size=1, max_size=3),
    units=st.integers(0, 40),
    per_unit=st.sampled_from([1, 2, 8]),
    uneven=st.booleans(),
)
def test_what_is_found_is_possible(batch: int, sizes: list[int], units: int, per_unit: int, uneven: bool) -> None:
    shape = Transformer(layers=6, hidden=64, heads=4, sequence=32, vocabulary=100)
    workload = Workload(
        global_batch=batch,
        micro_batch_sizes=(*sizes, 1),
        gpus_per_unit=per_unit,
        uneven=uneven,
        transformer=shape,
        max_tensor=8,
        max_pipeline=6,
    )
    found = configurations(workload, units)
    assert len(set(found)) == len(found)
    assert bool(found) == (why_none(workload, units) == "")
    for each in found:
        assert each.gpus == units * per_unit
        assert 4 % each.tensor == 0
        assert 6 % each.pipeline == 0
        count = batch // each.micro_batch
        assert count * each.micro_batch == batch
        assert count >= each.replicas
        assert uneven or count % each.replicas == 0


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"global_batch": 0}, "global_batch is 0: it must be a whole number, at least 1"),
        ({"global_batch": 8.0}, "global_batch is 8.0"),
        ({"minimum": -1}, "minimum is -1"),
        ({"maximum": 1, "minimum": 2}, "maximum is 1, less than minimum, 2"),
        ({"micro_batch_sizes": ()}, "micro_batch_sizes is (): it must be a tuple with at least one size"),
        ({"micro_batch_sizes": (3,)}, "no size in micro_batch_sizes, 3, divides global_batch, 8"),
        ({"micro_batch_sizes": (0,)}, "a size in micro_batch_sizes is 0"),
        ({"sharding": "zero1"}, "sharding is 'zero1': it must be one of none, optimizer, full"),
        ({"max_tensor": 2}, "max_tensor is 2, but transformer is not given"),
        ({"flops_per_sample": float("nan")}, "flops_per_sample is nan: it must be a positive number"),
        ({"gpu_memory_bytes": 0}, "gpu_memory_bytes is 0"),
    ],
)
def test_what_is_wrong_is_named(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as raised:
        Workload(**{"global_batch": 8, **wrong})
    assert said in str(raised.value)


def test_heads_must_divide_the_hidden_size() -> None:
    with pytest.raises(ValueError, match="heads is 12, which does not divide hidden, 1000"):
        Transformer(layers=2, hidden=1000, heads=12, sequence=8, vocabulary=10)
