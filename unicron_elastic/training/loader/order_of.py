"""The order of a data loader's samples, for frameworks whose loops tell loaders and datasets of epochs."""

from __future__ import annotations

from functools import partial
from typing import Any

from unicron_elastic.training.loader.loader_order import LoaderOrder
from unicron_elastic.training.loader.sample_order import SampleOrder


def order_of(loader: Any, seed: int) -> SampleOrder:
    """Return it; whole epochs are iterated."""
    return SampleOrder(partial(_begin_epoch, loader), LoaderOrder(loader, seed, None).batches)


def _begin_epoch(loader: Any, epoch: int) -> None:
    """Tell a loader's samplers, and its dataset, of an epoch, as loops do."""
    sampler = loader.batch_sampler
    for each in (loader, loader.dataset, sampler, getattr(sampler, "sampler", None)):
        if each is not None and hasattr(each, "set_epoch"):
            each.set_epoch(epoch)
