"""The store on etcd v3.

Needs the extra ``cluster``. gRPC does not survive a fork: a forked child finds every call refused with a
StoreClosedError, while its parent goes on undisturbed; programs that are started (not only forked) may use the store.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from unicron_elastic.rendezvous.store.address import StoreAddress
from unicron_elastic.rendezvous.store.connection import EtcdConnection, Rpc
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
    Watch,
    check_commit,
    check_key,
    check_namespace,
    check_part,
    check_prefix,
    check_ttl,
    is_reserved,
)
from unicron_elastic.rendezvous.store.library import messages
from unicron_elastic.rendezvous.store.watch import EtcdWatch, WatchView

DEFAULT_TIMEOUT_S = 5.0
DEFAULT_BLIND_AFTER_S = 3.0
_DELETE = 1  # mvccpb.Event.DELETE

_GRANT = Rpc("Lease/LeaseGrant", messages.LeaseGrantRequest, messages.LeaseGrantResponse)
_TIME_TO_LIVE = Rpc("Lease/LeaseTimeToLive", messages.LeaseTimeToLiveRequest, messages.LeaseTimeToLiveResponse)
_REVOKE = Rpc("Lease/LeaseRevoke", messages.LeaseRevokeRequest, messages.LeaseRevokeResponse)
# A stream in etcd's protocol; one request and one answer look the same on the wire, and have a deadline.
_KEEP_ALIVE = Rpc("Lease/LeaseKeepAlive", messages.LeaseKeepAliveRequest, messages.LeaseKeepAliveResponse)


class EtcdStore(Store):
    """A namespace of an etcd cluster. Opens nothing before the first call; safe from any thread.

    ``timeout_s`` bounds calls that name no limit of their own. A watch counts as blind once nothing was heard of its
    server for ``blind_after_s``. Raises ValueError for what cannot be right.
    """

    def __init__(
        self,
        address: StoreAddress,
        namespace: str = "/unicron",
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        blind_after_s: float = DEFAULT_BLIND_AFTER_S,
    ) -> None:
        check_namespace(namespace)
        if timeout_s <= 0 or blind_after_s <= 0:
            raise ValueError(f"time limits must be more than 0 seconds, not {timeout_s} and {blind_after_s}")
        self._root = f"{namespace}/"
        self._timeout_s = timeout_s
        self._blind_after_s = blind_after_s
        self._connection = EtcdConnection(address, self._root)
        self._watches: list[EtcdWatch] = []

    def read(self, key: str, *, timeout_s: float | None = None) -> Reading:
        """Read as Store says."""
        check_key(key)
        revision, kvs = self._range(messages.RangeRequest(key=self._full(key)), self._limit(timeout_s))
        return Reading(revision=revision, entry=self._entry(kvs[0]) if kvs else None)

    def read_prefix(self, prefix: str, *, without: str = "", timeout_s: float | None = None) -> Snapshot:
        """Read a prefix as Store says."""
        check_prefix(prefix)
        first, limit_s = self._full(prefix), self._limit(timeout_s)
        end = _end(first)
        if not without:
            revision, kvs = self._range(messages.RangeRequest(key=first, range_end=end), limit_s)
        else:
            check_part(without, prefix)
            left_out = self._full(without)
            revision, before = self._range(messages.RangeRequest(key=first, range_end=left_out), limit_s)
            rest = messages.RangeRequest(key=_end(left_out), range_end=end, revision=revision)
            kvs = [*before, *self._range(rest, limit_s)[1]]
        entries = tuple(entry for entry in map(self._entry, kvs) if not is_reserved(entry.key))
        return Snapshot(prefix=prefix, revision=revision, entries=entries)

    def count(self, prefix: str, *, most: int, created_before: int = 0, timeout_s: float | None = None) -> int:
        """Count as Store says."""
        check_prefix(prefix)
        first = self._full(prefix)
        request = messages.RangeRequest(
            key=first,
            range_end=_end(first),
            limit=most,
            keys_only=True,
            max_create_revision=max(0, created_before - 1),
        )
        return len(self._range(request, self._limit(timeout_s))[1])

    def commit(
        self,
        guards: Mapping[str, int],
        puts: Iterable[Put] = (),
        deletes: Iterable[str] = (),
        *,
        timeout_s: float | None = None,
    ) -> int | None:
        """Commit as Store says."""
        puts, deletes = list(puts), list(deletes)
        check_commit(guards, puts, deletes)
        compare = [
            messages.Compare(key=self._full(key), target="MOD", result="EQUAL", mod_revision=revision)
            for key, revision in guards.items()
        ]
        operations = [messages.RequestOp(request_put=self._put_request(put)) for put in puts]
        for key in deletes:
            request = messages.DeleteRangeRequest(key=self._full(key))
            operations.append(messages.RequestOp(request_delete_range=request))
        is_write = bool(operations)
        if not is_write:  # a transaction that only reads is none for etcd 3.5.1, see EtcdConnection.read
            nothing = messages.DeleteRangeRequest(key=self._full(".nothing"))
            operations.append(messages.RequestOp(request_delete_range=nothing))
        answer = self._connection.transact(compare, operations, self._limit(timeout_s), is_write=is_write)
        return None if answer is None else int(answer.header.revision)

    def grant(self, ttl_s: float, *, timeout_s: float | None = None) -> Lease:
        """Grant as Store says. If an answer is lost, a lease that nobody knows runs out by itself."""
        check_ttl(ttl_s)
        request = messages.LeaseGrantRequest(TTL=math.ceil(ttl_s))
        answer = self._connection.call(_GRANT, request, self._limit(timeout_s))
        return Lease(lease_id=answer.ID, ttl_s=float(answer.TTL))

    def keep_alive(self, lease_id: int, *, timeout_s: float | None = None) -> float | None:
        """Renew a lease as Store says."""
        request = messages.LeaseKeepAliveRequest(ID=lease_id)
        answer = self._connection.call(_KEEP_ALIVE, request, self._limit(timeout_s))
        return float(answer.TTL) if answer.TTL > 0 else None

    def age(self, lease_id: int, *, timeout_s: float | None = None) -> float | None:
        """Return a lease's age as Store says: it seems younger if etcd has changed its leader since."""
        request = messages.LeaseTimeToLiveRequest(ID=lease_id)
        answer = self._connection.call(_TIME_TO_LIVE, request, self._limit(timeout_s))
        return None if answer.TTL <= 0 else max(0.0, float(answer.grantedTTL - answer.TTL - 1))  # both are cut down

    def revoke(self, lease_id: int, *, timeout_s: float | None = None) -> bool:
        """Revoke a lease as Store says."""
        try:
            self._connection.call(_REVOKE, messages.LeaseRevokeRequest(ID=lease_id), self._limit(timeout_s))
        except LeaseGoneError:
            return False
        return True

    def watch(self, snapshot: Snapshot, deliver: Deliver) -> Watch:
        """Watch as Store says."""
        check_prefix(snapshot.prefix)
        self._connection.check_open()
        first = self._full(snapshot.prefix)

        def read(timeout_s: float) -> Snapshot:
            return self.read_prefix(snapshot.prefix, timeout_s=timeout_s)

        watch = EtcdWatch(
            self._connection,
            WatchView(first, _end(first), read, self._change),
            Follower(snapshot),
            deliver,
            timeout_s=min(self._timeout_s, self._blind_after_s),
            blind_after_s=self._blind_after_s,
        )
        self._watches = [*(other for other in self._watches if other.is_running), watch]
        watch.start()
        return watch

    def close(self) -> None:
        """Close as Store says."""
        self._connection.close()  # first, so that no watch waits for an answer any more
        for watch in self._watches:
            watch.close()

    def _limit(self, timeout_s: float | None) -> float:
        if timeout_s is not None and timeout_s <= 0:
            raise ValueError(f"a time limit must be more than 0 seconds, not {timeout_s}")
        return self._timeout_s if timeout_s is None else timeout_s

    def _range(self, request: Any, timeout_s: float) -> tuple[int, Any]:
        answer = self._connection.read(request, timeout_s)
        return int(answer.header.revision), answer.kvs

    def _full(self, key: str) -> bytes:
        return (self._root + key).encode()

    def _put_request(self, put: Put) -> Any:
        return messages.PutRequest(key=self._full(put.key), value=put.value, lease=put.lease_id or 0)

    def _entry(self, kv: Any) -> Entry:
        return Entry(
            key=kv.key.decode(errors="replace").removeprefix(self._root),
            value=kv.value,
            revision=kv.mod_revision,
            created=kv.create_revision,
            lease_id=kv.lease or None,
        )

    def _change(self, event: Any) -> Change | None:
        entry = self._entry(event.kv)
        if is_reserved(entry.key):
            return None
        return Change(key=entry.key, revision=entry.revision, entry=None if event.type == _DELETE else entry)


def _end(first: bytes) -> bytes:
    """The key after all that begin with ``first``, which is text and so ends in no 0xff."""
    return first[:-1] + bytes([first[-1] + 1])
