"""How much memory a GPU needs in a configuration: an estimate that says no only where that is nearly sure.

A wrong yes costs one attempt, after which the configuration is ruled out; a wrong no would never be noticed. So buffers
of NCCL, the CUDA context and what the allocator cannot use are left out.
"""

from __future__ import annotations

from unicron_elastic.planning.configurations import Configuration, Workload

__all__ = ["fits", "memory_bytes", "parameters"]

# Mixed precision with Adam, bytes per parameter: weight in bf16 (2) and gradient in fp32 (4); weight in fp32, mean and
# variance (12). These are Megatron-LM's numbers (theoretical_memory_usage.py): 18, and 6 + 12/DP with ZeRO-1.
WEIGHT_AND_GRADIENT_BYTES = 6.0
OPTIMIZER_BYTES = 12.0
# Activations of a layer, bytes per token and hidden unit, with an attention that does not write out its scores:
# Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), section 4.
REPLICATED_BYTES = 10.0  # on every rank of the tensor group
DIVIDED_BYTES = 24.0  # shared by the tensor group
RECOMPUTED_BYTES = 2.0  # the layer's input is all that is kept
LOGIT_BYTES = 6.0  # per token and word: bf16 and fp32


def parameters(workload: Workload) -> int | None:
    """How many parameters the model has; None: that is not known."""
    if workload.parameters is not None or workload.transformer is None:
        return workload.parameters
    return workload.transformer.parameters


def memory_bytes(workload: Workload, configuration: Configuration) -> float:
    """What the GPU needs that needs most; without a transformer only weights, gradients and the optimizer's state."""
    return _state_bytes(workload, configuration) + _activation_bytes(workload, configuration)


def fits(workload: Workload, configuration: Configuration, proven_bytes: float = 0.0) -> bool:
    """Whether a GPU has that much, or it is no more than ``proven_bytes``, the estimate of one that has run.

    True if the GPU's memory or the size of the model is not known.
    """
    if workload.gpu_memory_bytes is None or parameters(workload) is None:
        return True
    return memory_bytes(workload, configuration) <= max(workload.gpu_memory_bytes, proven_bytes)


def _state_bytes(workload: Workload, configuration: Configuration) -> float:
    each = WEIGHT_AND_GRADIENT_BYTES
    each /= configuration.replicas if workload.sharding == "full" else 1
    each += OPTIMIZER_BYTES / (1 if workload.sharding == "none" else configuration.replicas)
    return each * _rank_parameters(workload, configuration)


def _rank_parameters(workload: Workload, configuration: Configuration) -> float:
    """Parameters of the pipeline stage that has most: a part of the layers, and the embedding."""
    total, shape = parameters(workload) or 0, workload.transformer
    if shape is None:
        return float(total)
    part = (shape.block_parameters / configuration.pipeline + shape.embedding_parameters) / shape.parameters
    return total * part / configuration.tensor


def _activation_bytes(workload: Workload, configuration: Configuration) -> float:
    shape = workload.transformer
    if shape is None:
        return 0.0
    tokens = configuration.micro_batch * shape.sequence
    full = tokens * shape.hidden * (REPLICATED_BYTES + DIVIDED_BYTES / configuration.tensor)
    # The first stage of a 1F1B pipeline holds as many micro-batches as there are stages, each for 1/stages of the
    # layers: all layers of one micro-batch, or less if there are fewer micro-batches.
    count = -(-workload.global_batch // (configuration.micro_batch * configuration.replicas))
    layers = shape.layers * min(1.0, count / configuration.pipeline)
    logits = LOGIT_BYTES * tokens * shape.vocabulary / configuration.tensor if configuration.pipeline == 1 else 0.0
    if configuration.recompute:
        return tokens * shape.hidden * RECOMPUTED_BYTES * layers + full + logits
    return full * layers + logits
