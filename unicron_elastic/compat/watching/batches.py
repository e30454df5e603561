"""The batches that DataLoaders give: when a loader begins to, and how many it has given."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet, ref

from torch.utils.data import DataLoader, dataloader

from unicron_elastic.compat.watching.watchers import Watchers


class OneBatch(Protocol):
    """It wants to know of each batch of one loader, by its number from 1 on."""

    def before_batch(self, number: int) -> None:
        """Hears that it is about to be read."""

    def before_index(self) -> None:
        """Hears that what is in one is about to be asked for; not of a loader with workers."""

    def behind_index(self, index: Any) -> None:
        """Hears what is in it."""

    def behind_batch(self, number: int) -> None:
        """Hears that it is about to be given."""

    def end(self) -> None:
        """Hears that there is no more."""


class BatchesWatcher(Protocol):
    """It wants to know of each DataLoader that begins to give its batches."""

    def begins(self, loader: Any) -> Any:
        """Hears that this loader is about to begin; ``has_begun`` is told what it returns."""

    def draws_order(self) -> None:
        """Hears that a loader's workers are there, for the first time, and it is about to draw the order."""

    def has_begun(self, noted: Any, batches: Any) -> OneBatch | None:
        """Hears that it has, and which iterator gives them; returns who wants to know of each, if anybody does."""


_watchers = Watchers[Any]()
_watched: WeakSet[Any] = WeakSet()  # classes
_first_indices: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by what gives the batches, where it has workers


def watch_batches(watcher: BatchesWatcher) -> None:
    """Tells ``watcher``, as long as it lives, of all loaders that begin. What it raises is raised there."""
    _watchers.add(watcher)
    if DataLoader in _watched:
        return
    _watched.add(DataLoader)
    begin = DataLoader.__iter__

    @functools.wraps(begin)
    def watched(self: Any) -> Any:
        noted = [(each, each.begins(self)) for each in _watchers]
        batches = begin(self)
        of_each = [each.has_begun(what, batches) for each, what in noted]
        _tell_of_each(batches, [each for each in of_each if each is not None])
        return batches

    DataLoader.__iter__ = watched
    _watch_order()


def _watch_order() -> None:
    """Tells all watchers when a loader with workers draws its first order, behind what it draws for them."""
    if (kind := getattr(dataloader, "_MultiProcessingDataLoaderIter", None)) is None:
        return
    reset = kind._reset

    @functools.wraps(reset)
    def watched(self: Any, loader: Any, first_iter: bool = False) -> Any:
        if first_iter:
            for each in _watchers:
                each.draws_order()

        def first_index() -> Any:
            del self._next_index  # nobody is told of another
            index = _first_indices[self] = type(self)._next_index(self)
            return index

        self._next_index = first_index
        return reset(self, loader, first_iter)

    kind._reset = watched


def keeps_workers(loader: Any) -> bool:
    """Return whether the workers of this loader are there already: then it draws nothing for them."""
    return bool(loader.persistent_workers and loader.num_workers > 0 and getattr(loader, "_iterator", None) is not None)


def batches_given(batches: Any) -> int:
    """Return how many of them were given; 0 where that is not known."""
    return int(getattr(batches, "_num_yielded", 0))


def first_index_given(batches: Any) -> Any:
    """Return what is in the first batch for which workers were asked; None where that is not known."""
    return _first_indices.get(batches)


def _tell_of_each(batches: Any, told: Sequence[OneBatch]) -> None:
    """Tells them of each batch, and nobody else any more; nobody, where torch has another name for what reads it."""
    if not hasattr(type(batches), "_next_data"):
        return
    found = ref(batches)  # it may end as soon as the script lets it go, as ever

    def next_data() -> Any:
        this: Any = found()
        number = batches_given(this) + 1
        for each in told:
            each.before_batch(number)
        try:
            data = type(this)._next_data(this)
        except StopIteration:
            for each in told:
                each.end()
            raise
        for each in told:
            each.behind_batch(number)
        return data

    def next_index() -> Any:
        this: Any = found()
        for each in told:
            each.before_index()
        index = type(this)._next_index(this)
        for each in told:
            each.behind_index(index)
        return index

    batches._next_data = next_data
    if hasattr(type(batches), "_next_index") and getattr(batches, "_num_workers", 0) == 0:  # workers have got theirs
        batches._next_index = next_index
