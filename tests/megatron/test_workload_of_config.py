"""What the planner is told of a Megatron model, beside models of Megatron-Core itself (gpt_models.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import gpt_models
import pytest
from gpt_models import (
    BATCH,
    COUNTED,
    DIVIDED,
    HELD,
    KEPT,
    KINDS,
    LAYOUTS,
    OTHERS,
    SEQUENCE,
    TENSORS,
    TRIED,
    VOCABULARY,
    Case,
    config_of,
)

from unicron_elastic.megatron.workload import flops_per_step, workload_of
from unicron_elastic.planning.model.configurations import Workload, parse_workload
from unicron_elastic.planning.model.decoder import Decoder

pytest.importorskip("megatron.core")


def described(case: Case, **more: Any) -> Workload:
    options = {"vocab_size": VOCABULARY, **case[1]}
    vocabulary = options.pop("vocab_size")
    config = config_of(case)
    return parse_workload(
        workload_of(config, vocabulary=vocabulary, sequence=SEQUENCE, global_batch=BATCH, **options, **more)
    )


def shape_of(case: Case) -> Decoder:
    shape = described(case).transformer
    assert isinstance(shape, Decoder)
    return shape


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    """What gpt_models.py prints, in a process of its own: it puts Megatron-Core on the CPU for as long as that runs."""
    command, unseen = [sys.executable, gpt_models.__file__], {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, env=unseen)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_parameters_are_those_of_the_model(measured: dict[str, Any]) -> None:
    cases = {**KINDS, **OTHERS}
    assert {name: shape_of(case).parameters for name, case in cases.items()} == measured["parameters"]
    assert len(cases) == 104


@pytest.mark.parametrize("name", DIVIDED)
def test_parameters_of_every_stage_are_those_of_the_model(measured: dict[str, Any], name: str) -> None:
    shape = shape_of(DIVIDED[name])
    found = {
        str(layout): [shape.stage_parameters(layout[0], layout[1], stage) for stage in range(layout[1])]
        for layout in LAYOUTS
    }
    assert found == measured["stages"][name]


@pytest.mark.parametrize("name", TRIED)
def test_tensor_sizes_are_those_that_megatron_takes(measured: dict[str, Any], name: str) -> None:
    shape = shape_of(TRIED[name])
    assert [size for size in TENSORS if shape.allows_tensor(size)] == measured["taken"][name]


def test_stages_are_those_that_megatron_takes(measured: dict[str, Any]) -> None:
    shape = Decoder(layers=12, hidden=64, heads=4, sequence=SEQUENCE, vocabulary=VOCABULARY)
    found = [[pp, vp] for pp in range(2, 13) for vp in (1, 2, 3) if shape.allows_pipeline(pp, vp)]
    assert found == measured["stages taken"]


@pytest.mark.parametrize("name", COUNTED)
def test_flops_are_those_of_forward_and_backward(measured: dict[str, Any], name: str) -> None:
    """Of all matrix products, by torch's counter; attention in full, as the local attention computes it."""
    assert shape_of(COUNTED[name]).flops_per_sample == measured["flops"][name] / BATCH


@pytest.mark.parametrize("name", DIVIDED)
@pytest.mark.parametrize("held", HELD, ids=str)
def test_state_is_what_megatron_allocates(measured: dict[str, Any], name: str, held: tuple[str, int, int, int]) -> None:
    """Weights in bf16, gradients in fp32, and what the optimizer keeps after a step, on all replicas together."""
    sharding, tensor, pipeline, replicas = held
    shape = shape_of(DIVIDED[name])
    each = 6 + 12 / (replicas if sharding == "optimizer" else 1)
    expected = [each * shape.stage_parameters(tensor, pipeline, stage) * replicas for stage in range(pipeline)]
    assert expected == measured["state"][name][str(held)]


@pytest.mark.parametrize("name", KEPT)
def test_activations_are_what_a_layer_keeps(measured: dict[str, Any], name: str) -> None:
    """Beside what the local attention writes out (scores in fp32 and bf16) and the statistics of two norms."""
    shape, tokens = shape_of(KEPT[name]), BATCH * SEQUENCE
    scores = (4 + 2) * shape.heads * SEQUENCE * tokens
    statistics = 2 * 2 * 2 * tokens
    kept = shape.kept_bytes(tokens, 1, is_sequence_divided=False)
    assert kept + scores + statistics == measured["kept"][name]


def test_flops_of_a_step() -> None:
    config = config_of(DIVIDED["llama"])
    told = flops_per_step(config, vocabulary=VOCABULARY, sequence=SEQUENCE, global_batch=BATCH, micro_batch_sizes=[2])
    assert told == described(DIVIDED["llama"]).step_flops
    padded = flops_per_step(config, vocabulary=90, sequence=SEQUENCE, global_batch=8, make_vocab_size_divisible_by=32)
    assert padded == 2 * told


def test_a_workload_is_json_and_follows_the_config() -> None:
    import torch

    config = config_of(
        ({"num_layers": 8, "hidden_dropout": 0.1}, {}),
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        sequence_parallel=True,
        pipeline_dtype=torch.float32,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
    )
    told = workload_of(
        config, vocabulary=VOCABULARY, sequence=SEQUENCE, global_batch=BATCH, max_pipeline=4, sharding="optimizer"
    )
    workload = parse_workload(json.loads(json.dumps(told)))
    assert workload == Workload(
        global_batch=BATCH,
        transformer=Decoder(
            layers=8,
            hidden=64,
            heads=4,
            sequence=SEQUENCE,
            vocabulary=VOCABULARY,
            ffn_hidden=256,
            query_groups=4,
            kv_channels=16,
            tied=False,
            learned_positions=SEQUENCE,
        ),
        sharding="optimizer",
        recompute=True,
        sequence_parallel=True,
        virtual_stages=2,
        max_tensor=2,
        max_pipeline=4,
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_moe_experts", 8),
        ("mtp_num_layers", 1),
        ("multi_latent_attention", True),
        ("experimental_attention_variant", "gated_delta_net"),
        ("attention_output_gate", True),
        ("softmax_type", "learnable"),
        ("window_size", (128, 0)),
        ("heterogeneous_block_specs", True),
        ("is_hybrid_model", True),
        ("normalization", "L2Norm"),
        ("context_parallel_size", 2),
        ("pipeline_model_parallel_layout", "Et|tL"),
        ("num_layers_in_first_pipeline_stage", 1),
        ("num_layers_in_last_pipeline_stage", 1),
        ("account_for_embedding_in_pipeline_split", True),
        ("account_for_loss_in_pipeline_split", True),
    ],
)
def test_what_cannot_be_described_is_named(field: str, value: object) -> None:
    config = SimpleNamespace(**{**vars(config_of(DIVIDED["gpt"])), field: value})
    with pytest.raises(ValueError, match=rf"^{field} is .*, but a workload can only be made of a dense decoder"):
        workload_of(config, vocabulary=VOCABULARY, sequence=SEQUENCE, global_batch=BATCH)


def test_what_is_no_workload_is_named() -> None:
    config = config_of(DIVIDED["gpt"])
    with pytest.raises(ValueError, match="did you mean sharding"):
        workload_of(config, vocabulary=VOCABULARY, sequence=SEQUENCE, global_batch=BATCH, shardin="optimizer")
    with pytest.raises(ValueError, match="learned_positions is 8, less than sequence, 32"):
        workload_of(config, vocabulary=VOCABULARY, sequence=SEQUENCE, global_batch=BATCH, max_sequence_length=8)
