"""The store in memory answers as a real etcd does, whatever is asked of it."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_lab import Told

from unicron_elastic.rendezvous.store.address import StoreAddress
from unicron_elastic.rendezvous.store.etcd import EtcdStore
from unicron_elastic.rendezvous.store.interface import Changes, Entry, LeaseGoneError, Put, Store
from unicron_elastic.rendezvous.store.server import EmbeddedEtcd
from unicron_elastic.testing.memory_store import MemoryServer, MemoryStore

KEYS = st.sampled_from(["a", "a/1", "a/2", "b"])
VALUES = st.binary(max_size=3)
AGES = st.integers(0, 4)  # how many revisions ago
LEASES = st.one_of(st.none(), st.integers(0, 2))  # none, or the how manieth that was granted

OPERATIONS = st.one_of(
    st.tuples(st.just("put"), KEYS, VALUES, LEASES),
    st.tuples(st.just("create"), KEYS, VALUES, LEASES),
    st.tuples(st.just("delete"), KEYS),
    st.tuples(st.just("set"), KEYS, VALUES, AGES),
    st.tuples(
        st.just("commit"),
        st.dictionaries(KEYS, AGES, max_size=2),
        st.lists(st.tuples(KEYS, VALUES, LEASES), max_size=2, unique_by=lambda put: put[0]),
        st.lists(KEYS, max_size=2, unique=True),
    ),
    st.tuples(st.just("grant")),
    st.tuples(st.just("revoke"), st.integers(0, 2)),
    st.tuples(st.just("keep_alive"), st.integers(0, 2)),
    st.tuples(st.just("read"), KEYS),
    st.tuples(st.just("read_prefix"), st.sampled_from(["", "a", "a/"])),
)


class Player:
    """Does operations on one store and tells the answers so that those of two stores can be compared."""

    def __init__(self, store: Store) -> None:
        self.told = Told()
        self._store = store
        for _revision in range(5):  # so that none of the ages that are asked for reaches back to revision 0
            self._base = store.put("marker", b"")
        self._newest = self._base
        self._leases: list[int] = []
        self._watch = store.watch(store.read_prefix(""), self.told)

    def play(self, operation: tuple[Any, ...]) -> object:
        """The answer."""
        name, *arguments = operation
        try:
            method: Callable[..., object] = getattr(self, f"_{name}")
            return method(*arguments)
        except LeaseGoneError:
            return "lease gone"
        except ValueError as error:
            return str(error)

    def end(self) -> object:
        """Everything that the watch told."""
        self._store.put("marker", b"end")
        self.told.wait(lambda: self.told.keys[-1:] == ["marker"])
        self._watch.close()
        return [
            (
                self._number(item.revision),
                item.is_summary,
                [(each.key, self._plain(each.entry)) for each in item.changes],
            )
            for item in self.told.items
            if isinstance(item, Changes)
        ]

    def _put(self, key: str, value: bytes, lease: int | None) -> object:
        return self._number(self._store.put(key, value, self._lease(lease)))

    def _create(self, key: str, value: bytes, lease: int | None) -> object:
        return self._number(self._store.create(key, value, self._lease(lease)))

    def _delete(self, key: str) -> object:
        return self._store.delete(key)  # type: ignore[func-returns-value]

    def _set(self, key: str, value: bytes, age: int) -> object:
        return self._number(self._store.compare_and_set(key, value, self._revision(age)))

    def _commit(self, guards: dict[str, int], puts: list[tuple[str, bytes, int | None]], deletes: list[str]) -> object:
        dated = {key: self._revision(age) for key, age in guards.items()}
        leased = [Put(key, value, self._lease(lease)) for key, value, lease in puts]
        return self._number(self._store.commit(dated, leased, deletes))

    def _grant(self) -> object:
        lease = self._store.grant(3600)
        self._leases.append(lease.lease_id)
        return lease.ttl_s

    def _revoke(self, lease: int) -> object:
        return self._store.revoke(self._lease(lease) or 1)

    def _keep_alive(self, lease: int) -> object:
        return self._store.keep_alive(self._lease(lease) or 1)

    def _read(self, key: str) -> object:
        reading = self._store.read(key)
        return self._number(reading.revision), self._plain(reading.entry)

    def _read_prefix(self, prefix: str) -> object:
        snapshot = self._store.read_prefix(prefix)
        return self._number(snapshot.revision), [self._plain(entry) for entry in snapshot.entries]

    def _lease(self, number: int | None) -> int | None:
        if number is None:
            return None
        return self._leases[number] if number < len(self._leases) else 987_654_321

    def _revision(self, age: int) -> int:
        return 0 if age == 4 else self._newest - age

    def _number(self, revision: int | None) -> int | None:
        if revision is not None:
            self._newest = max(self._newest, revision)
        return None if revision is None else revision - self._base

    def _plain(self, entry: Entry | None) -> object:
        if entry is None:
            return None
        lease = None if entry.lease_id is None else self._leases.index(entry.lease_id)
        return entry.key, entry.value, entry.revision - self._base, entry.created - self._base, lease


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=st.lists(OPERATIONS, max_size=25))
def test_memory_and_etcd_give_the_same_answers(server: EmbeddedEtcd, operations: list[tuple[Any, ...]]) -> None:
    # A server of its own: revisions count for all of one, and leases that other tests left to end would add to them.
    namespace = f"/{uuid.uuid4().hex}"
    with EtcdStore(StoreAddress.parse(server.endpoint), namespace) as etcd:
        memory = MemoryStore(MemoryServer(lambda: 0.0), namespace)
        real, fake = Player(etcd), Player(memory)
        for operation in operations:
            assert fake.play(operation) == real.play(operation), operation
        assert fake.end() == real.end()
