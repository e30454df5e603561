"""The thread that plans, on a real etcd: how fast it is, and that it comes and goes with the leader's key."""

from __future__ import annotations

import statistics
import threading
import time
import uuid
from collections.abc import Callable, Iterator

import pytest
from store_lab import BINARY, wait_until
from term_lab import read_published, spec

from unicron_elastic.base.quarantine import Quarantined
from unicron_elastic.planning.coordinate.node_status import NodeState, NodeStatus
from unicron_elastic.planning.coordinate.snapshot import JobPhase
from unicron_elastic.rendezvous.cluster.node import ClusterNode
from unicron_elastic.rendezvous.plan.planner import RETRY_S, TICK_S, Planner
from unicron_elastic.rendezvous.records.cluster import LEADER, NodeRecord, quarantine_key, quarantine_text, roster_key
from unicron_elastic.rendezvous.records.plan import PhaseRecord, phase_text, spec_text, status_text
from unicron_elastic.rendezvous.records.plan_keys import (
    CURRENT,
    NODE_RECORDS,
    ORDERS,
    PLAN,
    PlannedJobKeys,
    order_key,
    status_key,
)
from unicron_elastic.rendezvous.store.address import StoreAddress
from unicron_elastic.rendezvous.store.etcd import EtcdStore
from unicron_elastic.rendezvous.store.interface import (
    Changes,
    Store,
    StoreDeniedError,
    StoreUnreachableError,
    WatchItem,
)
from unicron_elastic.rendezvous.store.server import EmbeddedEtcd

DEADLINE_S = 20.0
LATENCY_MS_MAX = 1000.0  # 10 ms on an idle machine
CHAT = PlannedJobKeys("chat")


def threads() -> list[str]:
    """Those of planners that live."""
    mine = ("unicron-planner", "unicron-watch", "unicron-table")
    return [each.name for each in threading.enumerate() if each.name in mine]


class Cluster:
    """A store with the records of a cluster, and its planners."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint, self.namespace = endpoint, f"/test/{uuid.uuid4().hex}"
        self.store = self.open_store()
        self.said: list[str] = []
        self.planners: list[Planner] = []

    def open_store(self) -> EtcdStore:
        return EtcdStore(StoreAddress.parse(self.endpoint), self.namespace)

    def planner(self, open_store: Callable[[], Store] | None = None, **limits: float) -> Planner:
        found = Planner(open_store or self.open_store, self.said.append, **limits)
        self.planners.append(found)
        return found

    def elect(self) -> int:
        """The leader's key, written anew."""
        return self.store.put(LEADER, b"leader")

    def say(self, host: str, state: NodeState = NodeState.IDLE, job: str = "") -> None:
        status = NodeStatus(node_id=f"{host}/agent", host=host, state=state, job=job)
        self.store.put(status_key(status.node_id), status_text(status).encode())

    def lose(self, host: str) -> None:
        self.store.delete(status_key(f"{host}/agent"))

    def hosts(self) -> set[str]:
        """All whom the plan knows."""
        found = read_published(self.store)
        return set() if found is None else {seat.host for seat in found.seats}

    def close(self) -> None:
        for planner in self.planners:
            planner.close()
        self.store.close()


@pytest.fixture
def cluster(shared_etcd: EmbeddedEtcd) -> Iterator[Cluster]:
    before = threads()
    made = Cluster(shared_etcd.endpoint)
    try:
        yield made
    finally:
        made.close()
    wait_until(lambda: len(threads()) <= len(before))


class Seen:
    """When keys were written, as somebody hears of it who watches."""

    def __init__(self, store: Store) -> None:
        self.at: dict[str, float] = {}
        self._new = threading.Condition()
        store.watch(store.read_prefix(PLAN), self._take)

    def _take(self, item: WatchItem) -> None:
        now = time.perf_counter()
        with self._new:
            if isinstance(item, Changes):
                self.at |= {change.key: now for change in item.changes if change.entry is not None}
            self._new.notify_all()

    def since(self, began: float, key: str) -> float:
        """Milliseconds until ``key`` was written."""
        with self._new:
            assert self._new.wait_for(lambda: self.at.get(key, 0.0) > began, DEADLINE_S), f"{key} was not written"
            return 1e3 * (self.at[key] - began)


def test_a_lost_node_is_replaced_within_milliseconds(cluster: Cluster) -> None:
    """From the end of its key to the new plan, and to the order for the node in its place."""
    spares = [f"spare{place}" for place in range(10)]
    working = ["w0", "w1", "w2"]
    cluster.store.put(CHAT.spec, spec_text(spec("chat", max_nodes=3)))
    cluster.store.put(CHAT.phase, phase_text(PhaseRecord(phase=JobPhase.RUNNING, reason="")))
    for host in working:
        cluster.say(host, NodeState.WORKING, "chat")
    for host in spares:
        cluster.say(host)
    cluster.planner().lead(cluster.elect())
    wait_until(lambda: len(cluster.hosts()) == 13)
    seen = Seen(cluster.store)
    plans, orders = [], []
    for spare in spares:
        gone = working.pop(0)
        began = time.perf_counter()
        cluster.lose(gone)
        plans.append(seen.since(began, CURRENT))
        orders.append(seen.since(began, order_key(f"{spare}/agent")))
        cluster.say(spare, NodeState.WORKING, "chat")
        working.append(spare)
    plan_ms, order_ms = statistics.median(plans), statistics.median(orders)
    print(f"A lost node: {plan_ms:.1f} ms to the plan, {order_ms:.1f} ms to the order, medians of {len(plans)}")
    assert order_ms < LATENCY_MS_MAX


def test_who_is_elected_plans_at_once(cluster: Cluster) -> None:
    """Though nothing changes from then on, and not only at the next tick."""
    cluster.say("h1")
    planner = cluster.planner()
    planner.lead(cluster.elect())  # which may load NumPy
    wait_until(lambda: cluster.hosts() == {"h1"})
    planner.lead(0)
    wait_until(lambda: threads() == ["unicron-planner"])
    cluster.store.delete(CURRENT)
    revision, seen = cluster.elect(), Seen(cluster.store)
    began = time.perf_counter()
    planner.lead(revision)
    assert seen.since(began, CURRENT) < 1e3 * TICK_S


def test_another_right_is_taken_up_at_once(cluster: Cluster) -> None:
    """By which what the planner has begun with is worth nothing any more; no news comes from the store."""
    cluster.say("h1")
    planner = cluster.planner(tick_s=10 * DEADLINE_S, retry_s=10 * DEADLINE_S)
    planner.lead(cluster.elect())
    wait_until(lambda: cluster.hosts() == {"h1"})
    revision = cluster.elect()
    cluster.store.delete(CURRENT)
    wait_until(lambda: (term := planner._term) is not None and term._mirror.get(CURRENT) is None)
    planner.lead(revision)
    wait_until(lambda: cluster.hosts() == {"h1"})


def test_who_leads_no_more_decides_nothing_and_keeps_no_connection(cluster: Cluster) -> None:
    cluster.say("h1")
    planner = cluster.planner()
    planner.lead(cluster.elect())
    wait_until(lambda: cluster.hosts() == {"h1"})
    planner.lead(0)
    wait_until(lambda: threads() == ["unicron-planner"])
    cluster.say("h2")
    other = cluster.planner()
    assert cluster.hosts() == {"h1"}
    other.lead(cluster.elect())
    wait_until(lambda: cluster.hosts() == {"h1", "h2"})


def test_two_who_believe_that_they_lead_are_one(cluster: Cluster) -> None:
    cluster.say("h1")
    cluster.store.put(CHAT.spec, spec_text(spec("chat")))
    old, new = cluster.planner(), cluster.planner()
    old.lead(cluster.elect())
    wait_until(lambda: cluster.store.read_prefix(ORDERS).entries)
    new.lead(cluster.elect())
    for place in range(2, 6):
        cluster.say(f"h{place}")
        wait_until(lambda place=place: len(cluster.hosts()) == place)
    assert len(cluster.said) == len(set(cluster.said))


@pytest.mark.parametrize("seed", range(8))
def test_it_may_be_told_anything_at_any_time_and_ends(cluster: Cluster, seed: int) -> None:
    cluster.say("h1")
    revision = cluster.elect()
    planner = cluster.planner()
    tellers = [
        threading.Thread(target=planner.lead, args=(told,))
        for told in (revision, 0, revision + 1, revision)[: seed % 5]
    ]
    for each in tellers:
        each.start()
        time.sleep(0.004 * seed)
    began = time.monotonic()
    planner.close()
    planner.close()
    assert time.monotonic() - began < 20.0  # nothing is waited for, but the machine may be busy
    for each in tellers:
        each.join(DEADLINE_S)
    wait_until(lambda: not threads())
    planner.lead(revision)
    assert threads() == []


def test_who_hears_what_is_said_may_close_it(cluster: Cluster) -> None:
    planner = Planner(cluster.open_store, lambda _words: planner.close())
    cluster.say("h1")
    planner.lead(cluster.elect())
    wait_until(lambda: cluster.hosts() == {"h1"})
    wait_until(lambda: not threads())


@pytest.mark.parametrize("error", [StoreUnreachableError("it is away"), RuntimeError("a bug")])
def test_a_store_that_cannot_be_opened_is_tried_again(cluster: Cluster, error: Exception) -> None:
    tries: list[float] = []

    def open_store() -> Store:
        tries.append(time.monotonic())
        if len(tries) == 1:
            raise error
        return cluster.open_store()

    cluster.say("h1")
    cluster.planner(open_store).lead(cluster.elect())
    wait_until(lambda: cluster.hosts() == {"h1"})
    assert tries[1] - tries[0] >= RETRY_S


def test_who_may_not_use_the_store_says_so_once(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    tries: list[float] = []

    def open_store() -> Store:
        tries.append(time.monotonic())
        if len(tries) < 3:
            raise StoreDeniedError("etcd does not allow it")
        if len(tries) < 5:
            raise RuntimeError("a bug")
        return cluster.open_store()

    cluster.say("h1")
    cluster.planner(open_store).lead(cluster.elect())
    wait_until(lambda: cluster.hosts() == {"h1"})
    wait_until(lambda: len(cluster.said) == 2)  # a moment after it was written
    assert cluster.said[0] == "Nothing can be planned: etcd does not allow it."
    errors = [record for record in caplog.records if record.exc_info]
    assert ["a bug" in str(record.exc_info) for record in errors] == [True]


def test_a_store_that_does_not_answer_is_not_waited_for(cluster: Cluster) -> None:
    answers, is_asked = threading.Event(), threading.Event()

    def open_store() -> Store:
        is_asked.set()
        assert answers.wait(DEADLINE_S)
        return cluster.open_store()

    planner = cluster.planner(open_store, close_s=0.2)
    planner.lead(cluster.elect())
    assert is_asked.wait(DEADLINE_S)
    began = time.monotonic()
    planner.close()
    assert time.monotonic() - began < 1.0
    answers.set()
    wait_until(lambda: not threads())


def test_who_is_told_twice_at_once_plans_once(cluster: Cluster) -> None:
    planner, revision = cluster.planner(), cluster.elect()
    begin = threading.Barrier(8)

    def lead() -> None:
        begin.wait(DEADLINE_S)
        planner.lead(revision)

    tellers = [threading.Thread(target=lead) for _ in range(8)]
    for each in tellers:
        each.start()
    for each in tellers:
        each.join(DEADLINE_S)
    assert threads().count("unicron-planner") == 1


def test_a_store_that_has_lost_its_data_is_opened_again() -> None:
    with EmbeddedEtcd(binary=BINARY) as server:
        cluster = Cluster(server.endpoint)
        try:
            cluster.say("h1")
            planner = cluster.planner()
            planner.lead(cluster.elect())
            wait_until(lambda: cluster.hosts() == {"h1"})
            server.stop(timeout_s=0.0)
            server.start()
            cluster.store.close()
            cluster.store = cluster.open_store()
            cluster.say("h2")
            planner.lead(cluster.elect())
            wait_until(lambda: cluster.hosts() == {"h2"})
        finally:
            cluster.close()
    wait_until(lambda: not threads())


def test_a_store_that_has_lost_its_data_is_told_what_was_planned() -> None:
    """Also if this agent is not elected again, and nothing that others have told by then is overwritten."""
    with EmbeddedEtcd(binary=BINARY) as server:
        cluster = Cluster(server.endpoint)
        try:
            told = {CHAT.spec: spec_text(spec("chat")), CHAT.rates: b"{}", PlannedJobKeys("code").spec: b"odd"}
            running = phase_text(PhaseRecord(phase=JobPhase.RUNNING, reason="", start=3))
            for key, value in {**told, CHAT.phase: running, CHAT.measured: b"{}"}.items():
                cluster.store.put(key, value)
            lease_id = cluster.store.grant(60.0).lease_id
            cluster.store.put(CHAT.output, b"here:1", lease_id)
            kept_out = Quarantined(node="h9", reason="ECC", since=1.0, until=None, by="ada")
            cluster.store.put(quarantine_key("h9"), quarantine_text(kept_out))
            cluster.store.put(roster_key("h0"), b"gone")
            cluster.store.put(roster_key("h8"), b"lost")
            cluster.say("h1")
            planner = cluster.planner()
            planner.lead(cluster.elect())
            cluster.store.delete(roster_key("h0"))
            wait_until(lambda: (term := planner._term) is not None and term._mirror.get(CURRENT) is not None)
            wait_until(lambda: (term := planner._term) is not None and list(term._roster) == [roster_key("h8")])
            server.stop(timeout_s=0.0)
            planner.lead(0)
            server.start()
            cluster.store.close()
            cluster.store = cluster.open_store()
            cluster.store.put(CHAT.phase, b"newer")
            wait_until(lambda: any("it is told again what was planned" in each for each in cluster.said))
            found = {each.key: each.value for each in cluster.store.read_prefix("").entries}
            assert found.items() >= told.items()
            assert found[CHAT.phase] == b"newer"
            assert {CHAT.measured, quarantine_key("h9"), roster_key("h8"), CURRENT} <= found.keys()
            assert not {key for key in found if key.startswith((ORDERS, NODE_RECORDS, CHAT.output))}
        finally:
            cluster.close()
    wait_until(lambda: not threads())


def test_an_election_by_a_store_that_lost_its_data_is_void() -> None:
    """Though the revision may be that of another's key in the store that has come in its place."""
    with EmbeddedEtcd(binary=BINARY) as server:
        cluster = Cluster(server.endpoint)
        try:
            cluster.say("h1")
            planner, revision = cluster.planner(), cluster.elect()
            planner.lead(revision)
            wait_until(lambda: (term := planner._term) is not None and term._mirror.get(CURRENT) is not None)
            server.stop(timeout_s=0.0)
            server.start()
            cluster.store.close()
            cluster.store = cluster.open_store()
            while cluster.elect() < revision:
                pass
            cluster.say("h2")
            wait_until(lambda: any("it is told again what was planned" in each for each in cluster.said))
            wait_until(lambda: planner._term is None and threads() == ["unicron-planner"])
            assert "h2" not in cluster.hosts()
            planner.lead(revision)
            wait_until(lambda: cluster.hosts() == {"h2"})
        finally:
            cluster.close()
    wait_until(lambda: not threads())


# -- in the agents of a cluster ------------------------------------------------------------------------------------


def agent(cluster: Cluster, host: str, *, may_lead: bool = True) -> ClusterNode:
    """An idle node that says so."""
    record = NodeRecord(node_id=f"{host}/agent", host=host, job="", label="", pid=0)
    found = ClusterNode(cluster.open_store, 30.0, record, bind="127.0.0.1", address="127.0.0.1", may_lead=may_lead)
    status = NodeStatus(node_id=record.node_id, host=host)
    found.say(status_key(status.node_id), status_text(status))
    found.enter(DEADLINE_S)
    return found


def links(found: ClusterNode) -> int:
    heartbeats = found._heartbeats
    return 0 if heartbeats is None else sum(link.is_open for link in list(heartbeats._links._links))


def test_who_coordinates_plans_and_a_node_that_it_removes_is_in_no_plan(cluster: Cluster) -> None:
    first = agent(cluster, "first")
    second = agent(cluster, "second")
    try:
        wait_until(lambda: cluster.hosts() == {"first", "second"})
        wait_until(lambda: links(first) and links(second))
        assert (first.leads, second.leads) == (True, False)
        assert second._heartbeats is not None
        began = time.monotonic()
        second._heartbeats.close()  # as if its process had ended, while its lease lives on
        wait_until(lambda: cluster.hosts() == {"first"})
        print(f"A node that has ended is in no plan after {1e3 * (time.monotonic() - began):.0f} ms")
        assert time.monotonic() - began < 10.0
    finally:
        second.leave()
        first.leave()


def test_the_next_coordinator_plans_when_the_first_has_gone(cluster: Cluster) -> None:
    first = agent(cluster, "first")
    wait_until(lambda: cluster.hosts() == {"first"})
    guest, second = agent(cluster, "guest", may_lead=False), agent(cluster, "second")
    try:
        wait_until(lambda: cluster.hosts() == {"first", "guest", "second"})
        first.leave()
        wait_until(lambda: cluster.hosts() == {"guest", "second"})
        assert (guest.leads, second.leads) == (False, True)
    finally:
        first.leave()
        second.leave()
        guest.leave()
