"""One coordinator's term: what is decided gets into the store, once, and only by the right to decide it."""

from __future__ import annotations

import logging
import random
import uuid
from collections.abc import Callable
from dataclasses import replace

import pytest
from store_lab import wait_until
from term_lab import LONG_S, NOW, Cluster, TermStore, read_order, read_published, spec, two_jobs

from unicron_elastic.base.quarantine import LAUNCHER
from unicron_elastic.planning.coordinate.coordinator import REPEAT_S, TableBuilt
from unicron_elastic.planning.coordinate.node_status import Health, NodeState, NodeStatus
from unicron_elastic.planning.coordinate.snapshot import ClusterSnapshot, JobPhase
from unicron_elastic.planning.model.faulting import FaultRate
from unicron_elastic.planning.model.jobs import MeasuredSteps
from unicron_elastic.planning.model.measured import MeasuredJob, Now, Stay
from unicron_elastic.rendezvous.plan.term import FAULTS_EVERY_S, Term, lost_nodes
from unicron_elastic.rendezvous.records.cluster import LEADER, QUARANTINE, quarantine_key
from unicron_elastic.rendezvous.records.plan import (
    PhaseRecord,
    faults_text,
    parse_faults,
    parse_order,
    parse_rates,
    phase_text,
    spec_text,
    status_text,
)
from unicron_elastic.rendezvous.records.plan_keys import (
    CURRENT,
    FAULTS,
    NODE_RECORDS,
    ORDERS,
    PLAN,
    PlannedJobKeys,
    status_key,
)
from unicron_elastic.rendezvous.store.address import StoreAddress
from unicron_elastic.rendezvous.store.etcd import EtcdStore
from unicron_elastic.rendezvous.store.interface import (
    MAX_OPERATIONS,
    Blind,
    Deliver,
    Sighted,
    StoreReplacedError,
    StoreUnreachableError,
    Watch,
)
from unicron_elastic.rendezvous.store.interface import Snapshot as StoreSnapshot
from unicron_elastic.rendezvous.store.server import EmbeddedEtcd

CHAT, CODE = PlannedJobKeys("chat"), PlannedJobKeys("code")


def once(call: Callable[[], object], prefix: str) -> Callable[[tuple[str, ...]], None]:
    """Before the first commit that writes a key below ``prefix``."""
    is_due = [True]

    def before(keys: tuple[str, ...]) -> None:
        if is_due[0] and any(key.startswith(prefix) for key in keys):
            is_due[0] = False
            call()

    return before


def fail() -> None:
    raise StoreUnreachableError("the store is away")


# -- from jobs and nodes to orders ---------------------------------------------------------------------------------


def test_without_anything_to_plan_nothing_is_written() -> None:
    cluster = Cluster()
    cluster.look_on()
    assert cluster.term_store.commits == []


def test_nodes_alone_are_planned_for_with_no_job() -> None:
    cluster = Cluster()
    cluster.start("h1")
    cluster.look_on()
    assert (cluster.term_store.written(), cluster.orders()) == ([CURRENT], {})


def test_a_job_and_its_nodes_are_brought_together() -> None:
    cluster = Cluster()
    cluster.submit(spec("chat", min_nodes=2))
    cluster.start("h1", "h2", "h3")
    cluster.look_on()
    plan = cluster.published
    assert plan.plan.counts == {"chat": 3}
    assert cluster.orders() == {"h1": "chat", "h2": "chat", "h3": "chat"}
    order = cluster.order("h1")
    assert order is not None
    assert (order.source, order.plan_revision) == ("", plan.revision)
    assert plan.reason in order.reason
    assert cluster.phase("chat") is JobPhase.SUBMITTED  # nobody waits for it yet
    cluster.settle()
    record = cluster.phase_record("chat")
    assert (record.phase, record.nodes) == (JobPhase.RUNNING, 3)
    assert cluster.working("chat") == ["h1", "h2", "h3"]
    assert cluster.said == [plan.reason, record.reason]


def test_two_jobs_share_and_a_third_one_waits_until_one_ends() -> None:
    cluster = two_jobs()
    held = {name: len(cluster.working(name)) for name in ("chat", "code")}
    assert held == cluster.published.plan.counts
    assert sum(held.values()) == 6
    cluster.submit(spec("draft", 0.01, min_nodes=3))
    cluster.settle()
    assert (cluster.phase("draft"), cluster.published.plan.counts["draft"]) == (JobPhase.SUBMITTED, 0)
    cluster.store.put(CHAT.phase, phase_text(PhaseRecord(phase=JobPhase.FINISHED, reason="", exit_code=0)))
    cluster.store.put(CODE.phase, phase_text(PhaseRecord(phase=JobPhase.CANCELLED, reason="")))
    cluster.settle()
    assert cluster.phase("draft") is JobPhase.RUNNING
    assert len(cluster.working("draft")) == 6
    assert [cluster.phase(name) for name in ("chat", "code")] == [JobPhase.FINISHED, JobPhase.CANCELLED]


def test_all_that_is_written_is_guarded_by_the_leader_and_orders_and_phases_by_the_plan() -> None:
    cluster = two_jobs()
    commits = cluster.term_store.commits
    assert {each.guards[LEADER] for each in commits} == {cluster.leader_revision}
    moving = [each for each in commits if any(key.startswith((ORDERS, CHAT.phase, CODE.phase)) for key in each.keys)]
    assert moving
    assert {each.guards[CURRENT] for each in moving} == {cluster.published.revision}


def test_a_job_that_is_paused_is_stopped_and_started_again_later() -> None:
    cluster = two_jobs()
    began = cluster.phase_record("chat").start
    cluster.store.put(CHAT.phase, phase_text(replace(cluster.phase_record("chat"), submission=5)))
    cluster.submit(spec("chat", 1.2, paused=True))
    cluster.look_on()
    assert cluster.phase_record("chat").start == began > 0
    assert (cluster.phase("chat"), cluster.phase_record("chat").reason) == (JobPhase.SUBMITTED, "chat is paused.")
    cluster.settle()
    assert (cluster.working("chat"), len(cluster.working("code"))) == ([], 6)
    cluster.submit(spec("chat", 1.2))
    cluster.now += LONG_S
    cluster.settle()
    assert cluster.phase("chat") is JobPhase.RUNNING
    assert len(cluster.working("chat")) > 1
    assert cluster.phase_record("chat").start > began
    assert cluster.phase_record("chat").submission == 5, "it is the same job as before"


def test_no_start_of_a_job_has_the_number_of_another_one() -> None:
    """Whatever is resumed or submitted again, and whether or not the store still has the phase of before."""
    cluster, starts = two_jobs(), []
    for forgets in (False, True, False, True):
        starts.append(cluster.phase_record("chat").start)
        cluster.submit(spec("chat", paused=True))
        cluster.settle()
        if forgets:
            cluster.store.delete(CHAT.phase)
        cluster.submit(spec("chat"))
        cluster.now += LONG_S
        cluster.settle()
        assert cluster.phase("chat") is JobPhase.RUNNING
    assert sorted(set(starts)) == starts


def test_who_has_just_cancelled_a_job_is_not_overruled() -> None:
    cluster = Cluster()
    cluster.submit(spec("chat"))
    cluster.start("h1")
    cluster.look_on()
    cancelled = phase_text(PhaseRecord(phase=JobPhase.CANCELLED, reason=""))
    cluster.term_store.before = once(lambda: cluster.store.put(CHAT.phase, cancelled), CHAT.phase)
    cluster.settle()
    assert cluster.phase("chat") is JobPhase.CANCELLED
    assert [each.revision for each in cluster.commits_of(CHAT.phase)] == [None]


def test_a_node_that_refuses_is_replaced_by_one_that_does_not() -> None:
    cluster = Cluster()
    cluster.submit(spec("chat", most=1))
    cluster.start("h1", "h2")
    cluster.refusing.add(("h1", "chat"))
    cluster.settle()
    assert cluster.working("chat") == ["h2"]


def test_measured_rates_are_adopted_once() -> None:
    cluster = Cluster()
    cluster.start("h1", "h2")
    cluster.submit(replace(spec("chat"), throughput=MeasuredSteps(1e13)))
    cluster.settle()
    stay = Stay(since_unix_s=NOW, step_s=2.0, steps=60, flops_per_step=1e13)
    now = Now(nodes=2, step_s=2.0, at_unix_s=NOW)
    found = MeasuredJob().with_steps(2, stay, is_global_batch_fixed=True, now=now)
    for second in range(5):  # it goes on measuring the same
        cluster.store.put(CHAT.measured, replace(found, now=replace(now, at_unix_s=NOW + second)).to_json())
        cluster.settle()
    entry = cluster.store.read(CHAT.rates).entry
    assert entry is not None
    assert parse_rates(entry)[2] == pytest.approx(5e12)
    assert cluster.term_store.written().count(CHAT.rates) == 1
    assert cluster.phase("chat") is JobPhase.RUNNING


def test_rates_of_many_jobs_at_once_are_adopted_in_several_transactions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unicron_elastic.rendezvous.plan.mirror.MOST_UNITS", 4000)
    cluster = Cluster()
    cluster.start("h1")
    names = [f"job{place:02}" for place in range(50)]
    now = Now(nodes=1, step_s=2.0, at_unix_s=NOW)
    stay = Stay(since_unix_s=NOW, step_s=2.0, steps=60, flops_per_step=1e13)
    found = MeasuredJob().with_steps(1, stay, is_global_batch_fixed=True, now=now).to_json()
    for name in names:
        cluster.submit(replace(spec(name, max_nodes=4000), throughput=MeasuredSteps(1e13)))
        cluster.store.put(PlannedJobKeys(name).measured, found)
    cluster.look_on()
    written = cluster.term_store.written()
    assert sorted(key for key in written if key.endswith("/rates")) == [PlannedJobKeys(name).rates for name in names]
    assert sum(each.keys[0].endswith("/rates") for each in cluster.term_store.commits) > 2


# -- more nodes than one transaction has room for ------------------------------------------------------------------


def test_350_nodes_get_their_orders_in_several_transactions() -> None:
    cluster = Cluster()
    hosts = [f"h{place:03}" for place in range(350)]
    cluster.start(*hosts)
    cluster.submit(spec("chat", 1.2, most=400), spec("code", 1.0, most=400))
    cluster.look_on()
    assert sorted(cluster.term_store.written(ORDERS)) == [f"{ORDERS}{host}%2Fagent" for host in hosts]
    batches = [len(each.keys) for each in cluster.commits_of(ORDERS)]
    assert len(batches) == 4
    assert max(batches) < MAX_OPERATIONS
    assert set(cluster.orders().values()) == {"chat", "code"}


# -- by right ------------------------------------------------------------------------------------------------------


def test_a_coordinator_that_was_replaced_writes_nothing_any_more() -> None:
    cluster = two_jobs()
    old_store, old = cluster.terms[-1]
    old.wait(0.0)
    cluster.elect()
    count = len(old_store.written())
    cluster.lose("h1")
    cluster.submit(spec("chat", 1.2, paused=True), spec("draft"))
    cluster.start("h9")
    for second in range(20):
        old.wait(0.0)
        old.look(NOW + second)
    assert len(old_store.written()) == count
    assert any(each.revision is None for each in old_store.commits)  # it did try
    cluster.settle()
    assert cluster.phase("draft") is JobPhase.RUNNING


def test_who_reads_the_plan_of_another_leader_goes_on_from_it() -> None:
    cluster = two_jobs()
    plan = cluster.published
    cluster.elect()
    cluster.settle()
    assert cluster.term_store.written() == []
    assert cluster.published == plan


def test_orders_of_a_plan_that_was_overtaken_are_refused_and_the_next_plan_s_are_given() -> None:
    cluster = Cluster()
    cluster.submit(spec("chat"), spec("code", 0.9))
    cluster.start("h1", "h2", "h3", "h4")

    def overtake() -> None:
        entry = cluster.store.read(CURRENT).entry
        assert entry is not None
        cluster.store.put(CURRENT, entry.value)

    cluster.term_store.before = once(overtake, ORDERS)
    cluster.look()
    cluster.look()
    (refused,) = cluster.commits_of(ORDERS)
    assert (refused.revision, cluster.orders()) == (None, {})
    assert refused.guards[CURRENT] < cluster.published.revision
    cluster.settle()
    found = cluster.store.read_prefix(ORDERS).entries
    assert {parse_order(each).plan_revision for each in found} == {cluster.published.revision}
    assert len(found) == 4


def test_a_second_fault_before_the_orders_of_the_first_makes_one_more_plan() -> None:
    cluster = two_jobs()
    first = cluster.published.revision
    chat, code = cluster.working("chat")[0], cluster.working("code")[0]
    cluster.term_store.before = once(lambda: cluster.lose(code), CURRENT)
    cluster.lose(chat)
    cluster.settle()
    plans = cluster.term_store.written().count(CURRENT)
    assert plans == 3  # the first placement, and one for each fault
    assert {seat.host for seat in cluster.published.seats} == set(cluster.leases)
    later = [each for each in cluster.commits_of(ORDERS) if each.guards[CURRENT] > first]
    assert all(each.guards[CURRENT] == cluster.published.revision for each in later if each.revision)


@pytest.mark.parametrize("given", [0, 1, 2])
def test_a_new_coordinator_gives_the_orders_that_are_missing_and_none_twice(given: int) -> None:
    """The one before died after publishing, and after some of its transactions of orders."""
    cluster = Cluster()
    cluster.start(*(f"h{place:03}" for place in range(250)))
    cluster.submit(spec("chat", most=300))
    left = [given]

    def before(keys: tuple[str, ...]) -> None:
        if keys[0].startswith(ORDERS):
            left[0] -= 1
            if left[0] < 0:
                fail()

    cluster.term_store.before = before
    with pytest.raises(StoreUnreachableError):
        cluster.look_on()
    had = set(cluster.term_store.written(ORDERS))
    plan = cluster.published.revision
    cluster.elect()
    cluster.look_on()
    assert cluster.published.revision == plan
    new = cluster.term_store.written()
    assert not had & set(new)
    assert len(new) + len(had) == 250
    assert all(each.revision == each.created for each in cluster.store.read_prefix(ORDERS).entries)


def test_an_order_without_effect_is_given_again_after_a_while() -> None:
    cluster = Cluster()
    cluster.start("h1")
    cluster.submit(spec("chat"))
    cluster.look_on()
    first = cluster.store.read_prefix(ORDERS).entries
    cluster.elect()
    cluster.look_on()
    assert cluster.store.read_prefix(ORDERS).entries == first
    cluster.now += REPEAT_S + 0.1
    cluster.look_on()
    (again,) = cluster.store.read_prefix(ORDERS).entries
    assert again.revision > first[0].revision
    assert again.value == first[0].value


def test_an_order_of_another_plan_does_not_count_as_given() -> None:
    cluster = Cluster()
    cluster.start("h1")
    cluster.submit(spec("chat"))
    cluster.look_on()
    cluster.submit(spec("chat", weight=2.0))
    cluster.elect()
    cluster.look_on()
    order = cluster.order("h1")
    assert order is not None
    assert order.plan_revision == cluster.published.revision


# -- leases --------------------------------------------------------------------------------------------------------


def test_an_order_goes_with_its_node_s_lease() -> None:
    cluster = Cluster()
    cluster.start("h1", "h2")
    cluster.submit(spec("chat"))
    cluster.look_on()
    cluster.lose("h1")
    assert list(cluster.orders()) == ["h2"]


def test_a_node_that_goes_between_decision_and_order_costs_its_own_order_alone() -> None:
    cluster = Cluster()
    cluster.start(*(f"h{place}" for place in range(5)))
    cluster.submit(spec("chat", min_nodes=2))
    cluster.term_store.before = once(lambda: cluster.lose("h2"), ORDERS)
    cluster.look()
    cluster.look()
    assert sorted(cluster.orders()) == ["h0", "h1", "h3", "h4"]
    cluster.settle()
    assert cluster.working("chat") == ["h0", "h1", "h3", "h4"]


def test_a_node_that_is_removed_has_no_orders_after_that() -> None:
    cluster = two_jobs()
    host = cluster.working("chat")[0]
    cluster.remove(host)
    cluster.settle()
    assert host not in {seat.host for seat in cluster.published.seats}


# -- nodes that are kept out ---------------------------------------------------------------------------------------


def test_a_node_that_an_operator_keeps_out_leaves_when_its_job_can_do_without() -> None:
    cluster = two_jobs()
    host = cluster.working("code")[0]
    cluster.keep_out(host, by="alice")
    cluster.settle()
    assert cluster.status(host).state is NodeState.IDLE
    cluster.store.delete(quarantine_key(host))
    cluster.now += LONG_S
    cluster.settle()
    assert cluster.status(host).state is NodeState.WORKING


def test_a_draining_node_stays_while_its_job_would_have_to_wait() -> None:
    cluster = Cluster()
    cluster.submit(spec("chat", min_nodes=2))
    cluster.start("h1", "h2")
    cluster.settle()
    cluster.keep_out("h1", by="alice")
    cluster.settle()
    assert cluster.working("chat") == ["h1", "h2"]
    cluster.start("h3")
    cluster.settle()
    assert cluster.working("chat") == ["h2", "h3"]


def test_a_broken_node_leaves_at_once() -> None:
    cluster = Cluster()
    cluster.submit(spec("chat", min_nodes=2))
    cluster.start("h1", "h2")
    cluster.settle()
    cluster.keep_out("h1", by=LAUNCHER)
    cluster.settle()
    assert (cluster.working("chat"), cluster.phase("chat")) == ([], JobPhase.SUBMITTED)
    assert cluster.store.read(FAULTS).entry is None  # nobody was lost without a word


def test_a_quarantine_that_is_over_by_time_gives_the_node_back() -> None:
    cluster = two_jobs()
    host = cluster.working("code")[0]
    cluster.keep_out(host, by=LAUNCHER, until=NOW + 1000.0)
    cluster.settle()
    assert cluster.status(host).state is NodeState.IDLE
    cluster.now = NOW + 999.0
    cluster.settle()
    assert cluster.status(host).state is NodeState.IDLE
    cluster.now = NOW + 1000.0 + LONG_S
    cluster.settle()
    assert cluster.status(host).state is NodeState.WORKING


def test_an_entry_of_the_quarantine_that_nobody_can_read_keeps_nobody_out() -> None:
    cluster = two_jobs()
    cluster.store.put(quarantine_key("h1"), b"[]")
    cluster.settle()
    assert cluster.status("h1").state is NodeState.WORKING


# -- without sight -------------------------------------------------------------------------------------------------


def test_nothing_is_decided_without_sight_and_it_goes_on_with_it() -> None:
    cluster = two_jobs()
    count = len(cluster.term_store.commits)
    cluster.term_store.cut()
    cluster.lose(cluster.working("chat")[0])
    for second in range(20):
        cluster.now = NOW + second
        cluster.look()
    assert len(cluster.term_store.commits) == count
    cluster.term_store.mend()
    cluster.settle()
    assert {seat.host for seat in cluster.published.seats} == set(cluster.leases)


class Wired(TermStore):
    """A store whose watches tell what a test wants."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster.server)
        self.deliver: dict[str, Deliver] = {}

    def watch(self, snapshot: StoreSnapshot, deliver: Deliver) -> Watch:
        self.deliver[snapshot.prefix] = deliver
        return super().watch(snapshot, deliver)


def wired(cluster: Cluster) -> tuple[Wired, Term]:
    """A coordinator of a cluster in which a node was lost."""
    store = Wired(cluster)
    term = Term(store, cluster.leader_revision, lambda _words: None)
    cluster.lose(cluster.working("chat")[0])
    term.wait(0.0)
    return store, term


@pytest.mark.parametrize("prefix", [PLAN, QUARANTINE])
def test_one_watch_without_sight_is_enough(prefix: str) -> None:
    """Both say the same of a store that cannot be reached, and come back one after the other."""
    store, term = wired(two_jobs())
    for each in (PLAN, QUARANTINE):
        store.deliver[each](Blind(reason="the store is away", silent_s=1.0))
    store.deliver[PLAN if prefix == QUARANTINE else QUARANTINE](Sighted())
    term.wait(0.0)
    term.look(NOW)
    assert store.commits == []
    store.deliver[prefix](Sighted())
    term.wait(0.0)
    term.look(NOW)
    assert store.written()[0] == CURRENT


def test_a_table_that_comes_without_sight_decides_nothing() -> None:
    """Not even that it is time to look again at what was planned."""
    cluster = two_jobs()
    store = Wired(cluster)
    term = Term(store, cluster.leader_revision, lambda _words: None)
    term.look(NOW)
    late = NOW + LONG_S
    store.deliver[PLAN](Blind(reason="the store is away", silent_s=1.0))
    term._inbox.put(TableBuilt(late, None))
    term.wait(0.0)
    term.look(late)
    assert term._state.looked is None
    store.deliver[PLAN](Sighted())
    term.wait(0.0)
    term.look(late)
    assert term._state.looked is not None
    assert store.commits == []  # it still is the best


def test_a_store_that_has_lost_its_data_ends_the_term() -> None:
    cluster = two_jobs()
    cluster.server.lose_data()
    with pytest.raises(StoreReplacedError):
        cluster.term.wait(0.0)


# -- time ----------------------------------------------------------------------------------------------------------


def idle_ticks(cluster: Cluster, count: int, step_s: float = 1.0) -> list[str]:
    """What is written while nothing changes but the time."""
    before = len(cluster.term_store.written())
    for _ in range(count):
        cluster.now += step_s
        cluster.look()
    return cluster.term_store.written()[before:]


def test_while_nothing_changes_nothing_is_written() -> None:
    cluster = two_jobs()
    idle_ticks(cluster, 400)  # once it is looked at again whether the first plan was the best
    assert idle_ticks(cluster, 300) == []


def test_neither_is_with_nodes_that_are_kept_out_and_jobs_that_wait() -> None:
    cluster = two_jobs()
    cluster.keep_out("h1", by=LAUNCHER)
    cluster.keep_out("h2", by="alice")
    cluster.keep_out("unknown", by="alice", until=NOW + 100.0)
    cluster.submit(spec("large", min_nodes=100))
    cluster.settle()
    idle_ticks(cluster, 400)
    assert idle_ticks(cluster, 300) == []


def test_clocks_that_jump_cost_a_plan_each_at_most() -> None:
    cluster = two_jobs()
    cluster.lose(cluster.working("chat")[0])
    cluster.settle()
    jumps = [0.0, 1e6, -1e6, 5e5, -1e6, 1e6, 0.0]
    before = len(cluster.term_store.written())
    for jump in jumps:
        cluster.now = NOW + jump
        cluster.settle()
        idle_ticks(cluster, 20)
    written = cluster.term_store.written()[before:]
    assert set(written) <= {CURRENT}  # nobody is moved by them
    assert len(written) <= len(jumps)


def test_coordinators_whose_clocks_disagree_do_not_take_turns_in_publishing() -> None:
    cluster = two_jobs()
    cluster.lose(cluster.working("code")[0])
    cluster.settle()
    plans = []
    for turn in range(10):
        cluster.now = NOW + (1e6 if turn % 2 else -1e6)
        cluster.elect()
        cluster.settle()
        plans.append(len(cluster.term_store.written()))
    assert max(plans) <= 1
    assert plans[-1] == 0


def test_a_life_with_faults_and_wild_clocks_ends_as_planned() -> None:
    chance = random.Random(7)
    for _ in range(3):
        cluster = two_jobs(8)
        for turn in range(12):
            cluster.now = NOW + chance.uniform(-1e6, 1e6)
            if len(cluster.leases) > 4 and chance.random() < 0.5:
                cluster.lose(chance.choice(sorted(cluster.leases)))
            else:
                cluster.start(f"new{turn}")
            if chance.random() < 0.3:
                cluster.elect()
            if chance.random() < 0.5:
                cluster.look()
            else:
                cluster.settle()
        cluster.settle()
        counts = cluster.published.plan.counts
        assert {name: len(cluster.working(name)) for name in counts} == counts


# -- how often nodes fail ------------------------------------------------------------------------------------------


def faults(cluster: Cluster) -> FaultRate:
    entry = cluster.store.read(FAULTS).entry
    return FaultRate() if entry is None else parse_faults(entry)


def test_a_node_that_is_lost_at_work_is_a_fault_and_an_idle_one_is_none() -> None:
    cluster = two_jobs()
    cluster.start("idle")
    cluster.submit(spec("chat", 1.2, max_nodes=3), spec("code", 1.0, max_nodes=3))
    cluster.settle()
    idle = next(host for host in cluster.leases if cluster.status(host).state is NodeState.IDLE)
    cluster.lose(idle)
    cluster.settle()
    assert faults(cluster).faults == 0
    cluster.lose(cluster.working("chat")[0])
    cluster.settle()
    assert faults(cluster).faults == 1


def test_a_node_lost_while_a_fault_is_written_down_counts_as_well() -> None:
    cluster = two_jobs()
    first, second = cluster.working("chat")[0], cluster.working("code")[0]
    cluster.term_store.before = once(lambda: cluster.lose(second), FAULTS)
    cluster.lose(first)
    cluster.settle()
    assert faults(cluster).faults == 2


def test_two_coordinators_do_not_overwrite_what_each_has_seen() -> None:
    cluster = two_jobs()
    other = faults_text(FaultRate(faults=5, node_s=10.0))
    cluster.term_store.before = once(lambda: cluster.store.put(FAULTS, other), FAULTS)
    cluster.lose(cluster.working("chat")[0])
    cluster.settle()
    assert faults(cluster).faults == 6


def test_the_plan_does_not_wait_for_the_count_of_faults() -> None:
    cluster = two_jobs()
    count = len(cluster.term_store.written())
    cluster.lose(cluster.working("chat")[0])
    cluster.settle()
    written = cluster.term_store.written()[count:]
    assert written.index(CURRENT) < written.index(FAULTS)
    assert written.count(FAULTS) == 1


def test_the_time_without_faults_is_noted_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = two_jobs()
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    cluster.begin()
    cluster.look()
    for _ in range(3):
        now[0] += FAULTS_EVERY_S
        cluster.say(replace(cluster.status("h1"), label=str(now[0])))
        cluster.settle()
    assert cluster.term_store.written() == [FAULTS] * 3
    assert faults(cluster) == FaultRate(faults=0, node_s=3 * FAULTS_EVERY_S * 6)


def test_who_leaves_or_is_kept_out_is_not_lost() -> None:
    def node(host: str, state: NodeState, health: Health = Health.OK) -> NodeStatus:
        job = "" if state is NodeState.IDLE else "chat"
        return NodeStatus(node_id=host, host=host, state=state, job=job, health=health)

    before = ClusterSnapshot(
        nodes=(
            node("a", NodeState.WORKING),
            node("b", NodeState.JOINING),
            node("c", NodeState.LEAVING),
            node("d", NodeState.IDLE),
            node("e", NodeState.WORKING, Health.BROKEN),
            node("f", NodeState.WORKING, Health.DRAINING),
            node("g", NodeState.WORKING),
        )
    )
    assert lost_nodes(before, ClusterSnapshot(nodes=before.nodes[-1:])) == 3
    assert lost_nodes(before, before) == 0


# -- what nobody can read ------------------------------------------------------------------------------------------


def test_what_nobody_can_read_is_told_once_and_keeps_nobody_from_being_planned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = two_jobs()
    odd = [f"{NODE_RECORDS}odd", PlannedJobKeys("odd").spec, CHAT.measured]
    for key in odd:
        cluster.store.put(key, b"{}")
    with caplog.at_level(logging.WARNING):
        cluster.settle()
        cluster.start("h9")
        cluster.settle()
    told = [record.getMessage() for record in caplog.records]
    assert sorted(text.split(" ")[0] for text in told) == sorted(odd)
    assert len(cluster.working("chat")) + len(cluster.working("code")) == 7


def test_a_plan_that_nobody_can_read_is_replaced() -> None:
    cluster = two_jobs()
    odd = cluster.store.put(CURRENT, b"[]")
    cluster.settle()
    assert [each.guards[CURRENT] for each in cluster.commits_of(CURRENT)][-1] == odd
    assert cluster.published.plan.counts == {"chat": len(cluster.working("chat")), "code": len(cluster.working("code"))}
    assert cluster.phase("chat") is JobPhase.RUNNING


# -- on a real etcd ------------------------------------------------------------------------------------------------


@pytest.fixture
def etcd_store(shared_etcd: EmbeddedEtcd) -> EtcdStore:
    return EtcdStore(StoreAddress.parse(shared_etcd.endpoint), f"/test/{uuid.uuid4().hex}")


def look_until(term: Term, condition: Callable[[], object]) -> None:
    """Looks at each news until it holds."""

    def look() -> object:
        term.wait(0.02)
        term.look(NOW)
        return condition()

    wait_until(look)


def test_an_etcd_takes_plans_and_orders_by_the_leader_s_right_alone(etcd_store: EtcdStore) -> None:
    hosts = [f"h{place:03}" for place in range(130)]
    with etcd_store as store:
        leader = store.put(LEADER, b"leader")
        leases = {host: store.grant(60.0).lease_id for host in hosts[:1]}
        for host in hosts:
            text = status_text(NodeStatus(node_id=f"{host}/agent", host=host)).encode()
            store.put(status_key(f"{host}/agent"), text, leases.get(host))
        store.put(CHAT.spec, spec_text(spec("chat", most=200)))
        said: list[str] = []
        term = Term(store, leader, said.append)
        look_until(term, lambda: len(store.read_prefix(ORDERS).entries) == len(hosts))
        plan = read_published(store)
        assert plan is not None
        assert (plan.plan.counts, said) == ({"chat": 130}, [plan.reason])
        assert store.revoke(leases["h000"])
        assert read_order(store, "h000") is None
        look_until(term, lambda: (found := read_published(store)) is not None and found.plan.counts == {"chat": 129})

        store.put(LEADER, b"another")
        before = store.read_prefix(PLAN)
        store.put(CODE.spec, spec_text(spec("code")))
        look_until(term, lambda: "code" in term._mirror.jobs())
        term.look(NOW)
        after = store.read_prefix(PLAN)
        assert {each.key for each in after.entries} == {each.key for each in before.entries} | {CODE.spec}
        assert max(each.revision for each in after.entries if each.key != CODE.spec) <= before.revision
