"""How much memory a GPU needs in a configuration: an estimate that says no only where that is nearly sure.

A wrong yes costs one attempt, after which the configuration is ruled out; a wrong no would never be noticed. So buffers
of NCCL, the CUDA context and what the allocator cannot use are left out.
"""

from __future__ import annotations

from unicron_elastic.planning.model.configurations import Configuration, Workload
from unicron_elastic.planning.model.shape import Transformer

# Mixed precision with Adam, bytes per parameter: weight in bf16 (2) and gradient in fp32 (4); weight in fp32, mean and
# variance (12). These are Megatron-LM's numbers (theoretical_memory_usage.py): 18, and 6 + 12/DP with ZeRO-1.
WEIGHT_AND_GRADIENT_BYTES = 6.0
OPTIMIZER_BYTES = 12.0
RECOMPUTED_BYTES = 2.0  # per token and hidden unit of a layer: its input is all that is kept
LOGIT_BYTES = 6.0  # per token and word: bf16 and fp32


def parameters(workload: Workload) -> int | None:
    """How many parameters the model has; None: that is not known."""
    if workload.parameters is not None or workload.transformer is None:
        return workload.parameters
    return workload.transformer.parameters


def memory_bytes(workload: Workload, configuration: Configuration) -> float:
    """What the GPU needs that needs most; without a transformer only weights, gradients and the optimizer's state."""
    shape = workload.transformer
    if shape is None:
        return _state_bytes(workload, configuration, 0)
    return max(
        _state_bytes(workload, configuration, stage) + _activation_bytes(workload, shape, configuration, stage)
        for stage in shape.loaded_stages(configuration.pipeline)
    )


def host_bytes(workload: Workload, configuration: Configuration) -> float:
    """What the host needs for each GPU of the stage that has most: copies of other replicas' optimizer shards."""
    stages = (0,) if workload.transformer is None else workload.transformer.loaded_stages(configuration.pipeline)
    held = max(_held_parameters(workload, configuration, stage) for stage in stages)
    return workload.shard_copies * OPTIMIZER_BYTES / configuration.replicas * held


def fits(workload: Workload, configuration: Configuration, proven_bytes: float = 0.0) -> bool:
    """Whether a GPU has that much, or it is no more than ``proven_bytes``, the estimate of one that has run.

    True if the GPU's memory or the size of the model is not known.
    """
    if workload.gpu_memory_bytes is None or parameters(workload) is None:
        return True
    return memory_bytes(workload, configuration) <= max(workload.gpu_memory_bytes, proven_bytes)


def _state_bytes(workload: Workload, configuration: Configuration, stage: int) -> float:
    each = WEIGHT_AND_GRADIENT_BYTES
    each /= configuration.replicas if workload.sharding == "full" else 1
    each += OPTIMIZER_BYTES / (1 if workload.sharding == "none" else configuration.replicas)
    return each * _held_parameters(workload, configuration, stage)


def _held_parameters(workload: Workload, configuration: Configuration, stage: int) -> float:
    """Parameters on a GPU of a pipeline stage."""
    shape = workload.transformer
    if shape is None:
        return float(workload.parameters or 0)
    held = shape.stage_parameters(configuration.tensor, configuration.pipeline, stage)
    return held if workload.parameters is None else held * workload.parameters / shape.parameters


def _activation_bytes(workload: Workload, shape: Transformer, configuration: Configuration, stage: int) -> float:
    tensor, pipeline = configuration.tensor, configuration.pipeline
    tokens = configuration.micro_batch * shape.sequence
    full = shape.kept_bytes(tokens, tensor, is_sequence_divided=workload.sequence_parallel)
    layers = shape.layers * _in_flight(workload, configuration, stage)
    logits = LOGIT_BYTES * tokens * shape.padded_vocabulary(tensor) / tensor if stage == pipeline - 1 else 0.0
    if configuration.recompute:
        inputs = tokens * shape.hidden * RECOMPUTED_BYTES / (tensor if workload.sequence_parallel else 1)
        return inputs * layers + full + logits
    return full * layers + logits


def _in_flight(workload: Workload, configuration: Configuration, stage: int) -> float:
    """How much is kept at most between forward and backward, in micro-batches through all layers.

    In 1F1B a stage has as many micro-batches in flight as there are stages from it to the last; interleaved, the
    number of chunks of layers is that of megatron/core/pipeline_parallel/schedules.py, get_pp_rank_microbatches.
    """
    count = -(-workload.global_batch // (configuration.micro_batch * configuration.replicas))
    pipeline = configuration.pipeline
    after, chunks = pipeline - stage - 1, workload.virtual_stages if pipeline > 1 else 1
    kept = after + 1 if chunks == 1 else 2 * after + (chunks - 1) * pipeline + 1
    return min(count * chunks, kept) / (pipeline * chunks)
