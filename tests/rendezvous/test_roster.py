"""Hosts that belong to the cluster, against a real etcd: they are missed until they return, leave, or are forgotten."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator

import pytest
from store_lab import wait_until

from unicron_elastic.rendezvous.cluster.node import ClusterNode
from unicron_elastic.rendezvous.records.cluster import (
    NodeRecord,
    RosterRecord,
    node_key,
    parse_roster,
    roster_key,
    roster_text,
)
from unicron_elastic.rendezvous.store.address import StoreAddress
from unicron_elastic.rendezvous.store.etcd import EtcdStore
from unicron_elastic.rendezvous.store.server import EmbeddedEtcd

DEADLINE_S = 20.0
LEASE_TTL_S = 10.0

# An agent that a test can kill, or end in order by closing its stdin.
AGENT = """
import sys
from unicron_elastic.rendezvous.cluster.node import ClusterNode
from unicron_elastic.rendezvous.records.cluster import NodeRecord
from unicron_elastic.rendezvous.store.address import StoreAddress
from unicron_elastic.rendezvous.store.etcd import EtcdStore
endpoint, namespace, host, number, ttl_s = sys.argv[1:]
open_store = lambda: EtcdStore(StoreAddress.parse(endpoint), namespace)
record = NodeRecord(node_id=f"{host}/{number}", host=host, job="", label="", pid=0)
node = ClusterNode(open_store, float(ttl_s), record, bind="127.0.0.1", address="127.0.0.1")
node.enter(20.0)
node.join_roster()
print("ready", flush=True)
sys.stdin.read()
node.leave_roster()
node.leave()
"""


class Cluster:
    """A coordinator in this process, agents in their own, and what the store says of their hosts."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint, self.namespace = endpoint, f"/test/{uuid.uuid4().hex}"
        self.store = self.open_store()
        self.agents: dict[str, subprocess.Popen[str]] = {}
        self.boss = self.node("boss", 1)

    def open_store(self) -> EtcdStore:
        return EtcdStore(StoreAddress.parse(self.endpoint), self.namespace)

    def node(self, host: str, number: int) -> ClusterNode:
        """An agent of this process, which is on the roster."""
        record = NodeRecord(node_id=f"{host}/{number}", host=host, job="", label="", pid=0)
        made = ClusterNode(self.open_store, LEASE_TTL_S, record, bind="127.0.0.1", address="127.0.0.1")
        made.enter(DEADLINE_S)
        made.join_roster()
        return made

    def start(self, host: str, number: int, ttl_s: float = LEASE_TTL_S) -> None:
        """An agent in a process of its own, to which the coordinator is linked."""
        argv = [sys.executable, "-c", AGENT, self.endpoint, self.namespace, host, str(number), str(ttl_s)]
        agent = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.agents[host] = agent
        assert agent.stdout is not None
        assert agent.stdout.readline() == "ready\n"
        heartbeats = self.boss._heartbeats
        assert heartbeats is not None
        wait_until(lambda: f"{host}/{number}" in heartbeats.state.links)

    def on_roster(self, host: str) -> RosterRecord | None:
        entry = self.store.read(roster_key(host)).entry
        return None if entry is None else parse_roster(entry)

    def until_lost(self, host: str) -> RosterRecord:
        """What is told of it."""
        wait_until(lambda: (record := self.on_roster(host)) is not None and record.reason != "")
        record = self.on_roster(host)
        assert record is not None
        return record

    def end(self) -> None:
        for agent in self.agents.values():
            agent.kill()
            with agent:
                pass
        self.boss.leave()
        self.store.close()


@pytest.fixture
def cluster(shared_etcd: EmbeddedEtcd) -> Iterator[Cluster]:
    made = Cluster(shared_etcd.endpoint)
    yield made
    made.end()


def _killed(cluster: Cluster) -> str:
    os.kill(cluster.agents["a"].pid, signal.SIGKILL)
    return "a is lost: its process has ended."


def _lease_alone(cluster: Cluster) -> str:
    """Nobody has ever met it, as in a cluster without connections between hosts."""
    cluster.store.put(roster_key("a"), roster_text(RosterRecord(host="a", node_id="a/1")))
    cluster.store.delete(node_key("a/1"))
    os.kill(cluster.agents["a"].pid, signal.SIGKILL)
    return "a is lost: nothing was heard of its agent until the agent's lease ran out."


@pytest.mark.parametrize("lose", [_killed, _lease_alone])
def test_a_host_that_is_lost_stays_known_with_since_when_and_why(
    cluster: Cluster, lose: Callable[[Cluster], str]
) -> None:
    cluster.start("a", 1)
    assert cluster.on_roster("a") == RosterRecord(host="a", node_id="a/1")
    began = time.time()
    why = lose(cluster)
    lost = cluster.until_lost("a")
    assert lost.reason == why
    assert began - 1.0 <= lost.lost_unix_s <= time.time()
    assert cluster.on_roster("boss") == RosterRecord(host="boss", node_id="boss/1")

    cluster.start("a", 2)
    assert cluster.on_roster("a") == RosterRecord(host="a", node_id="a/2"), "it has returned"


def test_the_coordinator_itself_is_missed_by_who_follows_it(cluster: Cluster) -> None:
    cluster.start("a", 1)
    cluster.boss.leave()
    wait_until(lambda: cluster.store.read("cluster/leader").entry is not None)
    cluster.boss = cluster.node("b", 1)
    wait_until(lambda: not cluster.boss.why_unreached())
    os.kill(cluster.agents["a"].pid, signal.SIGKILL)
    reason = cluster.until_lost("a").reason
    # While the kernel takes it down its port accepts connections that nobody answers.
    assert re.fullmatch(r"a is lost: (its process has ended|it answers neither .*)\.", reason), reason


def test_who_leaves_in_order_is_not_missed(cluster: Cluster) -> None:
    cluster.start("a", 1)
    cluster.agents["a"].communicate(timeout=DEADLINE_S)
    assert cluster.agents["a"].returncode == 0
    assert cluster.on_roster("a") is None
    assert not cluster.store.read(node_key("a/1")).entry


def test_who_leaves_takes_back_no_other_agent_s_word(cluster: Cluster) -> None:
    cluster.start("a", 1)
    other = cluster.node("a", 2)
    try:
        cluster.agents["a"].communicate(timeout=DEADLINE_S)
        assert cluster.on_roster("a") == RosterRecord(host="a", node_id="a/2")
    finally:
        other.leave()


def test_one_that_was_taken_for_lost_and_says_that_it_is_there_is_lost_no_more(cluster: Cluster) -> None:
    other = cluster.node("a", 1)
    try:
        lost = RosterRecord(host="a", node_id="a/1", reason="a is lost: it does not answer.", lost_unix_s=1.0)
        cluster.store.put(roster_key("a"), roster_text(lost))
        other.enter(DEADLINE_S, again=True)
        assert cluster.on_roster("a") == RosterRecord(host="a", node_id="a/1")
    finally:
        other.leave()
