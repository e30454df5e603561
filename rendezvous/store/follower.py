"""What one watch has told and has yet to tell, whatever the connection does: pure, shared by all stores."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from unicron_elastic.rendezvous.store.interface import Blind, Change, Changes, Replaced, Sighted, Snapshot, WatchItem


class Follower:
    """Turns what a store sends, with repetitions and gaps, into the items of a watch.

    Invariant: what the receiver can put together from the snapshot and all items is what the store held below the
    prefix at ``revision``.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self.prefix = snapshot.prefix
        self.revision = snapshot.revision  # all changes up to it are told
        self.is_blind = False
        self.is_over = False
        self._known = _revisions(snapshot)
        self._goal: Snapshot | None = None  # what must be told before sight has returned

    @property
    def knows_nothing(self) -> bool:
        """Whether the watch begins with a summary of everything, as it was given no snapshot to go on from."""
        return self.revision == 0

    def moved(self, changes: Iterable[Change]) -> list[WatchItem]:
        """The store tells of changes, in the order of their revisions; those told before are left out."""
        items: list[WatchItem] = []
        new = (change for change in changes if change.revision > self.revision)
        for revision, group in groupby(new, key=lambda change: change.revision):
            items.append(self._tell(Changes(revision=revision, changes=tuple(group))))
        return items + self._sighted()

    def summed_up(self, snapshot: Snapshot) -> list[WatchItem]:
        """The history after ``revision`` is gone, and this is how things stand now."""
        written = [
            Change(key=entry.key, revision=entry.revision, entry=entry)
            for entry in sorted(snapshot.entries, key=lambda entry: (entry.revision, entry.key))
            if self._known.get(entry.key) != entry.revision
        ]
        gone = sorted(set(self._known) - {entry.key for entry in snapshot.entries})
        deleted = [Change(key=key, revision=snapshot.revision, entry=None) for key in gone]
        told = Changes(revision=snapshot.revision, changes=(*written, *deleted), is_summary=True)
        self._tell(told)
        return [*([told] if told.changes else []), *self._sighted()]

    def lost_sight(self, reason: str, silent_s: float) -> list[WatchItem]:
        """The store cannot be reached, which is told once."""
        self._goal = None
        if self.is_blind or self.is_over:
            return []
        self.is_blind = True
        return [Blind(reason=reason, silent_s=silent_s)]

    def reached(self, snapshot: Snapshot) -> list[WatchItem]:
        """The store is reached again; ``snapshot`` was read after that, and what came before it is on its way."""
        self._goal = snapshot
        return self._sighted()

    def replaced(self, reason: str) -> list[WatchItem]:
        """The data is gone: the last item."""
        if self.is_over:
            return []
        self.is_over = True
        return [Replaced(reason=reason)]

    def _tell(self, told: Changes) -> Changes:
        for change in told.changes:
            if change.entry is None:
                self._known.pop(change.key, None)
            else:
                self._known[change.key] = change.entry.revision
        self.revision = told.revision
        return told

    def _sighted(self) -> list[WatchItem]:
        if not self.is_blind or self._goal is None:
            return []
        # The prefix may have stood still up to the goal's revision: then nothing more comes, and equality must do.
        if self.revision < self._goal.revision and self._known != _revisions(self._goal):
            return []
        self.is_blind = False
        return [Sighted()]


def _revisions(snapshot: Snapshot) -> dict[str, int]:
    return {entry.key: entry.revision for entry in snapshot.entries}
