"""Who is to be told of something for as long as they live."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Generic, TypeVar
from weakref import ref

T = TypeVar("T")


class Watchers(Generic[T]):
    """`Watchers` keep none of them alive, and may be gone through in one thread while another adds one.

    A ``weakref.WeakSet`` may not: it raises RuntimeError then.
    """

    def __init__(self) -> None:
        self._refs: tuple[ref[T], ...] = ()  # never changed, but replaced: others may go through it
        self._lock = threading.Lock()

    def add(self, watcher: T) -> None:
        """Have it told, too; once, however often it is added."""
        with self._lock:
            others = (each for each in self._refs if each() is not None and each() is not watcher)
            self._refs = (*others, ref(watcher))

    def __iter__(self) -> Iterator[T]:
        """Go through those that live."""
        return iter([watcher for each in self._refs if (watcher := each()) is not None])
