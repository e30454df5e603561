"""What a Megatron model computes and holds, as the planner reads it: from its ``TransformerConfig``.

Nothing is imported from megatron: any object with the fields of megatron-core 0.16.1's ``TransformerConfig`` will do.
"""

from __future__ import annotations

import os
from typing import Any

from unicron_elastic.megatron.groups import takes_place
from unicron_elastic.planning.model.configurations import Configuration, parse_workload
from unicron_elastic.planning.model.configured import CONFIGURATION, parse_configuration
from unicron_elastic.planning.model.decoder import NORMALIZATIONS

# With anything else in these fields a model has other parameters, FLOPs or stages than a decoder of equal layers. A
# field that this version of Megatron does not have is as good as unset.
DESCRIBED: dict[str, tuple[object, ...]] = {
    "num_moe_experts": (None,),
    "mtp_num_layers": (None, 0),
    "multi_latent_attention": (False,),
    "experimental_attention_variant": (None,),
    "attention_output_gate": (False,),
    "softmax_type": ("vanilla", "off-by-one"),
    "window_size": (None,),
    "heterogeneous_block_specs": (False,),
    "is_hybrid_model": (False,),
    "normalization": NORMALIZATIONS,
    "context_parallel_size": (1,),
    "pipeline_model_parallel_layout": (None,),
    "num_layers_in_first_pipeline_stage": (None,),
    "num_layers_in_last_pipeline_stage": (None,),
    "account_for_embedding_in_pipeline_split": (False,),
    "account_for_loss_in_pipeline_split": (False,),
}


def workload_of(
    config: Any,
    *,
    vocabulary: int,
    sequence: int,
    global_batch: int,
    share_embeddings_and_output_weights: bool = False,
    position_embedding_type: str = "learned_absolute",
    max_sequence_length: int | None = None,
    make_vocab_size_divisible_by: int = 1,
    **options: object,
) -> dict[str, object]:
    """The ``"workload"`` of a job's spec for a ``GPTModel`` of this ``TransformerConfig``.

    ``vocabulary`` is the model's ``vocab_size``, or with ``make_vocab_size_divisible_by`` that of the tokenizer, padded
    for every TP as Megatron-LM does. ``sequence`` is in tokens, ``global_batch`` in samples of one step. What the model
    is given beside its config has the names and defaults of ``GPTModel``'s arguments. ``options`` are other keys of a
    workload, such as ``micro_batch_sizes`` or ``sharding="optimizer"`` (docs/throughput.md); without ``max_tensor`` and
    ``max_pipeline`` TP and PP are at most what the config has.

    Raises ``ValueError`` for a model that is no decoder of equal layers, and for what is no workload.
    """
    _require_described(config)
    learned = position_embedding_type == "learned_absolute"
    workload: dict[str, object] = {
        "global_batch": global_batch,
        "transformer": {
            "layers": config.num_layers,
            "hidden": config.hidden_size,
            "heads": config.num_attention_heads,
            "sequence": sequence,
            "vocabulary": vocabulary,
            "ffn_hidden": config.ffn_hidden_size,
            "query_groups": config.num_query_groups,
            "kv_channels": config.kv_channels,
            "gated": config.gated_linear_unit,
            "linear_bias": config.add_bias_linear,
            "qkv_bias": config.add_qkv_bias,
            "normalization": config.normalization,
            "qk_norm": config.qk_layernorm,
            "tied": share_embeddings_and_output_weights,
            "learned_positions": (sequence if max_sequence_length is None else max_sequence_length) if learned else 0,
            "dropout": config.hidden_dropout > 0.0,
            "vocabulary_multiple": make_vocab_size_divisible_by,
        },
        "recompute": config.recompute_granularity == "full",
        "sequence_parallel": config.sequence_parallel,
        "virtual_stages": config.virtual_pipeline_model_parallel_size or 1,
        "max_tensor": config.tensor_model_parallel_size,
        "max_pipeline": config.pipeline_model_parallel_size,
        **options,
    }
    parse_workload(workload)
    return workload


def flops_per_step(config: Any, *, vocabulary: int, sequence: int, global_batch: int, **options: Any) -> float:
    """Model FLOPs of one optimizer step of the whole job, for ``unicron_elastic.flops_per_step``.

    Takes what ``workload_of`` takes, and raises ``ValueError`` as that does.
    """
    workload = workload_of(config, vocabulary=vocabulary, sequence=sequence, global_batch=global_batch, **options)
    return parse_workload(workload).step_flops


def _require_described(config: Any) -> None:
    for name, known in DESCRIBED.items():
        value = getattr(config, name, known[0])
        if value not in known:
            raise ValueError(
                f"{name} is {value!r}, but a workload can only be made of a dense decoder whose layers and pipeline "
                f"stages are equal, which has {name} {' or '.join(map(repr, known))}"
            )


def configuration() -> Configuration | None:
    """DP, TP, PP and the micro-batch that are best on the nodes that the job has; None if nobody has said it.

    It is in the environment variable ``UNICRON_CONFIGURATION``. Raises ValueError if that is no configuration, or not
    one for as many ranks as there are.
    """
    text = os.environ.get(CONFIGURATION)
    if not text:
        return None
    found = parse_configuration(text)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if found.gpus != ranks and not takes_place():  # who takes a lost one's place finds as many as are left
        raise ValueError(f"{CONFIGURATION} is {found}, for {found.gpus} ranks: there are {ranks}")
    return found
