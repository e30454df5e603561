"""What of a data loader decides whether its batches can be read by number."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset


class LoaderFacts(NamedTuple):
    """`LoaderFacts` are what matters of a data loader."""

    kind: str = "DataLoader"
    has_parts: bool = True
    has_index: bool = True
    is_iterated_otherwise: bool = False
    batches: int = 1


def loader_facts(loader: Any, known: Collection[Callable[..., Any]] = ()) -> LoaderFacts:
    """Return what matters of this loader; ``known`` iterators leave batches as they are."""
    parts = ("dataset", "batch_sampler", "collate_fn")
    has_parts = all(getattr(loader, name, None) is not None for name in parts)
    is_numbered = has_index(getattr(loader, "dataset", None))
    return LoaderFacts(
        kind=type(loader).__name__,
        has_parts=has_parts,
        has_index=is_numbered,
        is_iterated_otherwise=type(loader).__iter__ not in (DataLoader.__iter__, *known),
        batches=len(loader.batch_sampler) if has_parts and is_numbered else 0,
    )


def has_index(dataset: Any) -> bool:
    """Return whether samples can be read by number from a dataset, and not only in its own order."""
    has_both = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return has_both and not isinstance(dataset, IterableDataset)


def refusal_of_loader(facts: LoaderFacts, name: str) -> str:
    """Return why batches cannot be read by their number from what was got by this ``name``; "" if they can."""
    if not facts.has_parts:
        return f"{name} is a {facts.kind} without dataset, batch_sampler and collate_fn"
    if not facts.has_index:
        return f"{name} has a dataset that can only be iterated, and what a lost rank has read nobody could read again"
    if facts.is_iterated_otherwise:
        return f"{name} is a {facts.kind}, which changes batches while it is iterated"
    if facts.batches < 1:
        return f"{name} has no batch"
    return ""
