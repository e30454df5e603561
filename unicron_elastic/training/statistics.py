"""The running statistics of normalization layers, which each forward pass changes: made independent of who ran it.

Every micro-batch begins with the statistics that the step began with, and the step ends with them moved by the mean of
what its micro-batches would have moved them: one update a step, with the mean statistics of the global batch. Under
DistributedDataParallel they are those of rank 0's micro-batches alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from unicron_elastic.compat.tensors import NormBase

__all__ = ["Statistics"]


class Statistics:
    """Of all layers of ``model`` that track some. Their changes are summed up as if they were gradients.

    ``changes`` are the tensors whose ``.grad`` has them: they are reduced with those of the parameters.
    """

    def __init__(self, model: nn.Module, micro_batches: int) -> None:
        layers = [layer for layer in model.modules() if isinstance(layer, NormBase) and layer.track_running_stats]
        self._layers = [layer for layer in layers if layer.running_mean is not None]
        self._buffers = [
            buffer for layer in self._layers for buffer in (layer.running_mean, layer.running_var) if buffer is not None
        ]
        self._micro_batches = micro_batches
        self._before = [buffer.clone() for buffer in self._buffers]
        self._counts = self._tracked()
        self._is_in_step = False
        self.changes = [torch.zeros_like(buffer) for buffer in self._buffers]

    def begin(self) -> None:
        """A step begins with the statistics as they are."""
        for before, buffer in zip(self._before, self._buffers, strict=True):
            before.copy_(buffer)
        self._counts = self._tracked()
        self._is_in_step = True

    def begin_micro_batch(self) -> None:
        """Puts back what another micro-batch has changed."""
        for before, buffer in zip(self._before, self._buffers, strict=True):
            buffer.copy_(before)

    def end_micro_batch(self) -> None:
        """Adds what this micro-batch has changed to ``changes``."""
        for before, buffer, change in zip(self._before, self._buffers, self.changes, strict=True):
            moved = (buffer - before).div_(self._micro_batches)
            if change.grad is None:
                change.grad = moved
            else:
                change.grad.add_(moved)

    def settle(self) -> None:
        """The step's statistics, when the changes are reduced."""
        self.end()
        for before, buffer, change in zip(self._before, self._buffers, self.changes, strict=True):
            buffer.copy_(before if change.grad is None else before + change.grad)
        for layer, count in zip(self._layers, self._counts, strict=True):
            if layer.num_batches_tracked is not None and layer.training:
                layer.num_batches_tracked.fill_(count + self._micro_batches)

    def end(self) -> None:
        """Is out of the step: the statistics are what the layers have."""
        self._is_in_step = False

    def at_rest(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A model's state_dict with the statistics that the present step began with; as it is between steps."""
        if not self._is_in_step:
            return dict(state)
        known = {buffer.data_ptr(): before for before, buffer in zip(self._before, self._buffers, strict=True)}
        counts = {
            layer.num_batches_tracked.data_ptr(): count
            for layer, count in zip(self._layers, self._counts, strict=True)
            if layer.num_batches_tracked is not None
        }

        def of(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if value.data_ptr() in counts:
                return torch.full_like(value, counts[value.data_ptr()])
            return known.get(value.data_ptr(), value)

        return {name: of(value) for name, value in state.items()} if self._layers else dict(state)

    def _tracked(self) -> list[int]:
        return [0 if layer.num_batches_tracked is None else int(layer.num_batches_tracked) for layer in self._layers]
