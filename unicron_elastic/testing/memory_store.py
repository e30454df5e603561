"""A store in memory, for tests and simulation: no thread, no socket, and time is what the given clock says."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from unicron_elastic.rendezvous.store.follower import Follower
from unicron_elastic.rendezvous.store.interface import (
    Change,
    Deliver,
    Entry,
    Lease,
    LeaseGoneError,
    Put,
    Reading,
    Snapshot,
    Store,
    StoreClosedError,
    StoreReplacedError,
    StoreUnreachableError,
    Watch,
    WatchItem,
    check_commit,
    check_key,
    check_namespace,
    check_part,
    check_prefix,
    check_ttl,
)

MIN_TTL_S = 2.0  # what etcd grants at least with its usual election time
_LOST = "the data in memory is gone"


@dataclass(slots=True)
class _Lease:
    ttl_s: float
    ends_at: float
    keys: set[str] = field(default_factory=set)


class MemoryServer:
    """The data that several MemoryStore share, and what can befall it. For one thread.

    ``clock`` gives seconds. Leases run out when somebody asks, so call ``advance`` once time has passed. Watches are
    told within the call that changed something, in order, also if a receiver changes something itself.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.revision = 1
        self.incarnation = 1
        self.is_down = False
        self._clock = clock
        self._entries: dict[str, Entry] = {}
        self._history: list[Change] = []
        self._compacted = 0  # changes up to this revision are forgotten
        self._leases: dict[int, _Lease] = {}
        self._next_lease_id = 1
        self._watches: list[_MemoryWatch] = []
        self._pending: deque[tuple[_MemoryWatch, WatchItem]] = deque()
        self._is_telling = False

    def advance(self) -> None:
        """Ends the leases whose time is over and tells the watches."""
        if not self.is_down:
            for lease_id in [each for each, lease in self._leases.items() if lease.ends_at <= self._clock()]:
                self.end_lease(lease_id)
        self.tell()

    def stop(self) -> None:
        """Nobody reaches the server from now on; leases do not run out meanwhile."""
        self.advance()
        self.is_down = True
        self.tell()

    def resume(self) -> None:
        """The server is back with its data. As etcd does, it gives every lease its whole time again."""
        self.is_down = False
        for lease in self._leases.values():
            lease.ends_at = self._clock() + lease.ttl_s
        self.advance()

    def lose_data(self) -> None:
        """The server is empty, as if its disk had been replaced."""
        self.incarnation += 1
        self.revision, self._compacted = 1, 0
        self._entries.clear()
        self._history.clear()
        self._leases.clear()
        self.tell()

    def compact(self, revision: int) -> None:
        """Forgets the history up to ``revision``."""
        self._compacted = max(self._compacted, min(revision, self.revision))
        self._history = [change for change in self._history if change.revision > self._compacted]

    def entry(self, key: str) -> Entry | None:
        """The entry of a full key."""
        return self._entries.get(key)

    def entries(self, prefix: str) -> tuple[Entry, ...]:
        """All entries whose full keys begin with ``prefix``, by key."""
        return tuple(entry for key, entry in sorted(self._entries.items()) if key.startswith(prefix))

    def commit(self, guards: Mapping[str, int], puts: Iterable[Put], deletes: Iterable[str]) -> int | None:
        """Commit as Store does, with full keys."""
        puts = list(puts)
        for key, revision in guards.items():
            held = self._entries.get(key)
            if revision != (held.revision if held is not None else 0):
                return None
        if any(put.lease_id is not None and put.lease_id not in self._leases for put in puts):
            raise LeaseGoneError("the lease is gone")
        gone = [key for key in deletes if key in self._entries]
        if puts or gone:
            self.revision += 1
        for put in puts:
            self._write(put)
        for key in gone:
            self._remove(key)
        self.tell()
        return self.revision

    def grant(self, ttl_s: float) -> Lease:
        """A new lease."""
        lease_id, self._next_lease_id = self._next_lease_id, self._next_lease_id + 1
        granted_s = max(MIN_TTL_S, float(math.ceil(ttl_s)))
        self._leases[lease_id] = _Lease(granted_s, self._clock() + granted_s)
        return Lease(lease_id=lease_id, ttl_s=granted_s)

    def keep_alive(self, lease_id: int) -> float | None:
        """Renew a lease as Store does."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return None
        lease.ends_at = self._clock() + lease.ttl_s
        return lease.ttl_s

    def age(self, lease_id: int) -> float | None:
        """Return a lease's age as Store does."""
        lease = self._leases.get(lease_id)
        return None if lease is None else max(0.0, lease.ttl_s - (lease.ends_at - self._clock()))

    def end_lease(self, lease_id: int) -> bool:
        """Ends a lease and deletes its keys in one commit. False if it was gone."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return False
        if lease.keys:
            self.revision += 1
            for key in sorted(lease.keys):
                self._remove(key)
        self.tell()
        return True

    def changes_since(self, revision: int, prefix: str) -> list[Change] | None:
        """All changes after ``revision`` below a full prefix; None if they are forgotten."""
        if revision < self._compacted:
            return None
        return [change for change in self._history if change.revision > revision and change.key.startswith(prefix)]

    def attach(self, watch: _MemoryWatch) -> None:
        """Tells the watch from now on."""
        self._watches.append(watch)
        self.tell()

    def detach(self, watch: _MemoryWatch) -> None:
        """Tells the watch nothing more."""
        self._watches = [other for other in self._watches if other is not watch]

    def tell(self) -> None:
        """Hands every watch what it has not been told."""
        for watch in self._watches:
            self._pending.extend((watch, item) for item in watch.look())
        if self._is_telling:  # a receiver has changed something: the call around it goes on telling
            return
        self._is_telling = True
        try:
            while self._pending:
                watch, item = self._pending.popleft()
                watch.tell(item)
        finally:
            self._is_telling = False

    def _write(self, put: Put) -> None:
        held = self._entries.get(put.key)
        self._detach_lease(held)
        created = self.revision if held is None else held.created
        entry = Entry(key=put.key, value=put.value, revision=self.revision, created=created, lease_id=put.lease_id)
        self._entries[put.key] = entry
        if put.lease_id is not None:
            self._leases[put.lease_id].keys.add(put.key)
        self._history.append(Change(key=put.key, revision=self.revision, entry=entry))

    def _remove(self, key: str) -> None:
        self._detach_lease(self._entries.pop(key))
        self._history.append(Change(key=key, revision=self.revision, entry=None))

    def _detach_lease(self, entry: Entry | None) -> None:
        if entry is not None and entry.lease_id in self._leases:
            self._leases[entry.lease_id].keys.discard(entry.key)


class MemoryStore(Store):
    """One client of a MemoryServer. ``cut`` and ``mend`` are its cable."""

    def __init__(self, server: MemoryServer, namespace: str = "/unicron") -> None:
        check_namespace(namespace)
        self._server = server
        self._root = f"{namespace}/"
        self._incarnation = server.incarnation
        self._is_cut = False
        self._is_closed = False
        self._watches: list[_MemoryWatch] = []

    def cut(self) -> None:
        """This client no longer reaches the server; others do."""
        self._is_cut = True
        self._server.tell()

    def mend(self) -> None:
        """This client reaches the server again."""
        self._is_cut = False
        self._server.tell()

    def trouble(self) -> StoreClosedError | StoreUnreachableError | StoreReplacedError | None:
        """Why no call can be answered now; None if it can."""
        if self._is_closed:
            return StoreClosedError("this store was closed")
        if self._is_cut or self._server.is_down:
            return StoreUnreachableError("the store in memory cannot be reached")
        return StoreReplacedError(_LOST) if self._incarnation != self._server.incarnation else None

    def read(self, key: str, *, timeout_s: float | None = None) -> Reading:  # noqa: ARG002
        """Read as Store does."""
        check_key(key)
        self._begin()
        entry = self._server.entry(self._root + key)
        return Reading(revision=self._server.revision, entry=None if entry is None else self._own(entry))

    def read_prefix(self, prefix: str, *, without: str = "", timeout_s: float | None = None) -> Snapshot:  # noqa: ARG002
        """Read a prefix as Store does."""
        check_prefix(prefix)
        self._begin()
        seen = self.snapshot(prefix)
        if not without:
            return seen
        check_part(without, prefix)
        entries = tuple(entry for entry in seen.entries if not entry.key.startswith(without))
        return Snapshot(prefix=prefix, revision=seen.revision, entries=entries)

    def count(self, prefix: str, *, most: int, created_before: int = 0, timeout_s: float | None = None) -> int:  # noqa: ARG002
        """Count as Store does."""
        check_prefix(prefix)
        self._begin()
        older = [each for each in self.snapshot(prefix).entries if not 0 < created_before <= each.created]
        return min(most, len(older))

    def snapshot(self, prefix: str) -> Snapshot:
        """What is below the prefix, without asking whether it can be reached."""
        entries = tuple(self._own(entry) for entry in self._server.entries(self._root + prefix))
        return Snapshot(prefix=prefix, revision=self._server.revision, entries=entries)

    def changes_since(self, revision: int, prefix: str) -> list[Change] | None:
        """All changes after ``revision`` below a prefix; None if they are forgotten."""
        changes = self._server.changes_since(revision, self._root + prefix)
        return None if changes is None else [self._own_change(change) for change in changes]

    def commit(
        self,
        guards: Mapping[str, int],
        puts: Iterable[Put] = (),
        deletes: Iterable[str] = (),
        *,
        timeout_s: float | None = None,  # noqa: ARG002
    ) -> int | None:
        """Commit as Store does, with full keys."""
        puts, deletes = list(puts), list(deletes)
        check_commit(guards, puts, deletes)
        self._begin()
        return self._server.commit(
            {self._root + key: revision for key, revision in guards.items()},
            [Put(self._root + put.key, put.value, put.lease_id) for put in puts],
            [self._root + key for key in deletes],
        )

    def grant(self, ttl_s: float, *, timeout_s: float | None = None) -> Lease:  # noqa: ARG002
        """Grant a lease as Store does."""
        check_ttl(ttl_s)
        self._begin()
        return self._server.grant(ttl_s)

    def keep_alive(self, lease_id: int, *, timeout_s: float | None = None) -> float | None:  # noqa: ARG002
        """Renew a lease as Store does."""
        self._begin()
        return self._server.keep_alive(lease_id)

    def age(self, lease_id: int, *, timeout_s: float | None = None) -> float | None:  # noqa: ARG002
        """Return a lease's age as Store does."""
        self._begin()
        return self._server.age(lease_id)

    def revoke(self, lease_id: int, *, timeout_s: float | None = None) -> bool:  # noqa: ARG002
        """Revoke a lease as Store does."""
        self._begin()
        return self._server.end_lease(lease_id)

    def watch(self, snapshot: Snapshot, deliver: Deliver) -> Watch:
        """Watch as Store does."""
        check_prefix(snapshot.prefix)
        if self._is_closed:
            raise StoreClosedError("this store was closed")
        watch = _MemoryWatch(self, self._server, Follower(snapshot), deliver)
        self._watches.append(watch)
        self._server.attach(watch)
        return watch

    def close(self) -> None:
        """Close as Store does."""
        for watch in self._watches:
            watch.close()
        self._is_closed = True

    def _begin(self) -> None:
        self._server.advance()
        trouble = self.trouble()
        if trouble is not None:
            raise trouble

    def _own(self, entry: Entry) -> Entry:
        return Entry(
            key=entry.key.removeprefix(self._root),
            value=entry.value,
            revision=entry.revision,
            created=entry.created,
            lease_id=entry.lease_id,
        )

    def _own_change(self, change: Change) -> Change:
        entry = None if change.entry is None else self._own(change.entry)
        return Change(key=change.key.removeprefix(self._root), revision=change.revision, entry=entry)


class _MemoryWatch(Watch):
    def __init__(self, store: MemoryStore, server: MemoryServer, follower: Follower, deliver: Deliver) -> None:
        self._store = store
        self._server = server
        self._follower = follower
        self._deliver = deliver
        self._is_closed = False

    def look(self) -> list[WatchItem]:
        """What has to be told now."""
        follower, trouble = self._follower, self._store.trouble()
        if follower.is_over:
            return []
        if isinstance(trouble, StoreReplacedError):
            return follower.replaced(str(trouble))
        if trouble is not None:
            return follower.lost_sight(str(trouble), 0.0)
        items = []
        if follower.is_blind:
            items += follower.reached(self._store.snapshot(follower.prefix))
        changes = None if follower.knows_nothing else self._store.changes_since(follower.revision, follower.prefix)
        if changes is None:
            return items + follower.summed_up(self._store.snapshot(follower.prefix))
        return items + follower.moved(changes)

    def tell(self, item: WatchItem) -> None:
        """Delivers one item, unless the watch was closed meanwhile."""
        if not self._is_closed:
            self._deliver(item)

    def close(self) -> None:
        """Close as Store does."""
        self._is_closed = True
        self._server.detach(self)
