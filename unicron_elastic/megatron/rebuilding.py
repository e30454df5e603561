"""Makes Megatron-Core's gradient buffers and distributed optimizer anew, in place, for another number of replicas.

The script keeps its objects: ``DistributedDataParallel`` modules are initialised once more around the same model, and
the ``DistributedOptimizer`` gets the attributes of a new one (both seen in megatron-core 0.16.1).

The memory in which gradients are summed up: Megatron-Core's buffers, or wider ones, so that no order of sums shows.

An fp32 gradient added to an fp64 sum is as good as not rounded: 29 bits are left for what the sum has grown. So the
sum over all micro-batches, rounded to fp32 once at the end, is the same whoever computed which and in whatever
order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from unicron_elastic.engine.transport.waiter import keep_for_ever
from unicron_elastic.megatron.part_transfer import Span
from unicron_elastic.megatron.state_part import like


def spans_of(chunks: Sequence[Any], numbers: Mapping[Tensor, int]) -> list[tuple[list[Span], int]]:
    """Return for each bucket where its parameters are, by their numbers; and its length without padding."""
    found = []
    for chunk in chunks:
        for buffer in chunk.buffers:
            for bucket in buffer.buckets:
                spans = []
                for parameter in bucket.params_list:
                    begin, end, _ = buffer.param_index_map[parameter]
                    spans.append(Span(numbers[parameter], begin - bucket.offset, end - bucket.offset))
                found.append((sorted(spans, key=lambda span: span.begin), int(bucket.numel_unpadded)))
    return found


def find_groups(optimizer: Any, parameters: Sequence[Tensor]) -> list[int]:
    """The optimizer's group of each parameter, by number; with all replicas, as each knows its own parameters only."""
    found = torch.full((len(parameters),), -1, dtype=torch.int64, device=parameters[0].device)
    numbers = {parameter: number for number, parameter in enumerate(parameters)}
    for parameter, (group, _) in optimizer.model_param_group_index_map.items():
        found[numbers[parameter]] = group
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return [int(each) for each in found]


def rebuild(chunks: Sequence[Any], optimizer: Any, group_of: Sequence[int], parameters: Sequence[Tensor]) -> None:
    """For the data-parallel group that there is now. Gradients are zero then, and the optimizer's state is new."""
    for chunk in chunks:
        _initialise_again(chunk)
    before = dict(vars(optimizer))
    old = optimizer.optimizer
    groups: list[dict[str, Any]] = [{**group, "params": []} for group in old.param_groups]
    for parameter, group in zip(parameters, group_of, strict=True):
        groups[group]["params"].append(parameter)
    inner = like(old)
    inner.param_groups = groups
    new = type(optimizer)(
        inner,
        optimizer.config,
        optimizer.grad_scaler,
        optimizer.init_state_fn,
        optimizer.model_chunks,
        dict(zip(optimizer.per_model_buffers, ([*chunk.buffers] for chunk in chunks), strict=True)),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        None if optimizer.data_parallel_group_gloo is None else parallel_state.get_data_parallel_group_gloo(True),
        optimizer.data_parallel_group_idx,
        optimizer.distributed_optimizer_instance_id,
    )
    vars(optimizer).clear()
    vars(optimizer).update({**before, **vars(new)})


def _initialise_again(chunk: Any) -> None:
    settings = {
        "config": chunk.config,
        "ddp_config": chunk.ddp_config,
        "module": chunk.module,
        "disable_bucketing": chunk.bucket_size is None,
    }
    accumulators = chunk.grad_accs
    vars(chunk).clear()
    # The hooks that add gradients belong to the parameters, and look for all else in ``chunk``: those that are there
    # serve the new buffers, and a second one for each would add nothing, or complain.
    chunk.__dict__["_make_backward_post_hook"] = lambda _parameter: lambda *_: None
    type(chunk).__init__(chunk, **settings)
    del chunk.__dict__["_make_backward_post_hook"]
    chunk.grad_accs = accumulators


class Sums:
    """Of all model chunks of one process. ``is_wide``: gradients are summed up and reduced in fp64.

    Megatron-Core's functions find them where its buffers, its bucket groups and the parameters' ``main_grad`` point.
    """

    def __init__(self, chunks: Sequence[Any], *, is_wide: bool) -> None:
        self._chunks = chunks
        self._is_wide = is_wide
        self._has_widened = False
        self._narrow: list[Tensor] = []
        self._wide: list[Tensor] = []

    @property
    def _buffers(self) -> list[Any]:
        return [buffer for chunk in self._chunks for buffer in chunk.buffers]

    def install(self) -> None:
        """When Megatron-Core has made its buffers, or has made them anew; what is in them is taken over."""
        if self._is_wide:
            self._narrow = [buffer.grad_data for buffer in self._buffers]
            self._wide = [data.to(torch.float64) for data in self._narrow]
            if self._has_widened:
                self._point(self._wide)

    def like(self, bucket: Any) -> Tensor:
        """Memory for a copy of a bucket's sums."""
        data: Tensor = bucket.grad_data
        return torch.empty_like(data, dtype=torch.float64 if self._is_wide else data.dtype)

    def widen(self) -> None:
        """For passes and reductions."""
        if self._is_wide and not self._has_widened:
            for wide, narrow in zip(self._wide, self._narrow, strict=True):
                wide.copy_(narrow)
            self._point(self._wide)
            self._has_widened = True

    def round(self) -> None:
        """For the optimizer: what Megatron-Core's own buffers can hold."""
        if self._has_widened:
            for wide, narrow in zip(self._wide, self._narrow, strict=True):
                narrow.copy_(wide)
            self._point(self._narrow)
            self._has_widened = False

    def renew(self) -> None:
        """Takes other memory: a reduction that does not end may still write to where they were."""
        new = []
        for buffer in self._buffers:
            keep_for_ever(buffer.grad_data)
            new.append(buffer.grad_data.clone())
        self._point(new)
        if self._has_widened:
            self._wide = new
        else:
            self._narrow = new

    def _point(self, memory: Sequence[Tensor]) -> None:
        for buffer, data in zip(self._buffers, memory, strict=True):
            buffer.grad_data = data
            for bucket in buffer.buckets:
                bucket.grad_data = data[bucket.offset :][: bucket.grad_data.numel()]
            for parameter in buffer.params:
                begin, end, _ = buffer.param_index_map[parameter]
                parameter.main_grad = data[begin:end].view(parameter.shape)
        for group in (group for chunk in self._chunks for group in chunk.bucket_groups):
            group.cached_grad_buffer_shard_list = [None] * len(group.buckets)
