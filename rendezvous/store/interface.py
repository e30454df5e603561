"""What the cluster asks of the store in which its truth is kept, sorted by what each call guarantees.

Losing a race is an answer, never an exception. Trouble with the store itself is a StoreError:

StoreError
 +-- StoreUnreachableError   no server answered, and nothing was changed
 +-- StoreUnclearError       the answer to a write was lost: it may have been done or not
 +-- StoreDeniedError        the server knows the user or the password not, or forbids the key to them
 +-- StoreRefusedError       the server answers that it cannot, because its disk is full for example
 +-- StoreReplacedError      another store answers in the place of the one that this object knew, or the same without
 |                           its data; final for the object
 +-- StoreClosedError        the object was closed, or belongs to the process that this one was forked from

The texts are one sentence without a full stop. What the caller did wrong is a ValueError.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType

MAX_OPERATIONS = 100  # guards, puts and deletes of one commit; etcd allows 128 of each unless it is told otherwise
MAX_COMMIT_BYTES = 1_000_000  # keys and values of one commit; etcd takes 1.5 MiB with all that is around them
_MAX_KEY_BYTES = 512
_MAX_TTL_S = 86_400.0
_UPDATE_ATTEMPTS = 10  # to be the first, while others change the same key


class StoreError(Exception):
    """The store cannot be used as it should be; the text names it and says what is wrong."""


class StoreUnreachableError(StoreError):
    """No server answered in time, or none has a quorum. Nothing was changed."""


class StoreUnclearError(StoreError):
    """A write was sent and its answer lost: read to learn whether it was done. Only writes raise it."""


class StoreDeniedError(StoreError):
    """The server does not let this user in, or not to this key."""


class StoreRefusedError(StoreError):
    """The server answered that it cannot do it; nothing was changed."""


class StoreReplacedError(StoreError):
    """The data that this object knew is gone, so that its revisions mean nothing. Open another one, and begin anew."""


class StoreClosedError(StoreError):
    """The object was closed, or was made by the process that this one was forked from."""


class LeaseGoneError(Exception):
    """A put named a lease that has run out or was revoked; nothing was changed. No StoreError: the store is well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A key as it was at one revision of the store."""

    key: str
    value: bytes
    revision: int  # of the last change of the key
    created: int  # revision at which the key came into being
    lease_id: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one key held at ``revision`` of the store; no entry if it did not exist."""

    revision: int
    entry: Entry | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All keys that begin with ``prefix`` as they were at one revision of the store, sorted by key."""

    prefix: str
    revision: int
    entries: tuple[Entry, ...]

    @classmethod
    def of_nothing(cls, prefix: str) -> Snapshot:
        """What somebody knows who never looked: a watch from here first tells of everything that exists."""
        return cls(prefix=prefix, revision=0, entries=())

    def under(self, prefix: str) -> Snapshot:
        """Return what of it begins with this ``prefix``, which begins with its own, as it was at the same revision."""
        entries = tuple(entry for entry in self.entries if entry.key.startswith(prefix))
        return Snapshot(prefix=prefix, revision=self.revision, entries=entries)

    def get(self, key: str) -> Entry | None:
        """The entry of ``key``; None if it did not exist."""
        return next((entry for entry in self.entries if entry.key == key), None)


@dataclass(frozen=True, slots=True)
class Put:
    """A key to write in a commit; it goes when its lease goes."""

    key: str
    value: bytes
    lease_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """A write is what an update commits, if the keys of ``guards`` were last changed at these revisions."""

    puts: tuple[Put, ...] = ()
    deletes: tuple[str, ...] = ()
    guards: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A promise to be alive: its keys go when it was not kept alive for ``ttl_s``, which the server may have raised."""

    lease_id: int
    ttl_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A key was written, or deleted if there is no entry."""

    key: str
    revision: int
    entry: Entry | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What one commit changed below the watched prefix, whole and in the order of revisions.

    A summary stands for several commits whose history the store no longer has: the difference between what was told
    before and ``revision``. Keys that came and went in between are not in it, and its deletions bear its own revision.
    """

    revision: int
    changes: tuple[Change, ...]
    is_summary: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Blind:
    """The store cannot be reached: what was told may be out of date from now on."""

    reason: str
    silent_s: float  # since when nothing had been heard of the store


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighted:
    """Sight returned, and everything missed meanwhile has been told before this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """The watched data is gone or is another store's. The last item of a watch."""

    reason: str


WatchItem = Changes | Blind | Sighted | Replaced
Deliver = Callable[[WatchItem], None]


class Watch(ABC):
    """A running watch."""

    @abstractmethod
    def close(self) -> None:
        """Ends it: nothing is delivered once this has returned. Does nothing the second time."""


class Store(ABC):
    """Keys and values below a namespace of the constructor's, with one revision that grows with every commit.

    Every call may raise StoreError, ends within ``timeout_s`` seconds (None: the object's own limit) and sends no
    write twice. Keys and prefixes that do not fit raise ValueError.
    """

    # Snapshots: all of one revision, and not older than the last commit that anybody was told of.

    @abstractmethod
    def read(self, key: str, *, timeout_s: float | None = None) -> Reading:
        """One key."""

    @abstractmethod
    def read_prefix(self, prefix: str, *, without: str = "", timeout_s: float | None = None) -> Snapshot:
        """All keys that begin with ``prefix``, which may be empty, but for those that begin with ``without``."""

    @abstractmethod
    def count(self, prefix: str, *, most: int, created_before: int = 0, timeout_s: float | None = None) -> int:
        """Count the keys that begin with ``prefix``, up to ``most``: of those before a revision, if one is given."""

    # Atomic: all or nothing. A lost race changes nothing and is None.

    @abstractmethod
    def commit(
        self,
        guards: Mapping[str, int],
        puts: Iterable[Put] = (),
        deletes: Iterable[str] = (),
        *,
        timeout_s: float | None = None,
    ) -> int | None:
        """Does all ``puts`` and ``deletes`` if every key of ``guards`` was last changed at the revision given for it.

        Revision 0 means that the key must not exist. Guarding a write by a leader's key fences it: a leader that has
        been replaced changes nothing any more. Returns the store's revision, or None if a guard did not hold. Raises
        LeaseGoneError.
        """

    def create(
        self, key: str, value: bytes, lease_id: int | None = None, *, timeout_s: float | None = None
    ) -> int | None:
        """Writes a key that must not exist. Returns its revision, or None if it exists. Raises LeaseGoneError."""
        return self.commit({key: 0}, [Put(key, value, lease_id)], timeout_s=timeout_s)

    def compare_and_set(
        self, key: str, value: bytes, revision: int, lease_id: int | None = None, *, timeout_s: float | None = None
    ) -> int | None:
        """Writes a key that was last changed at ``revision``; 0: that does not exist.

        Returns its new revision, or None if somebody was faster. Raises LeaseGoneError.
        """
        return self.commit({key: revision}, [Put(key, value, lease_id)], timeout_s=timeout_s)

    def update(
        self,
        key: str,
        change: Callable[[Entry | None], Write | None],
        *,
        what: str = "",
        timeout_s: float | None = None,
    ) -> bool:
        """Commits what ``change`` makes of what the key holds, and asks it anew as long as somebody else is faster.

        ``change`` returns None to leave all as it is; what it raises goes through. All attempts together end within
        ``timeout_s``. Returns whether something was written. Raises LeaseGoneError, and StoreError with ``what`` the
        key is if others change it all the time.
        """
        ends_at = None if timeout_s is None else time.monotonic() + timeout_s
        for _ in range(_UPDATE_ATTEMPTS):
            entry = self.read(key, timeout_s=_left(ends_at)).entry
            write = change(entry)
            if write is None:
                return False
            guards = {key: 0 if entry is None else entry.revision, **write.guards}
            if self.commit(guards, write.puts, write.deletes, timeout_s=_left(ends_at)) is not None:
                return True
        raise StoreError(f"others change {what or key} all the time; try again")

    # Leases: the server counts their time.

    @abstractmethod
    def grant(self, ttl_s: float, *, timeout_s: float | None = None) -> Lease:
        """A new lease of at least ``ttl_s`` seconds; look at what was granted."""

    @abstractmethod
    def keep_alive(self, lease_id: int, *, timeout_s: float | None = None) -> float | None:
        """Begins the lease's time anew. Returns the seconds it has from now on; None if it is gone."""

    @abstractmethod
    def age(self, lease_id: int, *, timeout_s: float | None = None) -> float | None:
        """Seconds since a lease was granted or last kept alive, and never more than that. None if it is gone."""

    @abstractmethod
    def revoke(self, lease_id: int, *, timeout_s: float | None = None) -> bool:
        """Ends the lease and deletes its keys. False if it was gone already."""

    # Unconditional: the last one to write wins.

    def put(self, key: str, value: bytes, lease_id: int | None = None, *, timeout_s: float | None = None) -> int:
        """Writes a key, whatever it holds, and returns its revision. Raises LeaseGoneError."""
        revision = self.commit({}, [Put(key, value, lease_id)], timeout_s=timeout_s)
        assert revision is not None
        return revision

    def delete(self, key: str, *, timeout_s: float | None = None) -> None:
        """Deletes a key, if it exists."""
        self.commit({}, deletes=[key], timeout_s=timeout_s)

    # Best effort: for what may be lost.

    def try_put(self, key: str, value: bytes, lease_id: int | None = None, *, timeout_s: float | None = None) -> bool:
        """Writes a key if that is possible now. Whether it surely was; raises neither StoreError nor LeaseGoneError."""
        try:
            self.put(key, value, lease_id, timeout_s=timeout_s)
        except (StoreError, LeaseGoneError):
            return False
        return True

    # Watching: every change once, in order, whatever happens to connections and servers.

    @abstractmethod
    def watch(self, snapshot: Snapshot, deliver: Deliver) -> Watch:
        """Tells ``deliver`` of all that changes below the snapshot's prefix after its revision.

        Returns at once and counts as sighted until it says Blind. ``deliver`` is called from one thread at a time, and
        should hand the item over to the thread that owns the state: while it runs, no other item is told.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends all watches and frees the connections. Does nothing the second time."""

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _left(ends_at: float | None) -> float | None:
    """Return the seconds until then; never nothing, so that a call that is late says itself what is wrong."""
    return None if ends_at is None else max(0.05, ends_at - time.monotonic())


def check_key(key: str) -> None:
    """Raises ValueError if no key can be called so."""
    if not key or not key.isprintable() or len(key.encode()) > _MAX_KEY_BYTES:
        raise ValueError(f"a key must be 1 to {_MAX_KEY_BYTES} bytes of printable text, not {key[:80]!a}")
    if is_reserved(key):
        raise ValueError(f"a key must not begin with a dot, as {key[:80]!a} does: those are the store's own")


def check_prefix(prefix: str) -> None:
    """Raises ValueError if no key can begin so."""
    if prefix:
        check_key(prefix)


def check_part(part: str, prefix: str) -> None:
    """Raises ValueError unless keys that begin with ``part`` begin with the ``prefix``, and not the other way round."""
    check_key(part)
    if part == prefix or not part.startswith(prefix):
        raise ValueError(f"{part!a} is no part of {prefix!a}")


def is_reserved(key: str) -> bool:
    """Whether the store keeps the key for itself."""
    return key.startswith(".")


def check_namespace(namespace: str) -> None:
    """Raises ValueError unless ``namespace`` is an absolute path such as /unicron/main."""
    if not namespace.startswith("/") or namespace.endswith("/") or not namespace.isprintable():
        raise ValueError(f"a namespace must be a path such as /unicron/main, without a / at its end, not {namespace!a}")


def check_ttl(ttl_s: float) -> None:
    """Raises ValueError unless ``ttl_s`` is more than 0 seconds and at most a day."""
    if not 0 < ttl_s <= _MAX_TTL_S:
        raise ValueError(f"a lease must last more than 0 and at most {_MAX_TTL_S:.0f} seconds, not {ttl_s}")


def check_commit(guards: Mapping[str, int], puts: Iterable[Put], deletes: Iterable[str]) -> None:
    """Raises ValueError if no store would take such a commit."""
    written = [*(put.key for put in puts), *deletes]
    for key in (*guards, *written):
        check_key(key)
    if len(set(written)) != len(written):
        twice = next(key for key in written if written.count(key) > 1)
        raise ValueError(f"a commit can write or delete a key once, not twice, as {twice!a} here")
    if max(len(guards), len(written)) > MAX_OPERATIONS:
        raise ValueError(
            f"a commit has at most {MAX_OPERATIONS} guards and as many writes, not {len(guards)} and {len(written)}"
        )
    if any(put.lease_id is not None and put.lease_id <= 0 for put in puts):
        raise ValueError("a lease's id must be more than 0; None means that a key has no lease")
    if any(revision < 0 for revision in guards.values()):
        raise ValueError("a guard's revision must not be negative; 0 means that the key does not exist")
    size = sum(len(key.encode()) for key in (*guards, *written)) + sum(len(put.value) for put in puts)
    if size > MAX_COMMIT_BYTES:
        raise ValueError(f"a commit has at most {MAX_COMMIT_BYTES} bytes of keys and values, not {size}")
