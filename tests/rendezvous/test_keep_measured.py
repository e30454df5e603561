"""What several agents keep in one key, each with what the others wrote, against a real etcd."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator

import pytest

from unicron_elastic.membership.rounds import JobMember
from unicron_elastic.rendezvous.job.presence import JobPresence
from unicron_elastic.rendezvous.records.job import JobKeys
from unicron_elastic.rendezvous.records.plan_keys import PlannedJobKeys
from unicron_elastic.rendezvous.store.address import StoreAddress
from unicron_elastic.rendezvous.store.etcd import EtcdStore
from unicron_elastic.rendezvous.store.server import EmbeddedEtcd

DEADLINE_S = 30.0
KEY = PlannedJobKeys("chat").measured


@pytest.fixture
def open_store(shared_etcd: EmbeddedEtcd) -> Callable[[], EtcdStore]:
    namespace = f"/test/{uuid.uuid4().hex}"
    return lambda: EtcdStore(StoreAddress.parse(shared_etcd.endpoint), namespace)


@pytest.fixture
def presences(open_store: Callable[[], EtcdStore]) -> Iterator[list[JobPresence]]:
    made = []
    for host in "ab":
        made.append(JobPresence(open_store, JobKeys("job"), lease_ttl_s=10.0))
        made[-1].join(JobMember(node_id=f"{host}/1", host=host), timeout_s=DEADLINE_S)
    yield made
    for presence in made:
        presence.leave()


def test_what_another_writes_meanwhile_is_merged_with(presences: list[JobPresence]) -> None:
    first, second = presences
    seen: list[bytes | None] = []

    def merge(before: bytes | None) -> bytes:
        seen.append(before)
        if len(seen) == 1:
            assert second.keep(KEY, lambda text: (text or b"") + b"second ")
        return (before or b"") + b"first "

    assert first.keep(KEY, merge)
    assert seen == [None, b"second "]
    assert first.keep(KEY, lambda text: seen.append(text) or b"over")  # type: ignore[func-returns-value]
    assert seen[-1] == b"second first "


def test_nothing_is_lost_when_both_write(presences: list[JobPresence]) -> None:
    def write(presence: JobPresence, letter: bytes) -> None:
        for _ in range(20):
            while not presence.keep(KEY, lambda text: (text or b"") + letter):
                pass

    threads = [threading.Thread(target=write, args=each) for each in zip(presences, (b"a", b"b"), strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    seen: list[bytes | None] = []
    assert presences[0].keep(KEY, lambda text: seen.append(text) or b"over")  # type: ignore[func-returns-value]
    assert sorted((seen[0] or b"").decode()) == ["a"] * 20 + ["b"] * 20


def test_it_outlives_the_job(presences: list[JobPresence], open_store: Callable[[], EtcdStore]) -> None:
    assert presences[0].keep(KEY, lambda _: b"kept")
    for presence in presences:
        presence.leave()
    with open_store() as store:
        entry = store.read(KEY).entry
        assert entry is not None
        assert (entry.value, entry.lease_id) == (b"kept", None)


def test_what_goes_with_a_job_that_is_over_still_goes_when_more_is_measured(
    presences: list[JobPresence], open_store: Callable[[], EtcdStore]
) -> None:
    with open_store() as store:
        lease = store.grant(60.0)
        store.put(KEY, b"before", lease.lease_id)
        assert presences[0].keep(KEY, lambda text: (text or b"") + b" after")
        entry = store.read(KEY).entry
        assert entry is not None
        assert (entry.value, entry.lease_id) == (b"before after", lease.lease_id)
        store.revoke(lease.lease_id)
        assert store.read(KEY).entry is None


def test_who_always_comes_late_and_who_has_left_write_nothing(presences: list[JobPresence]) -> None:
    first, second = presences

    def overtaken(_: bytes | None) -> bytes:
        assert second.keep(KEY, lambda text: (text or b"") + b".")
        return b"never"

    assert not first.keep(KEY, overtaken)
    first.leave()
    assert not first.keep(KEY, lambda _: b"never")
