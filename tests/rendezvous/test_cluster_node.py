"""Agents as nodes of a cluster, against a real etcd: who leads, who is missed, and what they tell each other."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import statistics
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from store_lab import BINARY, wait_until

from unicron_elastic.base.quarantine import Quarantined
from unicron_elastic.membership.coordination import BecomeCoordinator
from unicron_elastic.membership.rounds import JobMember
from unicron_elastic.rendezvous.cluster.heartbeat_wire import Hello
from unicron_elastic.rendezvous.cluster.heartbeats import NodeHeartbeats
from unicron_elastic.rendezvous.cluster.node import ClusterNode
from unicron_elastic.rendezvous.cluster.presence import ClusterPresence
from unicron_elastic.rendezvous.job.presence import JobPresence
from unicron_elastic.rendezvous.records.cluster import (
    CLUSTER,
    LEADER,
    SECRET,
    UNREACHABLE,
    NodeRecord,
    node_key,
    parse_leader,
)
from unicron_elastic.rendezvous.records.job import JobKeys
from unicron_elastic.rendezvous.store.address import StoreAddress
from unicron_elastic.rendezvous.store.etcd import EtcdStore
from unicron_elastic.rendezvous.store.interface import Store, StoreUnreachableError
from unicron_elastic.rendezvous.store.server import EmbeddedEtcd

DEADLINE_S = 20.0
LEASE_TTL_S = 10.0  # so long that no test can take a lease that runs out for a heartbeat
NOTICED_S = 1.0
WAKEUPS_PER_S_MAX = 100

# An agent that a test can kill: a node and a member of its job.
AGENT = """
import sys
from unicron_elastic.rendezvous.cluster.node import ClusterNode
from unicron_elastic.rendezvous.records.cluster import NodeRecord
from unicron_elastic.rendezvous.store.address import StoreAddress
from unicron_elastic.rendezvous.store.etcd import EtcdStore
from unicron_elastic.rendezvous.job.presence import JobPresence
from unicron_elastic.rendezvous.records.job import JobKeys
from unicron_elastic.membership.rounds import JobMember
endpoint, namespace, host, ttl_s = sys.argv[1:]
open_store = lambda: EtcdStore(StoreAddress.parse(endpoint), namespace)
record = NodeRecord(node_id=host + "/1", host=host, job="job", label="", pid=0)
node = ClusterNode(open_store, float(ttl_s), record, bind="127.0.0.1", address="127.0.0.1")
node.enter(20.0)
presence = JobPresence(open_store, JobKeys("job"), float(ttl_s))
presence.join(JobMember(node_id=record.node_id, host=host), 20.0)
print("ready", flush=True)
sys.stdin.read()
"""


class Node:
    """An agent in this process, and the faults that it heard of."""

    def __init__(self, open_store: Callable[[], Store], host: str, job: str) -> None:
        record = NodeRecord(node_id=f"{host}/1", host=host, job=job, label="", pid=os.getpid())
        self.id = record.node_id
        self.faults: queue.Queue[tuple[float, int, str]] = queue.Queue()
        self.node = ClusterNode(open_store, LEASE_TTL_S, record, bind="127.0.0.1", address="127.0.0.1")
        self.node.on_fault = self.heard
        self.node.enter(DEADLINE_S)

    def heard(self, number: int, reason: str) -> None:
        """A fault that another node has told."""
        self.faults.put((time.monotonic(), number, reason))

    @property
    def links(self) -> int:
        """How many connections stand."""
        heartbeats = self.node._heartbeats
        return 0 if heartbeats is None else sum(link.is_open for link in list(heartbeats._links._links))


class Cluster:
    """Nodes that are ended with the test, and what the store says of them."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint, self.namespace = endpoint, f"/test/{uuid.uuid4().hex}"
        self.store = self.open_store()
        self.nodes: list[Node] = []
        self.agents: dict[str, subprocess.Popen[str]] = {}

    def open_store(self) -> EtcdStore:
        return EtcdStore(StoreAddress.parse(self.endpoint), self.namespace)

    def add(self, *hosts: str, job: str = "job") -> list[Node]:
        """Further nodes, all of which have found the coordinator in the end."""
        self.nodes += (made := [Node(self.open_store, host, job) for host in hosts])
        self.wait_for_links()
        return made

    def start_agent(self, host: str) -> str:
        """An agent in a process of its own; its node id."""
        argv = [sys.executable, "-c", AGENT, self.endpoint, self.namespace, host, str(LEASE_TTL_S)]
        agent = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.agents[host] = agent
        assert agent.stdout is not None
        assert agent.stdout.readline() == "ready\n"
        return f"{host}/1"

    def leader(self) -> str:
        """Who has the leader's key; "": nobody."""
        entry = self.store.read(LEADER).entry
        return "" if entry is None else parse_leader(entry).node_id

    def leading(self) -> list[Node]:
        """Those of this process that think that they coordinate."""
        return [each for each in self.nodes if each.node.leads]

    def wait_for_links(self) -> Node:
        """Waits until all nodes of this process are linked to the one of them that leads."""

        def is_so() -> bool:
            others = [each for each in self.nodes if not each.node.leads]
            leading = self.leading()
            return len(leading) == 1 and leading[0].links >= len(others) and all(each.links == 1 for each in others)

        wait_until(is_so)
        return self.leading()[0]

    def remove(self, node: Node) -> None:
        self.nodes.remove(node)
        node.node.leave()

    def end(self) -> None:
        for agent in self.agents.values():
            agent.kill()
            with agent:
                pass
        for each in self.nodes:
            each.node.leave()
        self.store.close()


@pytest.fixture
def cluster(shared_etcd: EmbeddedEtcd) -> Iterator[Cluster]:
    made = Cluster(shared_etcd.endpoint)
    yield made
    made.end()


def is_there(cluster: Cluster, key: str) -> bool:
    return cluster.store.read(key).entry is not None


def kill(cluster: Cluster, host: str) -> float:
    """SIGKILLs an agent and waits until its keys are gone; the seconds that took."""
    keys = node_key(f"{host}/1"), JobKeys("job").member(f"{host}/1")
    assert all(is_there(cluster, key) for key in keys)
    os.kill(cluster.agents[host].pid, signal.SIGKILL)
    began = time.monotonic()
    wait_until(lambda: not any(is_there(cluster, key) for key in keys))
    return time.monotonic() - began


def why_lost(cluster: Cluster, node_id: str) -> str:
    entry = cluster.store.read(JobKeys("job").lost(node_id)).entry
    return "" if entry is None else entry.value.decode()


# -- who leads ---------------------------------------------------------------------------------------------------------


def test_exactly_one_leads_and_all_are_linked_to_it(cluster: Cluster) -> None:
    cluster.add("a", "b", "c")
    boss = cluster.wait_for_links()
    assert cluster.leader() == boss.id
    assert [each.links for each in cluster.nodes if each is not boss] == [1, 1]


def test_when_the_coordinator_leaves_another_one_leads_soon(cluster: Cluster) -> None:
    nodes = cluster.add("a", "b", "c")
    for _ in range(2):
        cluster.remove(cluster.wait_for_links())
        began = time.monotonic()
        boss = cluster.wait_for_links()
        assert time.monotonic() - began < 2.0
        assert cluster.leader() == boss.id
    assert not any(why_lost(cluster, each.id) for each in nodes), "who leaves is not lost"


def test_who_leaves_is_missed_by_nobody_and_may_come_again(cluster: Cluster) -> None:
    cluster.add("a", "b", "c")
    other = next(each for each in cluster.nodes if not each.node.leads)
    cluster.remove(other)
    assert not is_there(cluster, node_key(other.id))
    other.node.leave()
    other.node.enter(DEADLINE_S)
    cluster.nodes.append(other)
    cluster.wait_for_links()
    assert (is_there(cluster, node_key(other.id)), why_lost(cluster, other.id)) == (True, "")


# -- who is missed -----------------------------------------------------------------------------------------------------


def test_a_killed_agent_is_removed_within_a_second_and_its_job_is_told_why(cluster: Cluster) -> None:
    cluster.add("a", "b")
    boss = cluster.wait_for_links()
    lost = cluster.start_agent("c")
    wait_until(lambda: boss.links == 2)
    took_s = kill(cluster, "c")
    print(f"killed_agent_removed: {took_s:.4f} s")
    assert took_s < NOTICED_S
    assert "c is lost: its process has ended." in why_lost(cluster, lost)


def test_a_killed_coordinator_is_removed_by_the_others(cluster: Cluster) -> None:
    lost = cluster.start_agent("boss")
    wait_until(lambda: cluster.leader() == lost)
    cluster.nodes += [Node(cluster.open_store, host, "job") for host in "abc"]
    wait_until(lambda: all(each.links == 1 for each in cluster.nodes))
    took_s = kill(cluster, "boss")
    print(f"killed_coordinator_removed: {took_s:.4f} s")
    assert took_s < NOTICED_S
    assert cluster.leader() == cluster.wait_for_links().id
    assert "boss is lost: its process has ended." in why_lost(cluster, lost)
    wait_until(lambda: not cluster.store.read_prefix(UNREACHABLE).entries)


def test_a_stopped_agent_stays_until_its_lease_is_over(cluster: Cluster) -> None:
    cluster.add("a", "b")
    boss = cluster.wait_for_links()
    node_id = cluster.start_agent("c")
    wait_until(lambda: boss.links == 2)
    os.kill(cluster.agents["c"].pid, signal.SIGSTOP)
    end = time.monotonic() + 2.0
    while time.monotonic() < end:
        assert is_there(cluster, node_key(node_id))
        time.sleep(0.05)
    os.kill(cluster.agents["c"].pid, signal.SIGCONT)
    assert (boss.links, why_lost(cluster, node_id)) == (2, "")


# -- what they tell each other -----------------------------------------------------------------------------------------


def test_a_fault_reaches_all_of_the_job_and_nobody_else(cluster: Cluster) -> None:
    """From the coordinator and from others, whatever the coordinator's own job."""
    mine = cluster.add("a", "b", "c")
    others = cluster.add("d", "e", job="other")
    took_s = []
    for number, teller in enumerate(cluster.nodes * 4):
        group = mine if teller in mine else others
        began = time.monotonic()
        teller.node.tell_fault(number, f"rank 1 of {teller.id} is dead.")
        for each in group:
            if each is not teller:
                at, told, reason = each.faults.get(timeout=DEADLINE_S)
                assert (told, reason) == (number, f"rank 1 of {teller.id} is dead.")
                took_s.append(at - began)
    assert all(each.faults.empty() for each in cluster.nodes)
    print(f"fault_told_median: {statistics.median(took_s):.4f} s")
    print(f"fault_told_max: {max(took_s):.4f} s")
    assert statistics.median(took_s) < 0.05


@pytest.mark.parametrize("reason", ["", "\0\x1b[31m\n", "\ud800", "\N{FIRE}" * 5000, "x" * 100_000])
def test_a_fault_in_whatever_words_arrives_and_costs_no_link(cluster: Cluster, reason: str) -> None:
    cluster.add("a", "b", "c")
    before = [each.links for each in cluster.nodes]
    teller = next(each for each in cluster.nodes if not each.node.leads)
    teller.node.tell_fault(7, reason)
    for each in cluster.nodes:
        if each is not teller:
            _, number, told = each.faults.get(timeout=DEADLINE_S)
            assert (number, "\n" in told, len(told) <= 2000) == (7, False, True)
    assert [each.links for each in cluster.nodes] == before


def test_a_callback_that_raises_ends_no_thread(cluster: Cluster) -> None:
    cluster.add("a", "b")
    called: queue.Queue[str] = queue.Queue()

    def broken(_number: int, reason: str) -> None:
        called.put(reason)
        raise ZeroDivisionError(reason)

    for each in cluster.nodes:
        each.node.on_fault = broken
    cluster.nodes[0].node.tell_fault(1, "first")
    cluster.nodes[1].node.tell_fault(1, "first")
    assert [called.get(timeout=DEADLINE_S), called.get(timeout=DEADLINE_S)] == ["first", "first"]
    for each in cluster.nodes:
        each.node.on_fault = each.heard
    for teller, other in (cluster.nodes, cluster.nodes[::-1]):
        teller.node.tell_fault(2, "second")
        assert other.faults.get(timeout=DEADLINE_S)[1:] == (2, "second")


def test_a_host_in_quarantine_is_told_so(cluster: Cluster) -> None:
    one, two = cluster.add("a", "b")
    assert one.node.why_kept_out() == ""
    now = time.time()
    assert one.node.keep_out(Quarantined(node="a", reason="GPU 3 is broken.", since=now, until=None, by="me")) == ""
    wait_until(one.node.why_kept_out)
    assert "GPU 3 is broken" in one.node.why_kept_out()
    assert two.node.why_kept_out() == ""
    assert two.node.keep_out(Quarantined(node="b", reason="a try.", since=now, until=now + 1.0, by="me")) == ""
    wait_until(two.node.why_kept_out)
    wait_until(lambda: not two.node.why_kept_out())
    assert time.time() >= now + 1.0


# -- the store ---------------------------------------------------------------------------------------------------------


def test_with_an_etcd_without_data_they_go_on_with_a_new_secret() -> None:
    server = EmbeddedEtcd(binary=BINARY)
    server.start()
    cluster = Cluster(server.endpoint)
    try:
        cluster.add("a", "b", "c")
        before = cluster.store.read(SECRET).entry
        server.stop(timeout_s=0.0)
        server.start()
        cluster.store.close()
        cluster.store = cluster.open_store()
        wait_until(lambda: is_there(cluster, LEADER) and all(is_there(cluster, node_key(n.id)) for n in cluster.nodes))
        after = cluster.store.read(SECRET).entry
        assert before is not None
        assert after is not None
        assert before.value != after.value
        boss = cluster.wait_for_links()
        wait_until(lambda: cluster.leader() == boss.id)
        teller = next(each for each in cluster.nodes if each is not boss)
        wait_until(lambda: teller.links)
        teller.node.tell_fault(1, "all is well.")
        assert boss.faults.get(timeout=DEADLINE_S)[1:] == (1, "all is well.")
        cluster.add("d")  # with the new secret alone
    finally:
        cluster.end()
        server.stop(timeout_s=0.0)


class Failing:
    """A store some of whose calls fail."""

    def __init__(self, store: Store, fails: dict[str, Any]) -> None:
        self._store, self._fails = store, fails

    def __getattr__(self, name: str) -> Any:
        if name in self._fails:
            return self._fails[name]
        return getattr(self._store, name)


def fail(*_: Any, **__: Any) -> Any:
    raise StoreUnreachableError("a test")


@pytest.mark.parametrize("what", ["grant", "secret"])
def test_who_could_not_enter_leaves_nothing_behind(cluster: Cluster, what: str) -> None:
    """Neither descriptors nor threads nor a node that nobody is."""
    record = NodeRecord(node_id="a/1", host="a", job="job", label="", pid=1)

    def reads_no_secret(key: str) -> Any:
        return fail() if key == SECRET else cluster.store.read(key)

    fails: dict[str, Any] = {"grant": fail} if what == "grant" else {"read": reads_no_secret}

    def open_store() -> Any:
        return Failing(cluster.open_store(), fails)

    def try_to_enter() -> int:
        node = ClusterNode(open_store, LEASE_TTL_S, record, bind="127.0.0.1", address="127.0.0.1")
        with pytest.raises(StoreUnreachableError):
            node.enter(0.0)
        return len(os.listdir("/proc/self/fd"))

    before = set(threading.enumerate())
    fds = try_to_enter()  # gRPC opens some of its own
    for _ in range(10):
        last = try_to_enter()
    left = {each.name for each in set(threading.enumerate()) - before}
    assert not {"unicron-presence", "unicron-heartbeats", "unicron-coordination"} & left
    assert last < fds + 10, "less than one for each attempt"
    assert not is_there(cluster, node_key("a/1"))


def test_who_has_no_lease_takes_no_leader_s_key(cluster: Cluster) -> None:
    """It would be bound to nothing, and stay for ever when its agent ends."""
    record = NodeRecord(node_id="a/1", host="a", job="job", label="", pid=1)
    presence = ClusterPresence(cluster.open_store, LEASE_TTL_S, record, "127.0.0.1:1")
    presence.enter(DEADLINE_S)
    heartbeats = NodeHeartbeats(Hello("a/1", "a", "job"), "127.0.0.1", "127.0.0.1")
    try:
        presence._lease_id = None  # as between the end of one and the next
        heartbeats._presence = presence
        with contextlib.suppress(Exception):
            heartbeats._do_in_store(BecomeCoordinator(0))
        entry = cluster.store.read(LEADER).entry
        assert entry is None or entry.lease_id is not None
    finally:
        heartbeats.close()
        presence.leave()


def test_what_was_taken_back_while_the_store_was_away_goes_once_it_is_there(cluster: Cluster) -> None:
    """Else an accusation stays for as long as its agent lives."""
    away = threading.Event()
    real = cluster.open_store()

    def delete(key: str) -> Any:
        return fail() if away.is_set() else real.delete(key)

    presence = ClusterPresence(lambda: Failing(real, {"delete": delete}), 2.0, None)  # type: ignore[return-value, arg-type]
    presence.enter(DEADLINE_S)
    key = f"{CLUSTER}unreachable/a"
    try:
        presence.say(key, "boss/1")
        assert is_there(cluster, key)
        away.set()
        presence.unsay(key)
        away.clear()
        wait_until(lambda: not is_there(cluster, key))
    finally:
        presence.leave()


def test_a_member_that_is_said_again_is_no_longer_called_lost(cluster: Cluster) -> None:
    keys = JobKeys("job")
    cluster.store.put(keys.lost("a/1"), b"a is lost.")
    presence = JobPresence(cluster.open_store, keys, LEASE_TTL_S)
    for _ in range(2):  # the first time it has no copy of the store yet
        presence.join(JobMember(node_id="a/1", host="a"), DEADLINE_S)
    wait_until(lambda: not is_there(cluster, keys.lost("a/1")))
    presence.leave()


def test_at_rest_it_costs_little(cluster: Cluster) -> None:
    cluster.add("a", "b")
    for each in cluster.nodes:
        polls = 0
        heartbeats = each.node._heartbeats
        assert heartbeats is not None
        links = heartbeats._links
        poll = links.poll

        def counted(timeout_s: float, poll: Callable[[float], None] = poll) -> None:
            nonlocal polls
            polls += 1
            poll(timeout_s)

        links.poll = counted  # type: ignore[method-assign]
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            time.sleep(0.01)
        assert 5 < polls < WAKEUPS_PER_S_MAX
        links.poll = poll  # type: ignore[method-assign]
