"""The running statistics of normalization layers, which each forward pass changes: made independent of who ran it.

Every micro-batch begins with the statistics that the step began with, and the step ends with them moved by the mean
of what its micro-batches would have moved them: one update a step, with the mean statistics of the global batch.
Under DistributedDataParallel they are those of rank 0's micro-batches alone. A cumulative average
(``momentum=None``) ends as if the micro-batches had come one after the other, and the number of batches as with
accumulation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from unicron_elastic.compat.tensors import NormBase
from unicron_elastic.training.step.wrong_use import WrongUseError

_AVERAGED = ("running_mean", "running_var")


def has_own_statistics(model: nn.Module) -> bool:
    """Whether a layer of it tracks what this rank alone has seen, where nobody makes one of what all ranks have."""
    return any(_is_tracking(each) and not isinstance(each, nn.SyncBatchNorm) for each in model.modules())


def _is_tracking(layer: nn.Module) -> bool:
    return isinstance(layer, NormBase) and layer.track_running_stats and layer.running_mean is not None


class Statistics:
    """`Statistics` sums up what micro-batches change of all layers that track some, as if they were gradients.

    ``changes`` are the tensors whose ``.grad`` has them: they are reduced with those of the parameters.
    """

    def __init__(self, micro_batches: int) -> None:
        self.micro_batches = micro_batches
        self._layers: list[tuple[nn.Module, dict[str, Tensor]]] = []  # and the changes of their buffers
        self._seen: list[tuple[Any, ...]] = []  # what the layers were at the last look
        self.changes: list[Tensor] = []

    def look(self, modules: Iterable[nn.Module]) -> bool:
        """Looks at the layers among ``modules``; whether they are others than before, or track otherwise."""
        layers = [each for each in modules if _is_tracking(each)]
        seen = [(id(layer), *map(_form, _tracked(layer).items())) for layer in layers]
        if seen == self._seen:
            return False
        self._seen = seen
        self._layers = [(layer, _changes(layer)) for layer in layers]
        self.changes = [change for _, changes in self._layers for change in changes.values()]
        return True

    def looks_after(self, layer: nn.Module, leaf: str) -> bool:
        """Whether that buffer is one of them."""
        return any(layer is each and leaf in changes for each, changes in self._layers)

    def end_micro_batch(self, before: Mapping[tuple[int, str], Tensor]) -> None:
        """Adds what a micro-batch has changed to ``changes``.

        ``before``: what it began with, by the id of the layer and the name of the buffer in it.
        """
        for layer, changes in self._layers:
            for leaf, change in changes.items():
                now = layer._buffers.get(leaf)
                then = before[id(layer), leaf]
                if now is None or (now.shape, now.dtype) != (then.shape, then.dtype):
                    raise WrongUseError(
                        f"{leaf} of a {type(layer).__name__} was taken away or replaced within a step: change layers "
                        "before 'for index in step', the same on all ranks"
                    )
                moved = (now - before[id(layer), leaf]).to(change.dtype)
                moved = moved.div_(self.micro_batches) if leaf in _AVERAGED else moved
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
                    moved = moved * _share(count, self.micro_batches if used is None else used, self.micro_batches)
                layer._buffers[leaf].data.copy_(began + moved.to(began.dtype))


def _share(count: Tensor, used: Tensor | int, micro_batches: int) -> Tensor:
    """Return by what the mean of changes is multiplied to be that of a cumulative average of ``used`` more batches.

    Each of ``used`` micro-batches moved it by 1 / (count + 1) of its distance, and the mean counts ``micro_batches``.
    """
    return micro_batches * (count + 1).double() / (count + used).clamp(min=1).double()


def _changes(layer: nn.Module) -> dict[str, Tensor]:
    """Return changes by buffer; for whole numbers of a type that back ends sum up, exact below 2**24."""
    return {
        leaf: torch.zeros_like(buffer, dtype=buffer.dtype if leaf in _AVERAGED else torch.float32)
        for leaf, buffer in _tracked(layer).items()
    }


def _tracked(layer: nn.Module) -> dict[str, Tensor]:
    buffers = {leaf: layer._buffers.get(leaf) for leaf in (*_AVERAGED, "num_batches_tracked")}
    return {leaf: buffer for leaf, buffer in buffers.items() if buffer is not None}


def _form(named: tuple[str, Tensor]) -> tuple[Any, ...]:
    leaf, buffer = named
    return leaf, buffer.shape, buffer.dtype, buffer.device
