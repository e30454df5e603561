"""The memory in which gradients are summed up: Megatron-Core's buffers, or wider ones, so that no order of sums shows.

An fp32 gradient added to an fp64 sum is as good as not rounded: 29 bits are left for what the sum has grown. So the sum
over all micro-batches, rounded to fp32 once at the end, is the same whoever computed which and in whatever order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unicron_elastic.training.step.collective import keep_for_ever


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
