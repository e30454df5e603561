"""A decoder as Megatron builds it: what it holds and computes, and in which ways the planner divides it."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unicron_elastic.planning.model.calibration import Overheads, slowdown
from unicron_elastic.planning.model.configurations import Configuration, Workload, parse_workload
from unicron_elastic.planning.model.decoder import Decoder
from unicron_elastic.planning.model.memory import host_bytes, memory_bytes
from unicron_elastic.planning.model.search import configurations
from unicron_elastic.planning.model.shape import Transformer
from unicron_elastic.planning.model.throughput import ThroughputModel, estimates

GIB = 2**30
LLAMA: dict[str, Any] = {
    "gated": True,
    "linear_bias": False,
    "normalization": "RMSNorm",
    "tied": False,
    "learned_positions": 0,
    "dropout": False,
}
LLAMA_3_8B: dict[str, Any] = {
    **LLAMA,
    "layers": 32,
    "hidden": 4096,
    "heads": 32,
    "query_groups": 8,
    "ffn_hidden": 14336,
    "sequence": 8192,
    "vocabulary": 128256,
}
GPT_3: dict[str, int] = {"layers": 96, "hidden": 12288, "heads": 96, "sequence": 2048, "vocabulary": 51200}
SMALL: dict[str, Any] = {"layers": 8, "hidden": 64, "heads": 8, "sequence": 32, "vocabulary": 128}


# -- what it holds and computes ------------------------------------------------------------------------------------


def llama(layers: int, hidden: int, heads: int, ffn_hidden: int, vocabulary: int, **more: Any) -> Decoder:
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "ffn_hidden": ffn_hidden, "vocabulary": vocabulary}
    return Decoder(**{**LLAMA, **sizes, "sequence": 4096, **more})


def test_parameters_of_published_models() -> None:
    """As the checkpoints on the Hugging Face hub have them."""
    found = {
        "gpt2": Decoder(layers=12, hidden=768, heads=12, sequence=1024, vocabulary=50257),
        "Llama-2-7b": llama(32, 4096, 32, 11008, 32000),
        "Llama-2-70b": llama(80, 8192, 64, 28672, 32000, query_groups=8),
        "Llama-3-8B": Decoder(**LLAMA_3_8B),
        "Qwen2.5-7B": llama(28, 3584, 28, 18944, 152064, query_groups=4, qkv_bias=True),
        "Qwen3-0.6B": llama(28, 1024, 16, 3072, 151936, query_groups=8, kv_channels=128, qk_norm=True, tied=True),
    }
    assert {name: shape.parameters for name, shape in found.items()} == {
        "gpt2": 124_439_808,
        "Llama-2-7b": 6_738_415_616,
        "Llama-2-70b": 68_976_648_192,
        "Llama-3-8B": 8_030_261_248,
        "Qwen2.5-7B": 7_615_616_512,
        "Qwen3-0.6B": 596_049_920,
    }


def test_gpt_3_is_the_plain_formula_and_the_norm_that_it_leaves_out() -> None:
    plain, exact = Transformer(**GPT_3), Decoder(**GPT_3)
    assert exact.parameters == plain.parameters + 2 * 12288
    assert exact.flops_per_sample == pytest.approx(plain.flops_per_sample, rel=1e-12)


def test_flops_by_hand() -> None:
    shape = Decoder(**{**LLAMA_3_8B, "sequence": 4096, "vocabulary": 128001}, vocabulary_multiple=128)
    per_layer = 2 * 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336) + 2 * 2 * 4096 * 4096
    assert shape.padded_vocabulary(1) == 128128
    assert shape.flops_per_sample == 3 * 4096 * (32 * per_layer + 2 * 4096 * 128128)


def test_the_vocabulary_is_padded_for_each_tp() -> None:
    shape = Decoder(**{**SMALL, "vocabulary": 50257}, vocabulary_multiple=128)
    assert [shape.padded_vocabulary(tensor) for tensor in (1, 2, 4, 8)] == [50304, 50432, 50688, 51200]
    assert replace(shape, vocabulary_multiple=1).padded_vocabulary(8) == 50257


@given(tied=st.booleans(), pipeline=st.sampled_from([1, 2, 4, 8]), tensor=st.sampled_from([1, 2, 4]))
def test_stages_together_hold_the_model(tied: bool, pipeline: int, tensor: int) -> None:
    shape = Decoder(**SMALL, tied=tied)
    held = sum(shape.stage_parameters(tensor, pipeline, stage) for stage in range(pipeline)) * tensor
    copied = 128 * 64 if tied and pipeline > 1 else 0
    # Norms, the biases after row-parallel products, and positions are on each rank of a tensor group.
    replicated = 8 * (4 * 64 + 2 * 64) + 2 * 64 + 32 * 64
    assert held == shape.parameters + copied + (tensor - 1) * replicated


# -- memory --------------------------------------------------------------------------------------------------------


def test_memory_by_hand() -> None:
    """Llama 3 8B with TP 8 and DP 2: weights and optimizer, activations of all layers, logits."""
    workload = Workload(
        global_batch=64, transformer=Decoder(**LLAMA_3_8B), sharding="optimizer", max_tensor=8, sequence_parallel=True
    )
    parameters = (8_030_261_248 - 65 * 4096) / 8 + 65 * 4096  # norms are on every rank
    # Norms and what follows them; queries, keys and values, and what attention gives; the gated part.
    layer = 8192 * (8 * 4096 + 2 * (4096 + 2 * 1024) + 2 * 4096 + 6 * 14336) / 8
    logits = 6 * 8192 * 128256 / 8
    found = memory_bytes(workload, Configuration(replicas=2, tensor=8))
    assert found == pytest.approx((6 + 12 / 2) * parameters + 32 * layer + logits, rel=1e-12)


def test_the_plain_formula_divides_what_sequence_parallelism_divides() -> None:
    plain = Transformer(**GPT_3)
    assert plain.kept_bytes(10, 8, is_sequence_divided=False) == 10 * 12288 * (10 + 24 / 8)
    assert plain.kept_bytes(10, 8, is_sequence_divided=True) == 10 * 12288 * 34 / 8
    assert Decoder(**GPT_3).kept_bytes(10, 8, is_sequence_divided=True) == 10 * 12288 * 34 / 8


def test_the_stage_that_needs_most_counts() -> None:
    """With few words the first, which has most micro-batches in flight; with many the last, which has the logits."""
    split = Configuration(replicas=1, tensor=1, pipeline=4)
    layer = 32 * 64 * 34
    for vocabulary, expected in (
        (8, 8 * layer),
        (51200, 8 / 4 * layer + 6 * 32 * 51200 - 18 * (32 - 2) * 64),
    ):
        shape = Decoder(**{**SMALL, "vocabulary": vocabulary})
        found = memory_bytes(Workload(global_batch=16, transformer=shape, max_pipeline=4), split)
        assert found == 18 * shape.stage_parameters(1, 4, 0) + expected


@pytest.mark.parametrize(("batch", "micro_batches"), [(1, 1 / 4), (4, 1.0), (64, 1.0)])
def test_micro_batches_in_flight(batch: int, micro_batches: float) -> None:
    shape = Decoder(**SMALL)
    workload = Workload(global_batch=batch, transformer=shape, max_pipeline=4)
    found = memory_bytes(workload, Configuration(replicas=1, pipeline=4)) - 18 * shape.stage_parameters(1, 4, 0)
    assert found == 8 * micro_batches * 32 * 64 * 34


def test_virtual_stages_keep_more_and_wait_less() -> None:
    shape = Decoder(**SMALL)
    workload = Workload(global_batch=64, transformer=shape, max_pipeline=4)
    virtual, split = replace(workload, virtual_stages=2), Configuration(replicas=1, pipeline=4)
    # arXiv 2205.05198, section 4.2.3: 1 + (p - 1) / (p v)
    more = memory_bytes(virtual, split) - memory_bytes(workload, split)
    assert more == 8 * 32 * 64 * 34 * 3 / 8
    none = Overheads(step_tokens=0, micro_batch_tokens=0, per_doubling=0)
    assert slowdown(workload, split, none, 1.0) == 67 / 64
    assert slowdown(virtual, split, none, 1.0) == 65.5 / 64
    assert memory_bytes(virtual, Configuration(replicas=4)) == memory_bytes(workload, Configuration(replicas=4))


def test_recomputing_keeps_the_inputs_of_layers() -> None:
    shape = Decoder(**SMALL)
    for divided in (False, True):
        workload = Workload(global_batch=8, transformer=shape, max_tensor=4, sequence_parallel=divided)
        again = Configuration(replicas=1, tensor=4, recompute=True)
        one = shape.kept_bytes(32, 4, is_sequence_divided=divided)
        rest = 18 * shape.stage_parameters(4, 1, 0) + 6 * 32 * 128 / 4
        assert memory_bytes(workload, again) == rest + one + 8 * 2 * 32 * 64 / (4 if divided else 1)


def test_one_group_is_on_every_rank() -> None:
    one = Decoder(**SMALL, query_groups=1, dropout=False)
    tokens = 32
    assert one.kept_bytes(tokens, 8, is_sequence_divided=False) == tokens * ((4 + 4 * 4) * 8 + 4 * 8 + 8 * 64)


def test_copies_of_shards_are_in_the_memory_of_hosts() -> None:
    shape = Decoder(**SMALL)
    workload = Workload(global_batch=8, transformer=shape, sharding="optimizer")
    two, split = replace(workload, shard_copies=2), Configuration(replicas=4)
    assert host_bytes(workload, split) == 0.0
    assert host_bytes(two, split) == 2 * 12 / 4 * shape.parameters
    assert memory_bytes(two, split) == memory_bytes(workload, split)
    plain = Workload(global_batch=8, parameters=1000, sharding="full", shard_copies=1)
    assert host_bytes(plain, split) == 12 / 4 * 1000


def test_parameters_that_are_given_are_divided_alike() -> None:
    shape = Decoder(**SMALL)
    workload = Workload(global_batch=8, transformer=shape, max_tensor=2)
    twice = replace(workload, parameters=2 * shape.parameters)
    split = Configuration(replicas=1, tensor=2)
    assert memory_bytes(twice, split) - memory_bytes(workload, split) == 18 * shape.stage_parameters(2, 1, 0)


# -- where it can run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "allowed"),
    [
        ({}, [1, 2, 4, 8]),
        ({"heads": 6, "hidden": 96, "vocabulary": 96}, [1, 2, 3, 6]),
        ({"heads": 6, "hidden": 96, "vocabulary": 96, "query_groups": 1}, [1, 2]),
        ({"ffn_hidden": 36}, [1, 2, 4]),
        ({"vocabulary": 130}, [1, 2]),
        ({"vocabulary": 130, "vocabulary_multiple": 2}, [1, 2, 4, 8]),
        ({"query_groups": 1}, [1, 2, 4, 8]),  # of one group every rank takes a copy ...
        ({"query_groups": 1, "kv_channels": 3}, [1, 2]),  # ... of a product that it still has to divide
        ({"heads": 24, "query_groups": 3, "kv_channels": 8, "ffn_hidden": 96, "vocabulary": 96}, [1, 3, 6]),
    ],
)
def test_tensor_sizes(changed: dict[str, int], allowed: list[int]) -> None:
    shape = Decoder(**{**SMALL, **changed})
    assert [size for size in range(1, 9) if shape.allows_tensor(size)] == allowed


def test_sequence_parallelism_divides_the_sample() -> None:
    for shape in (Decoder(**{**SMALL, "sequence": 36}), Transformer(**{**SMALL, "sequence": 36})):
        assert [size for size in (1, 2, 4, 8) if shape.allows_tensor(size)] == [1, 2, 4, 8]
        assert [size for size in (1, 2, 4, 8) if shape.allows_tensor(size, is_sequence_divided=True)] == [1, 2, 4]


@st.composite
def decoders(draw: st.DrawFn) -> Decoder:
    groups = draw(st.sampled_from([1, 2, 3, 4, 8]))
    heads = groups * draw(st.integers(1, 4))
    return Decoder(
        layers=draw(st.integers(1, 16)),
        hidden=draw(st.sampled_from([1, 3, 4])) * heads,
        heads=heads,
        sequence=draw(st.sampled_from([30, 32])),
        vocabulary=draw(st.integers(100, 140)),
        query_groups=groups,
        ffn_hidden=draw(st.one_of(st.none(), st.integers(8, 64))),
        kv_channels=draw(st.one_of(st.none(), st.integers(1, 4))),
        gated=draw(st.booleans()),
        tied=draw(st.booleans()),
        vocabulary_multiple=draw(st.sampled_from([1, 4])),
    )


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    return Workload(
        global_batch=draw(st.integers(1, 96)),
        micro_batch_sizes=(*draw(st.lists(st.integers(1, 8), min_size=1, max_size=3)), 1),
        gpus_per_unit=draw(st.sampled_from([1, 8])),
        transformer=draw(decoders()),
        sharding=draw(st.sampled_from(["none", "optimizer"])),
        max_tensor=8,
        max_pipeline=16,
        virtual_stages=draw(st.integers(1, 3)),
        sequence_parallel=draw(st.booleans()),
    )


@settings(deadline=None)
@given(workload=workloads(), units=st.integers(0, 12))
def test_every_configuration_is_one_that_megatron_runs(workload: Workload, units: int) -> None:
    shape = workload.transformer
    assert isinstance(shape, Decoder)
    channels = shape.kv_channels or shape.hidden // shape.heads
    groups = shape.query_groups or shape.heads
    for found in configurations(workload, units):
        tensor, pipeline = found.tensor, found.pipeline
        assert found.replicas * tensor * pipeline == units * workload.gpus_per_unit
        assert shape.heads % tensor == 0
        assert groups % tensor == 0 or tensor % groups == 0
        assert (shape.ffn_hidden or 4 * shape.hidden) % tensor == 0
        assert channels * (shape.heads + 2 * groups) % tensor == 0
        assert shape.vocabulary % tensor == 0 or shape.vocabulary_multiple > 1
        assert shape.padded_vocabulary(tensor) % tensor == 0
        assert shape.sequence % tensor == 0 or not workload.sequence_parallel
        assert shape.layers % pipeline == 0
        assert workload.global_batch % (found.micro_batch * found.replicas) == 0
        if workload.virtual_stages > 1 and pipeline > 1:
            assert shape.layers % (pipeline * workload.virtual_stages) == 0
            assert workload.global_batch // (found.micro_batch * found.replicas) % pipeline == 0
        held = shape.stage_parameters(tensor, pipeline, 0)
        assert held == int(held)
        assert memory_bytes(workload, found) > 6 * held


def test_uneven_shares_have_no_virtual_stages() -> None:
    workload = Workload(
        global_batch=10, transformer=Decoder(**SMALL), uneven=True, max_pipeline=2, virtual_stages=2, max_tensor=1
    )
    found = {(each.replicas, each.pipeline) for each in configurations(workload, 6)}
    assert found == {(6, 1)}
    assert (3, 2) in {(each.replicas, each.pipeline) for each in configurations(replace(workload, virtual_stages=1), 6)}


def test_a_llama_on_nodes() -> None:
    workload = parse_workload(
        {
            "global_batch": 256,
            "gpus_per_unit": 8,
            "gpu_memory_bytes": 80 * GIB,
            "transformer": {**LLAMA_3_8B, "vocabulary_multiple": 128},
            "sharding": "optimizer",
            "sequence_parallel": True,
            "recompute": None,
            "max_tensor": 8,
            "max_pipeline": 4,
        }
    )
    found = estimates(ThroughputModel(workload=workload), 8)
    assert [each.units for each in found if each.flops_per_s] == [1, 2, 4, 8]
    assert found[8].configuration is not None
    assert memory_bytes(workload, found[8].configuration) <= 80 * GIB


# -- as it stands in a file ----------------------------------------------------------------------------------------


def test_any_key_more_makes_it_exact() -> None:
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "sequence": 32, "vocabulary": 100}
    plain = parse_workload({"global_batch": 8, "transformer": sizes}).transformer
    assert type(plain) is Transformer
    exact = parse_workload({"global_batch": 8, "transformer": {**sizes, "gated": True, "query_groups": 2}}).transformer
    assert exact == Decoder(**sizes, gated=True, query_groups=2)  # type: ignore[arg-type]


def test_what_is_written_is_read_again() -> None:
    workload = Workload(
        global_batch=8,
        transformer=Decoder(**LLAMA_3_8B),
        sharding="optimizer",
        shard_copies=1,
        sequence_parallel=True,
        virtual_stages=2,
    )
    assert parse_workload(asdict(workload)) == workload


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"gatd": True}, "did you mean gated?"),
        ({"gated": 1}, "gated is 1: it must be true or false"),
        ({"ffn_hidden": 0}, "ffn_hidden is 0: it must be a whole number, at least 1"),
        ({"query_groups": 3}, "query_groups is 3, which does not divide heads, 8"),
        ({"hidden": 60, "tied": True}, "heads is 8, which does not divide hidden, 60: it must, or give kv_channels"),
        ({"normalization": "rms"}, "normalization is 'rms': it must be one of LayerNorm, RMSNorm"),
        ({"learned_positions": 31}, "learned_positions is 31, less than sequence, 32"),
        ({"learned_positions": -1}, "learned_positions is -1: it must be a whole number, at least 0"),
        ({"vocabulary_multiple": 0}, "vocabulary_multiple is 0"),
        ({"layers": 1.5, "tied": True}, "layers is 1.5"),
    ],
)
def test_wrong_sizes_are_named(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as raised:
        parse_workload({"global_batch": 8, "transformer": {**SMALL, **wrong}})
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"sequence_parallel": 1}, "sequence_parallel is 1: it must be true or false"),
        ({"virtual_stages": 0}, "virtual_stages is 0"),
        ({"virtual_stages": 2}, "virtual_stages is 2, but transformer is not given"),
        ({"shard_copies": -1}, "shard_copies is -1"),
        ({"shard_copies": 1}, "shard_copies is 1, but sharding is none"),
    ],
)
def test_wrong_layouts_are_named(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as raised:
        parse_workload({"global_batch": 8, **wrong})
    assert said in str(raised.value)
