"""Time that passed for nobody counts for nobody: whose lease ran out while all stood is waited for, not lost."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_elastic.membership.rounds import JobMember, Place, Round
from unicron_elastic.rendezvous.job.presence import JobPresence
from unicron_elastic.rendezvous.records.job import JobKeys
from unicron_elastic.rendezvous.store.address import StoreAddress
from unicron_elastic.rendezvous.store.attention import Attention
from unicron_elastic.rendezvous.store.etcd import EtcdStore
from unicron_elastic.rendezvous.store.server import EmbeddedEtcd

TTL_S, BEAT_S, GRACE_S = 3.0, 1.0, 8.0
DEADLINE_S = 30.0
ROUND = Round(number=1, places=(Place("a/1", "a"), Place("b/1", "b")))


@given(pause_s=st.floats(0.0, 100.0), mine_ago_s=st.floats(0.0, BEAT_S), others_ago_s=st.floats(0.0, BEAT_S))
def test_whoever_could_lose_its_lease_by_a_pause_of_all_is_waited_for(
    pause_s: float, mine_ago_s: float, others_ago_s: float
) -> None:
    mine, stopped_at = Attention(BEAT_S, GRACE_S), 100.0
    mine.kept(stopped_at - mine_ago_s)
    now = stopped_at + pause_s
    if pause_s + others_ago_s > TTL_S:  # the other's lease has run out, which it will mend as soon as it runs
        assert mine.is_back(now)
        mine.kept(now)
        assert mine.is_back(now + GRACE_S)


@given(late_s=st.lists(st.floats(0.0, 0.99 * BEAT_S), max_size=30))
def test_who_beats_in_time_takes_silence_for_what_it_is(late_s: list[float]) -> None:
    mine, now = Attention(BEAT_S, GRACE_S), 100.0
    assert not mine.is_back(now)
    for each in late_s:
        now += BEAT_S + each
        assert not mine.is_back(now)
        mine.kept(now)
    assert not mine.is_back(now + BEAT_S)


def test_a_store_that_lost_its_data_is_told_again() -> None:
    mine = Attention(BEAT_S, GRACE_S)
    mine.kept(100.0)
    mine.broke(100.5)
    mine.kept(101.0)
    assert mine.is_back(101.5)
    for second in range(102, 110):
        mine.kept(float(second))
    assert not mine.is_back(109.5)


class SlowStore(EtcdStore):
    """A store in which a lease cannot be kept alive while ``stands`` is set."""

    stands = threading.Event()

    def keep_alive(self, lease_id: int) -> float | None:
        """Keeps it alive as soon as all go on."""
        while self.stands.is_set():
            time.sleep(0.01)
        return super().keep_alive(lease_id)


class Lab:
    """Members of one job, each with its kind of store, on one etcd."""

    def __init__(self, etcd: EmbeddedEtcd) -> None:
        self._address = StoreAddress.parse(etcd.endpoint)
        self._namespace = f"/test/{uuid.uuid4().hex}"
        self.made: list[JobPresence] = []

    def open(self, kind: type[EtcdStore] = EtcdStore) -> EtcdStore:
        """A store of all of them."""
        return kind(self._address, self._namespace)

    def join(self, host: str, kind: type[EtcdStore] = EtcdStore) -> JobPresence:
        """One more, which all have seen."""
        self.made.append(JobPresence(lambda: self.open(kind), JobKeys("job"), lease_ttl_s=1.0))
        self.made[-1].join(JobMember(node_id=f"{host}/1", host=host), timeout_s=DEADLINE_S)
        until(lambda: all(len(each.view().members) == len(self.made) for each in self.made))
        return self.made[-1]

    def end_lease(self, host: str) -> None:
        """Ends the lease of one, as etcd does when time has passed; on a slow machine it has done so already."""
        with self.open() as store:
            entry = store.read(JobKeys("job").member(f"{host}/1")).entry
            if entry is not None:
                assert entry.lease_id is not None
                store.revoke(entry.lease_id)


@pytest.fixture
def lab(shared_etcd: EmbeddedEtcd) -> Iterator[Lab]:
    made = Lab(shared_etcd)
    yield made
    SlowStore.stands.clear()
    for presence in made.made:
        presence.leave()


def until(is_true: Callable[[], object]) -> None:
    """Waits for it."""
    end = time.monotonic() + DEADLINE_S
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.002)


def _missing(presence: JobPresence) -> list[Place]:
    """Those of the round whom it takes for lost."""
    unheard = presence.unheard(ROUND)
    there = {member.node_id for member in presence.view().members}
    return [place for place in ROUND.places if place.node_id not in there and place not in unheard]


@pytest.mark.parametrize("goes_on", ["before it is noticed", "after it was noticed"])
def test_whose_lease_ran_out_while_all_stood_is_not_lost(lab: Lab, goes_on: str) -> None:
    mine = lab.join("a", SlowStore)
    lab.join("b", SlowStore)
    looks: list[tuple[set[str], list[Place]]] = []
    mine.on_change = lambda: looks.append(({member.node_id for member in mine.view().members}, _missing(mine)))
    joined = next(member.joined for member in mine.view().members if member.node_id == "b/1")
    SlowStore.stands.set()
    time.sleep(0.8)  # more than two beats, and less than a lease
    if goes_on.startswith("before"):
        SlowStore.stands.clear()
        time.sleep(0.3)
    lab.end_lease("b")
    if goes_on.startswith("after"):
        until(lambda: any("b/1" not in there for there, _ in looks))
    SlowStore.stands.clear()
    until(lambda: any(each.node_id == "b/1" and each.joined > joined for each in mine.view().members))
    assert all(missing == [] for _, missing in looks)
    assert _missing(mine) == []


def test_who_goes_while_others_beat_in_time_is_missed(lab: Lab) -> None:
    mine = lab.join("a")
    lab.join("b").leave()
    until(lambda: _missing(mine) == [ROUND.places[1]])


def test_who_was_removed_is_lost_although_all_stood(lab: Lab) -> None:
    mine, other = lab.join("a", SlowStore), lab.join("b")
    SlowStore.stands.set()
    time.sleep(0.8)
    other.farewell("b/1", "b is lost: its process has ended.", is_orderly=False)
    other.leave()
    until(lambda: _missing(mine) == [ROUND.places[1]])
