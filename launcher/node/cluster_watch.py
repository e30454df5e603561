"""What one agent watches in the cluster's store, by short names of its own.

What was seen comes to the agent's thread by ``post`` and is taken in there, so that nothing changes while it decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from unicron_elastic.rendezvous.store.interface import (
    Blind,
    Changes,
    Entry,
    Replaced,
    Sighted,
    Store,
    StoreError,
    StoreReplacedError,
    Watch,
    WatchItem,
)


@dataclass(frozen=True, slots=True)
class PrefixChanged:
    """Something below a watched prefix has changed. ``number``: of the watch; one that was given up is not heard."""

    what: str
    number: int
    item: WatchItem


@dataclass(frozen=True, slots=True)
class Trouble:
    """The store must be opened again."""

    error: StoreError


class ClusterWatch:
    """`ClusterWatch` watches prefixes of the store from ``open`` to ``close``, and again; one thread uses it."""

    def __init__(self, open_store: Callable[[], Store], post: Callable[[PrefixChanged | Trouble], None]) -> None:
        """``post`` hears from the store's threads."""
        self._open_store = open_store
        self._post = post
        self.store: Store | None = None
        self._watches: dict[str, tuple[int, Watch]] = {}
        self._begun = 0
        self._entries: dict[str, dict[str, Entry]] = {}  # by what is watched, then by key
        self._blind: set[str] = set()

    @property
    def is_clear(self) -> bool:
        """Whether all that is watched can be seen."""
        return self.store is not None and not self._blind

    def entries(self, what: str) -> Mapping[str, Entry]:
        """What is there, by key; nothing of what is not watched."""
        return self._entries.get(what, {})

    def opened(self) -> Store:
        """The store. Raises StoreError if it is not open."""
        if self.store is None:
            raise StoreError("the cluster's store is not open")
        return self.store

    def open(self, wanted: Mapping[str, str]) -> None:
        """Opens the store and watches ``wanted``, prefixes by name. Raises StoreError."""
        self.store = self._open_store()
        for what, prefix in wanted.items():
            self.watch(what, prefix)

    def close(self) -> None:
        """Forgets everything. May come twice."""
        self._watches.clear()
        self._entries.clear()
        self._blind.clear()
        if self.store is not None:
            self.store.close()
            self.store = None

    def take(self, told: PrefixChanged) -> str:
        """What there is to look at, "" for nothing. Raises StoreReplacedError."""
        what, item = told.what, told.item
        if told.number != self._watches.get(what, (0, None))[0]:
            return ""  # of a watch that was given up
        match item:
            case Changes():
                known = self._entries.setdefault(what, {})
                for change in item.changes:
                    if change.entry is None:
                        known.pop(change.key, None)
                    else:
                        known[change.key] = change.entry
                return what
            case Blind():
                self._blind.add(what)
            case Sighted():
                self._blind.discard(what)
            case Replaced():
                raise StoreReplacedError(item.reason)
        return ""

    def watch(self, what: str, prefix: str) -> int:
        """What is there now is looked at as well, soon. Returns the store's revision. Raises StoreError."""
        store = self.opened()
        self.unwatch(what)
        self._begun += 1
        number = self._begun
        snapshot = store.read_prefix(prefix)
        self._entries[what] = {entry.key: entry for entry in snapshot.entries}
        self._watches[what] = number, store.watch(snapshot, lambda item: self._post(PrefixChanged(what, number, item)))
        self._post(PrefixChanged(what, number, Changes(revision=snapshot.revision, changes=())))
        return snapshot.revision

    def try_to_watch(self, what: str, prefix: str) -> int:
        """Now or when the store can be asked; its revision now, 0 then."""
        try:
            return self.watch(what, prefix)
        except StoreError as error:
            self._post(Trouble(error))
            return 0

    def unwatch(self, what: str) -> None:
        """Without effect on what is not watched."""
        self._entries.pop(what, None)
        self._blind.discard(what)
        if (known := self._watches.pop(what, None)) is not None:
            known[1].close()
