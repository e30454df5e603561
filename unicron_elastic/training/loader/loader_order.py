"""The batches of each epoch as a data loader's sampler gives them, the same for who comes in a later epoch."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch

from unicron_elastic.training.step.randomness import Generators, generators_of


class LoaderOrder:
    """`LoaderOrder` lists the batches of an epoch.

    A loader with a generator of its own, or a sampler with one, has in each epoch the order that it has when it is
    iterated once for each epoch before. Without one the order depends on the seed and the epoch.
    """

    def __init__(self, loader: Any, seed: int, batches: int | None) -> None:
        """``batches`` are those of an epoch that are trained; None: all, and what iterates them comes to their end.

        There some samplers draw once more from a generator of their own.
        """
        self._loader = loader
        self._seed = seed
        self._count = batches
        self._generators = generators_of(loader)
        self._before = [self._states()]  # where the generators are before each epoch that was reached

    def begin_epoch(self, epoch: int) -> None:
        """Tell the samplers of an epoch, as Lightning's loop does."""
        for each in _samplers_of(self._loader):
            if callable(begin := getattr(each, "set_epoch", None)):
                begin(epoch)

    def batches(self, epoch: int) -> list[list[int]]:
        """List an epoch. Samplers are told of each epoch that is listed for that: some count those that they end."""
        for missing in range(len(self._before) - 1, epoch):
            self.begin_epoch(missing)
            self._listed(missing)
        self.begin_epoch(epoch)
        return self._listed(epoch)

    def _listed(self, epoch: int) -> list[list[int]]:
        for generator, state in zip(self._generators, self._before[epoch], strict=True):
            generator.set_state(state)
        if (own := getattr(self._loader, "generator", None)) is not None:
            torch.empty((), dtype=torch.int64).random_(generator=own)  # as the loader does for its workers
        with Generators().kept((self._seed * 0x9E3779B97F4A7C15 + epoch) & 0xFFFFFFFFFFFFFFFF):
            batches = [list(batch) for batch in islice(self._loader.batch_sampler, self._count)]
        self._before[epoch + 1 :] = [self._states()]
        return batches

    def _states(self) -> list[torch.Tensor]:
        return [each.get_state() for each in self._generators]


def _samplers_of(loader: Any) -> list[Any]:
    batches = loader.batch_sampler
    found = [loader.sampler, getattr(batches, "sampler", None), batches]
    return list({id(each): each for each in found if each is not None}.values())
