"""All configurations in which a job can run on a number of units, and why there is none."""

from __future__ import annotations

from collections.abc import Iterator

from unicron_elastic.planning.model.configurations import Configuration, Workload
from unicron_elastic.planning.model.memory import fits, memory_bytes


def configurations(workload: Workload, units: int, proven_bytes: float = 0.0) -> tuple[Configuration, ...]:
    """The configurations that use all GPUs of ``units``; none if there is no such, or too few or too many units.

    Each divides the work evenly: tensor parallelism within a node and by heads, pipeline stages by layers, the global
    batch by micro-batches, and these by replicas, unless the job takes uneven shares; then every replica has at least
    one. Each is thought to fit into memory, or to need no more than ``proven_bytes``.
    """
    if not is_allowed(workload, units):
        return ()
    return tuple(found for found in _divided(workload, units) if fits(workload, found, proven_bytes))


def is_allowed(workload: Workload, units: int) -> bool:
    """Whether ``units`` is within the job's minimum and maximum."""
    return workload.minimum <= units and (workload.maximum is None or units <= workload.maximum)


def why_none(workload: Workload, units: int) -> str:
    """Why there is no configuration for ``units``, as the end of a sentence; "" if there is one."""
    if units < workload.minimum:
        return f"less than the minimum of {workload.minimum}"
    if workload.maximum is not None and units > workload.maximum:
        return f"more than the maximum of {workload.maximum}"
    found = list(_divided(workload, units))
    if not found:
        return f"{units * workload.gpus_per_unit} GPUs cannot share a batch of {workload.global_batch} evenly"
    if any(fits(workload, each) for each in found):
        return ""
    least = min(memory_bytes(workload, each) for each in found)
    return f"a GPU would need {least / 2**30:.1f} GiB and has {(workload.gpu_memory_bytes or 0) / 2**30:.1f} GiB"


def _divided(workload: Workload, units: int) -> Iterator[Configuration]:
    gpus = units * workload.gpus_per_unit
    again = (False, True) if workload.recompute is None else (workload.recompute,)
    for tensor in _tensor_sizes(workload):
        for pipeline in _pipeline_sizes(workload):
            replicas, rest = divmod(gpus, tensor * pipeline)
            if rest or not replicas:
                continue
            for size in sorted(set(workload.micro_batch_sizes), reverse=True):
                if _shares(workload, replicas, size, pipeline):
                    for recompute in again:
                        yield Configuration(
                            replicas=replicas, tensor=tensor, pipeline=pipeline, micro_batch=size, recompute=recompute
                        )


def _shares(workload: Workload, replicas: int, micro_batch: int, pipeline: int) -> bool:
    """Whether the global batch can be divided so.

    Megatron's rules (megatron-core 0.16.1): num_microbatches_calculator.py, ConstantNumMicroBatchesCalculator, and
    with virtual stages pipeline_parallel/schedules.py, forward_backward_pipelining_with_interleaving: micro-batches go
    through in groups of as many as there are stages.
    """
    count, rest = divmod(workload.global_batch, micro_batch)
    if rest or count < replicas:
        return False
    if workload.virtual_stages > 1 and pipeline > 1:
        return count % (replicas * pipeline) == 0
    return workload.uneven or count % replicas == 0


def _tensor_sizes(workload: Workload) -> list[int]:
    shape, divided = workload.transformer, workload.sequence_parallel
    return [
        size
        for size in range(1, min(workload.max_tensor, workload.gpus_per_node) + 1)
        if workload.gpus_per_node % size == 0
        and (shape is None or shape.allows_tensor(size, is_sequence_divided=divided))
    ]


def _pipeline_sizes(workload: Workload) -> list[int]:
    shape = workload.transformer
    if shape is None:
        return [1]
    most = min(workload.max_pipeline, shape.layers)
    return [size for size in range(1, most + 1) if shape.allows_pipeline(size, workload.virtual_stages)]
