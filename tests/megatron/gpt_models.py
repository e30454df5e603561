"""Models of Megatron-Core, and what each rank of one holds, computes and keeps. Run as a script it prints all that.

It needs one process for worlds of any size: torch's fake process group lets it be any rank, and collectives then do
nothing. So what it measures with TP, PP and DP is what Megatron-Core allocates on that rank.
"""

from __future__ import annotations

import json
from itertools import product
from typing import Any

VOCABULARY, SEQUENCE, BATCH = 96, 32, 4
SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
LLAMA: dict[str, Any] = {
    "num_query_groups": 2,
    "ffn_hidden_size": 128,
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
}
ROTARY: dict[str, Any] = {"position_embedding_type": "rope"}
TIED: dict[str, Any] = {"share_embeddings_and_output_weights": True}
Case = tuple[dict[str, Any], dict[str, Any]]  # of TransformerConfig, of GPTModel

# Of the fields that make a difference every combination.
KINDS: dict[str, Case] = {
    f"groups {groups}, gated {gated}, bias {bias}, {norm}, tied {tied}, {positions}": (
        {"num_query_groups": groups, "gated_linear_unit": gated, "add_bias_linear": bias, "normalization": norm},
        {"share_embeddings_and_output_weights": tied, "position_embedding_type": positions},
    )
    for groups, gated, bias, norm, tied, positions in product(
        (None, 2, 1),
        (False, True),
        (False, True),
        ("LayerNorm", "RMSNorm"),
        (False, True),
        ("learned_absolute", "rope"),
    )
}
# The others one by one, and some together.
OTHERS: dict[str, Case] = {
    "wide heads": ({"kv_channels": 32}, {}),
    "hidden that heads do not divide": ({"num_attention_heads": 6, "kv_channels": 8}, ROTARY),
    "odd feed-forward": ({"ffn_hidden_size": 90, "gated_linear_unit": True}, {}),
    "bias of queries": ({**LLAMA, "add_qkv_bias": True}, ROTARY),
    "norm of queries": ({**LLAMA, "qk_layernorm": True, "kv_channels": 32}, {**ROTARY, **TIED}),
    "layer norm of queries": ({"qk_layernorm": True}, TIED),
    "no positions": ({}, {"position_embedding_type": "none"}),
    "more positions": ({}, {"max_sequence_length": 80}),
}
# TP, PP, virtual stages
LAYOUTS = ((1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (1, 4, 1), (2, 4, 1), (4, 2, 1), (1, 2, 2), (2, 2, 2))
DIVIDED: dict[str, Case] = {
    "gpt": ({"num_layers": 4}, TIED),
    "gpt, untied": ({"num_layers": 4}, {}),
    "llama": ({"num_layers": 4, **LLAMA}, ROTARY),
    "one group": ({"num_layers": 4, **LLAMA, "num_query_groups": 1, "qk_layernorm": True}, {**ROTARY, **TIED}),
}
TRIED: dict[str, Case] = {
    "heads": ({"num_attention_heads": 6, "hidden_size": 96}, {}),
    "heads of one group": ({"num_attention_heads": 6, "hidden_size": 96, "num_query_groups": 1}, {}),
    "groups": ({**LLAMA, "num_attention_heads": 8}, ROTARY),
    "three groups": ({"num_attention_heads": 24, "num_query_groups": 3, "hidden_size": 96}, ROTARY),
    "a group that is not divided": ({"num_attention_heads": 8, "num_query_groups": 1, "kv_channels": 3}, {}),
    "feed-forward": ({"num_attention_heads": 8, "ffn_hidden_size": 36}, {}),
    "vocabulary": ({"num_attention_heads": 8}, {"vocab_size": 100}),
}
TENSORS = tuple(range(1, 9))
COUNTED: dict[str, Case] = {**DIVIDED, **OTHERS}
KEPT: dict[str, Case] = {
    "gpt": ({}, TIED),
    "wide heads": ({"kv_channels": 32}, {}),
    "narrow": ({"ffn_hidden_size": 90}, {}),
}
# sharding, TP, PP, DP
HELD = (("none", 1, 1, 1), ("none", 2, 2, 2), ("optimizer", 1, 1, 2), ("optimizer", 2, 1, 4), ("optimizer", 2, 2, 2))


def config_of(case: Case, **more: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    options = {**SIZES, "use_cpu_initialization": True, "hidden_dropout": 0.0, "attention_dropout": 0.0, **case[0]}
    return TransformerConfig(**options, **more)


class Rank:
    """One rank of a world that is not there."""

    def __init__(self, tensor: int = 1, pipeline: int = 1, virtual: int = 1, replicas: int = 1, **at: int) -> None:
        """``at``: its ``stage`` and ``replica``; of a tensor group it is the first."""
        self.sizes = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}
        if virtual > 1:
            self.sizes["virtual_pipeline_model_parallel_size"] = virtual
        self.stage, self.pipeline, self.virtual = at.get("stage", 0), pipeline, virtual
        self.world = tensor * pipeline * replicas
        self.rank = tensor * (at.get("replica", 0) + replicas * self.stage)

    def __enter__(self) -> Rank:
        import torch.distributed as dist
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=self.rank, world_size=self.world)
        parallel_state.initialize_model_parallel(**self.sizes, create_gloo_process_groups=False)
        model_parallel_cuda_manual_seed(1)
        return self

    def __exit__(self, *_: object) -> None:
        import torch.distributed as dist
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()

    def chunks(self, case: Case, **more: Any) -> tuple[Any, list[Any]]:
        """The config, and the parts of the model that this rank has."""
        import torch
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

        from unicron_elastic.megatron.cpu_stand_in import CPU_CONFIG

        config = config_of(case, **self.sizes, **CPU_CONFIG, pipeline_dtype=torch.float32, **more)
        options = {"vocab_size": VOCABULARY, "max_sequence_length": SEQUENCE, **case[1]}
        spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
        made = [
            GPTModel(
                config,
                spec,
                pre_process=self.stage == 0 and part == 0,
                post_process=self.stage == self.pipeline - 1 and part == self.virtual - 1,
                vp_stage=part if self.virtual > 1 else None,
                **options,
            )
            for part in range(self.virtual)
        ]
        return config, made


def parameters_of(case: Case, layout: tuple[int, int, int] = (1, 1, 1), stage: int = 0) -> int:
    with Rank(*layout, stage=stage) as rank:
        _, chunks = rank.chunks(case)
    return sum(each.numel() for chunk in chunks for each in chunk.parameters())


def loss_of(model: Any) -> Any:
    """Of a batch."""
    import torch

    tokens = torch.zeros(BATCH, SEQUENCE, dtype=torch.long)
    positions = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    return model(tokens, positions, mask, labels=tokens).sum()


def is_taken(case: Case, **layout: int) -> bool:
    """Whether Megatron-Core makes every stage of the model and, if there is one stage, computes with it."""
    try:
        for stage in range(layout.get("pipeline", 1)):
            with Rank(**layout, stage=stage) as rank:
                _, chunks = rank.chunks(case)
                if rank.pipeline == 1:
                    loss_of(*chunks).backward()
    except (AssertionError, RuntimeError, ValueError):
        return False
    return True


def flops_of(case: Case) -> int:
    """Of forward and backward over a batch."""
    from torch.utils.flop_counter import FlopCounterMode

    with Rank() as rank, FlopCounterMode(display=False) as counter:
        _, (model,) = rank.chunks(case)
        loss_of(model).backward()
        return int(counter.get_total_flops())


def kept_of(case: Case) -> int:
    """Bytes that the whole model keeps for backward over a batch, without its weights."""
    import torch

    kept: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with Rank() as rank:
        _, (chunk,) = rank.chunks(case, bf16=True, params_dtype=torch.bfloat16)
        model = chunk.bfloat16()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss_of(model)
    weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
    return sum(each.nbytes() for place, each in kept.items() if place not in weights)


def layer_of(case: Case) -> int:
    """The same for a layer."""
    few, many = (({**case[0], "num_layers": layers}, case[1]) for layers in (1, 2))
    return kept_of(many) - kept_of(few)


def state_of(case: Case, sharding: str, layout: tuple[int, int, int], stage: int) -> int:
    """Bytes of weights, gradients and the optimizer's state after a step, on all replicas together."""
    tensor, pipeline, replicas = layout
    return sum(
        _state_of(case, sharding, Rank(tensor, pipeline, 1, replicas, stage=stage, replica=replica))
        for replica in range(replicas)
    )


def _state_of(case: Case, sharding: str, at: Rank) -> int:
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    is_sharded = sharding == "optimizer"
    with at as rank:
        config, (chunk,) = rank.chunks(case, bf16=True, params_dtype=torch.bfloat16)
        options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=is_sharded)
        model = DistributedDataParallel(config, options, Float16Module(config, chunk))
        settings = OptimizerConfig(
            optimizer="adam", lr=1e-3, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=is_sharded
        )
        optimizer = get_megatron_optimizer(settings, [model], use_gloo_process_groups=False)
        optimizer.step()
        weights = {each.data_ptr(): each.nbytes for each in model.parameters()}
        gradients = {each.main_grad.data_ptr(): each.main_grad.nbytes for each in model.parameters()}
        kept = optimizer.chained_optimizers[0].optimizer
        masters = [each for group in kept.param_groups for each in group["params"]]
        # Adam's count of steps is one number per tensor.
        moments = [each for of in kept.state.values() for name, each in of.items() if name != "step"]
        return sum(weights.values()) + sum(gradients.values()) + sum(each.nbytes for each in (*masters, *moments))


def measure() -> dict[str, Any]:
    import torch

    from unicron_elastic.megatron.cpu_stand_in import stand_in

    torch.set_num_threads(1)
    stand_in()
    deep: Case = ({"num_layers": 12}, {})
    return {
        "parameters": {name: parameters_of(case) for name, case in {**KINDS, **OTHERS}.items()},
        "stages": {
            name: {
                str(layout): [parameters_of(case, layout, stage) for stage in range(layout[1])] for layout in LAYOUTS
            }
            for name, case in DIVIDED.items()
        },
        "taken": {name: [size for size in TENSORS if is_taken(case, tensor=size)] for name, case in TRIED.items()},
        "stages taken": [
            [pp, vp] for pp in range(2, 13) for vp in (1, 2, 3) if is_taken(deep, pipeline=pp, virtual=vp)
        ],
        "kept": {name: layer_of(case) for name, case in KEPT.items()},
        "flops": {name: flops_of(case) for name, case in COUNTED.items()},
        "state": {
            name: {
                str((sharding, *layout)): [state_of(case, sharding, layout, stage) for stage in range(layout[1])]
                for sharding, *rest in HELD
                for layout in [(rest[0], rest[1], rest[2])]
            }
            for name, case in DIVIDED.items()
        },
    }


if __name__ == "__main__":
    print(json.dumps(measure()))
