"""What of a data loader decides whether its batches can be read by number, and how its sampler is asked."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from unicron_elastic.training.loader.sample_order import SampleOrder
from unicron_elastic.training.step.randomness import Generators


class LoaderFacts(NamedTuple):
    """`LoaderFacts` are what matters of a data loader."""

    kind: str = "DataLoader"
    has_parts: bool = True
    is_iterated_otherwise: bool = False
    batches: int = 1


def loader_facts(loader: Any, known: Collection[Callable[..., Any]] = ()) -> LoaderFacts:
    """Return what matters of this loader; ``known`` iterators leave batches as they are."""
    parts = ("dataset", "batch_sampler", "collate_fn")
    has_parts = all(getattr(loader, name, None) is not None for name in parts)
    return LoaderFacts(
        kind=type(loader).__name__,
        has_parts=has_parts,
        is_iterated_otherwise=type(loader).__iter__ not in (DataLoader.__iter__, *known),
        batches=len(loader.batch_sampler) if has_parts else 0,
    )


def refusal_of_loader(facts: LoaderFacts, name: str) -> str:
    """Return why batches cannot be read by their number from what was got by this ``name``; "" if they can."""
    if not facts.has_parts:
        return f"{name} is a {facts.kind} without dataset, batch_sampler and collate_fn"
    if facts.is_iterated_otherwise:
        return f"{name} is a {facts.kind}, which changes batches while it is iterated"
    if facts.batches < 1:
        return f"{name} has no batch"
    return ""


def order_of(loader: Any, seed: int) -> SampleOrder:
    """Return the order of a loader's samples: what samplers draw from global generators is by ``seed`` and epoch."""
    return SampleOrder(partial(_begin_epoch, loader), partial(listed, loader.batch_sampler, seed))


def _begin_epoch(loader: Any, epoch: int) -> None:
    """Tell a loader's samplers, and its dataset, of an epoch, as loops do."""
    sampler = loader.batch_sampler
    for each in (loader, loader.dataset, sampler, getattr(sampler, "sampler", None)):
        if each is not None and hasattr(each, "set_epoch"):
            each.set_epoch(epoch)


def listed(sampler: Any, seed: int, epoch: int, batches: int | None = None) -> list[list[int]]:
    """List so many batches of an epoch, or all: what a sampler draws from the global generators depends on the epoch.

    It is not asked for more: at their end some draw once more from a generator of their own.
    """
    with Generators().kept((seed * 0x9E3779B97F4A7C15 + epoch) & 0xFFFFFFFFFFFFFFFF):
        return [list(batch) for batch in islice(sampler, batches)]
