"""The running statistics of normalization layers, which each forward pass changes: made independent of who ran it.

Every micro-batch begins with the statistics that the step began with, and the step ends with them moved by the mean of
what its micro-batches would have moved them: one update a step, with the mean statistics of the global batch. Under
DistributedDataParallel they are those of rank 0's micro-batches alone. A cumulative average (``momentum=None``) ends as
if the micro-batches had come one after the other, and the number of batches as with accumulation.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from unicron_elastic.compat.tensors import NormBase

_AVERAGED = ("running_mean", "running_var")


class Statistics:
    """Of all layers of ``model`` that track some. Their changes are summed up as if they were gradients.

    ``changes`` are the tensors whose ``.grad`` has them: they are reduced with those of the parameters.
    """

    def __init__(self, model: nn.Module, micro_batches: int) -> None:
        self._micro_batches = micro_batches
        self._layers: list[tuple[nn.Module, dict[str, Tensor]]] = []  # and the changes of their buffers
        for layer in model.modules():
            if isinstance(layer, NormBase) and layer.track_running_stats and layer.running_mean is not None:
                self._layers.append((layer, _changes(layer)))
        self.changes = [change for _, changes in self._layers for change in changes.values()]

    def looks_after(self, layer: nn.Module, leaf: str) -> bool:
        """Whether that buffer is one of them."""
        return any(layer is each and leaf in changes for each, changes in self._layers)

    def end_micro_batch(self, before: Mapping[tuple[int, str], Tensor]) -> None:
        """Adds what a micro-batch has changed to ``changes``.

        ``before``: what it began with, by the id of the layer and the name of the buffer in it.
        """
        for layer, changes in self._layers:
            for leaf, change in changes.items():
                moved = (layer._buffers[leaf] - before[id(layer), leaf]).to(change.dtype)
                moved = moved.div_(self._micro_batches) if leaf in _AVERAGED else moved
                if change.grad is None:
                    change.grad = moved
                else:
                    change.grad.add_(moved)

    def settle(self, before: Mapping[tuple[int, str], Tensor]) -> None:
        """The step's statistics, when the changes are reduced; ``before``: what the step began with."""
        for layer, changes in self._layers:
            for leaf, change in changes.items():
                began, moved = before[id(layer), leaf], change.grad
                if moved is None:
                    continue
                if leaf in _AVERAGED and layer.momentum is None and "num_batches_tracked" in changes:
                    count, used = before[id(layer), "num_batches_tracked"], changes["num_batches_tracked"].grad
                    moved = moved * _share(count, self._micro_batches if used is None else used, self._micro_batches)
                layer._buffers[leaf].data.copy_(began + moved.to(began.dtype))


def _share(count: Tensor, used: Tensor | int, micro_batches: int) -> Tensor:
    """By what the mean of changes is multiplied to be that of a cumulative average of ``used`` more batches.

    Each of ``used`` micro-batches moved it by 1 / (count + 1) of its distance, and the mean counts ``micro_batches``.
    """
    return micro_batches * (count + 1).double() / (count + used).clamp(min=1).double()


def _changes(layer: nn.Module) -> dict[str, Tensor]:
    """By the names of its buffers; for whole numbers of a type that back ends sum up, exact below 2**24."""
    buffers = {leaf: layer._buffers.get(leaf) for leaf in (*_AVERAGED, "num_batches_tracked")}
    return {
        leaf: torch.zeros_like(buffer, dtype=buffer.dtype if leaf in _AVERAGED else torch.float32)
        for leaf, buffer in buffers.items()
        if buffer is not None
    }
