"""The order in which a data loader has its samples: who lists one epoch has it as who came through all before."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from unicron_elastic.training.loader.sample_order import SampleOrder
from unicron_elastic.training.step.randomness import Generators


def order_of(loader: Any, seed: int) -> SampleOrder:
    """Return the order of a loader's samples.

    What its samplers draw from the global generators is by ``seed`` and epoch. A generator of their own goes on from
    epoch to epoch, as where the loader is iterated.
    """
    return SampleOrder(partial(_begin_epoch, loader), _Epochs(loader, seed))


def _begin_epoch(loader: Any, epoch: int) -> None:
    """Tell a loader's samplers, and its dataset, of an epoch, as loops do."""
    for each in (loader, loader.dataset, *_samplers(loader)):
        if each is not None and hasattr(each, "set_epoch"):
            each.set_epoch(epoch)


def _samplers(loader: Any) -> tuple[Any, Any]:
    return loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)


class _Epochs:
    """`_Epochs` lists the batches of an epoch; generators are where they would be after all epochs before."""

    def __init__(self, loader: Any, seed: int) -> None:
        self._loader = loader
        self._seed = seed
        holders = (loader, *_samplers(loader))
        found = (getattr(each, "generator", None) for each in holders)
        own = {id(each): each for each in found if isinstance(each, torch.Generator)}
        self._generators = tuple(own.values())
        self._states = [self._now()]  # before each epoch

    def __call__(self, epoch: int) -> list[list[int]]:
        if not self._generators:
            return self._list(epoch)
        for earlier in range(len(self._states) - 1, epoch):
            self._draw(earlier)
        return self._draw(epoch)

    def _draw(self, epoch: int) -> list[list[int]]:
        """List an epoch behind those before."""
        for generator, state in zip(self._generators, self._states[epoch], strict=True):
            generator.set_state(state)
        if isinstance(own := getattr(self._loader, "generator", None), torch.Generator):
            torch.empty((), dtype=torch.int64).random_(generator=own)  # as torch's iterator does, for its workers
        found = self._list(epoch)
        if len(self._states) == epoch + 1:
            self._states.append(self._now())
        return found

    def _list(self, epoch: int) -> list[list[int]]:
        with Generators().kept((self._seed * 0x9E3779B97F4A7C15 + epoch) & 0xFFFFFFFFFFFFFFFF):
            return [list(batch) for batch in self._loader.batch_sampler]

    def _now(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]
