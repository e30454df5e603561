"""The coordinator in random clusters: what must hold after every step, and where they all end."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from fake_cluster import MOVING, FakeCluster, job
from hypothesis import given, settings
from hypothesis import strategies as st

from unicron_elastic.planning.allocate.cluster import NothingChanged
from unicron_elastic.planning.allocate.plan_table import plan_for
from unicron_elastic.planning.coordinate.coordinator import Command, CoordinatorState, PublishPlan
from unicron_elastic.planning.coordinate.node_status import Health, NodeState
from unicron_elastic.planning.coordinate.proposal import why_overtaken
from unicron_elastic.planning.coordinate.reconcile import LendNode, ReturnNode, reconcile
from unicron_elastic.planning.coordinate.situation import Bounds, PlanDifferences, situation_of
from unicron_elastic.planning.coordinate.snapshot import ClusterSnapshot, JobPhase, JobStatus
from unicron_elastic.planning.model.tasks import Transition

HOSTS = [f"h{place}" for place in range(8)]
UNEVEN = st.sampled_from([0.0, 1.0, 2.0, 3.0, 3.0, 5.0, 7.0, 8.5, 1e-3, 20.0])  # neither concave nor monotone
TRANSITIONS = st.sampled_from(
    [
        Transition.of(0.0),
        Transition.of(10.0),
        Transition.of(1e6),
        Transition(grow_s=0.0, shrink_s=1e4, replace_s=5e3, stop_s=1e4),
    ]
)


@st.composite
def catalogues(draw: st.DrawFn) -> dict[str, JobStatus]:
    """What may be submitted, by name."""
    found = {}
    for name in "abcd":
        unit, least = draw(st.sampled_from([1, 1, 2, 3])), draw(st.integers(1, 4))
        fewest = -(-least // unit) * unit
        each = job(
            name,
            [0.0, *draw(st.lists(UNEVEN, min_size=1, max_size=8))],
            min_nodes=least,
            unit_nodes=unit,
            weight=draw(st.sampled_from([0.0, 0.5, 1.0, 1.0, 2.0])),
            max_nodes=draw(st.sampled_from([None, None, fewest, fewest + 2])),
        )
        found[name] = replace(each, transition=draw(TRANSITIONS))
    return found


Action = tuple[str, int, int]
TO_NODES = ("lose", "return", "flap", "die", "drain", "undrain", "break", "refuse", "relent")
TO_JOBS = ("submit", "submit", "finish", "cancel", "weight", "pause", "pin", "free", "measure")
TO_LEADER = ("leader", "jump", "wait", "wait", "long wait")
KINDS = TO_NODES + TO_JOBS + TO_LEADER
ACTIONS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 7), st.integers(0, 99)), min_size=10, max_size=40)


def act(cluster: FakeCluster, action: Action) -> None:
    """Lets one thing happen, if it can."""
    kind, which, how = action
    if kind in TO_NODES:
        act_on_nodes(cluster, kind, which, how)
    elif kind in TO_JOBS:
        act_on_jobs(cluster, kind, "abcd"[which % 4], how)
    elif kind == "leader":
        cluster.state = CoordinatorState()
    elif kind == "jump":
        cluster.skew_s += (how - 50) * 40.0
    else:
        for _ in range(how % 6):
            step(cluster, 4.0 if kind == "wait" else 100.0)


def act_on_nodes(cluster: FakeCluster, kind: str, which: int, how: int) -> None:
    host = HOSTS[which]
    found = next((node for node in cluster.nodes.values() if node.host == host), None)
    match kind:
        case "lose" | "flap" if found:
            cluster.lose(found.node_id)
            if kind == "flap":
                step(cluster, 1.0 + how)
                cluster.start(host, f"rack{which % 2}")
        case "return":
            cluster.start(host, f"rack{which % 2}")
        case "die":
            moving = sorted(node.node_id for node in cluster.nodes.values() if node.state in MOVING)
            if moving:
                cluster.lose(moving[how % len(moving)])
        case "drain" | "undrain" if found:
            cluster.drain(found.node_id, is_drained=kind == "drain")
        case "break" if found:
            cluster.nodes[found.node_id] = replace(found, health=Health.BROKEN)
        case "refuse":
            cluster.refusing.add((host, "abcd"[how % 4]))
        case "relent":
            cluster.refusing.clear()


def act_on_jobs(cluster: FakeCluster, kind: str, name: str, how: int) -> None:
    if kind == "submit":
        return cluster.submit(cluster.catalogue[name])
    if name not in cluster.jobs or not cluster.jobs[name].is_alive:
        return None
    match kind:
        case "finish" | "cancel":
            cluster.end(name, JobPhase.FINISHED if kind == "finish" else JobPhase.CANCELLED)
        case "weight":
            cluster.respec(name, weight=how / 25.0)
        case "pause":
            cluster.respec(name, paused=not cluster.jobs[name].spec.paused)
        case "pin":
            cluster.respec(name, pinned_nodes=cluster.jobs[name].spec.least_nodes)
        case "free":
            cluster.respec(name, pinned_nodes=None, paused=False)
        case "measure":
            cluster.measure(name, 0.8 + how / 250.0)
    return None


def step(cluster: FakeCluster, seconds: float) -> None:
    """Some time, one look of the coordinator, and everything that must hold then."""
    cluster.pass_time(seconds)
    before = cluster.snapshot()
    commands = cluster.coordinate()
    check_commands(before, commands)
    if before.published is not None and not why_overtaken(before, cluster.wall):
        check_plan(before)
    for name, count in Counter(node.host for node in cluster.nodes.values()).items():
        assert count == 1, name


def check_commands(snapshot: ClusterSnapshot, commands: tuple[Command, ...]) -> None:
    moved = [each for each in commands if isinstance(each, LendNode | ReturnNode)]
    assert len({each.node_id for each in moved}) == len(moved), "a node is moved twice"
    assert all(each.plan_revision == snapshot.plan_revision for each in moved)
    known = {node.node_id: node for node in snapshot.nodes}
    leaving = Counter[str]()
    for each in moved:
        node = known[each.node_id]
        assert node.job == each.source
        assert node.heads_for != (each.target if isinstance(each, LendNode) else "")
        assert each.reason.endswith(".")
        assert "\n" not in each.reason
        if node.state is NodeState.WORKING and node.health is not Health.BROKEN:
            leaving[node.job] += 1
    published = snapshot.published
    if any(isinstance(each, PublishPlan) for each in commands):
        assert not moved, "a plan that was overtaken is carried out"
    for name, count in leaving.items():
        found = snapshot.job(name)
        if found is not None and found.phase is JobPhase.RUNNING and published and published.plan.counts.get(name):
            working = sum(node.job == name and node.state is NodeState.WORKING for node in snapshot.sound_nodes)
            assert working - count >= found.spec.min_nodes, f"{name} is taken below its minimum"


def check_plan(snapshot: ClusterSnapshot) -> None:
    """A plan that holds gives every job its minimum or nothing, and none waits for nodes that are idle."""
    published = snapshot.published
    assert published is not None
    seats = published.job_of
    idle = [node for node in snapshot.sound_nodes if not seats[node.node_id] and node.health is Health.OK]
    for each in snapshot.jobs:
        if not each.is_planned:
            assert each.name not in published.plan.counts
            continue
        count = published.plan.counts[each.name]
        assert count == 0 or each.spec.min_nodes <= count <= (each.spec.max_nodes or count)
        is_refused = any(refusal.job == each.name for node in snapshot.nodes for refusal in node.refusals)
        if not count and not each.spec.paused and not is_refused:
            assert not any(nodes <= len(idle) for nodes in runnable(each)), f"{each.name} waits, and {len(idle)} idle"


def runnable(found: JobStatus) -> list[int]:
    """All numbers of nodes on which a job runs."""
    counts = [units * found.spec.unit_nodes for units, rate in enumerate(found.rates_flops) if rate]
    most = found.spec.max_nodes or max(counts, default=0)
    return [n for n in counts if found.spec.min_nodes <= n <= most and found.spec.pinned_nodes in (None, n)]


def check_idempotence(cluster: FakeCluster) -> None:
    """The same snapshot gives the same commands; once they are carried out, there are none."""
    snapshot = cluster.snapshot()
    if snapshot.published is None or why_overtaken(snapshot, cluster.wall):
        return
    first = reconcile(snapshot, snapshot.published)
    assert reconcile(snapshot, snapshot.published) == first
    other = cluster.copy()
    for command in first:
        other.obey(command)
    again = reconcile(other.snapshot(), snapshot.published)
    assert not {each.node_id for each in again if isinstance(each, LendNode | ReturnNode)} & {
        each.node_id for each in first if isinstance(each, LendNode | ReturnNode)
    }
    for _ in range(30):
        other.pass_time(21.0)
        for command in reconcile(other.snapshot(), snapshot.published):
            other.obey(command)
    assert reconcile(other.snapshot(), snapshot.published) == ()
    assert {n.node_id: n.job for n in other.snapshot().sound_nodes} == snapshot.published.job_of


def check_end(cluster: FakeCluster) -> None:
    """Everything is in its place, and no better plan is to be had."""
    snapshot = cluster.snapshot()
    if snapshot.published is None:
        assert not snapshot.nodes
        return
    assert {node.node_id: node.job for node in snapshot.sound_nodes} == snapshot.published.job_of
    held = cluster.held()
    assert held == {**dict.fromkeys(held, 0), **snapshot.published.plan.counts}
    if any(seat.is_draining and seat.job for seat in snapshot.published.seats):
        return  # the documented reason to be content with less: a job would have to wait without a draining node
    here, _ = situation_of(snapshot, PlanDifferences(), Bounds())
    assert plan_for(here, NothingChanged()).counts == snapshot.published.plan.counts


def cluster_of(seed: int, catalogue: dict[str, JobStatus]) -> FakeCluster:
    cluster = FakeCluster(seed=seed, catalogue=catalogue)
    cluster.chance = random.Random(seed)
    for place, host in enumerate(HOSTS[:6]):
        cluster.start(host, f"rack{place % 2}")
    for name in "ab":
        cluster.submit(catalogue[name])
    return cluster


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**20), catalogues(), ACTIONS, st.sampled_from([0.0, 6.0]), st.sampled_from([0.0, 0.3]))
def test_whatever_happens_the_invariants_hold_and_the_optimum_is_reached(
    seed: int, catalogue: dict[str, JobStatus], actions: list[Action], most_delay_s: float, lost_share: float
) -> None:
    cluster = cluster_of(seed, catalogue)
    cluster.most_delay_s, cluster.lost_share = most_delay_s, lost_share
    for action in actions:
        act(cluster, action)
        step(cluster, 2.0)
        check_idempotence(cluster)
    cluster.lost_share = 0.0
    cluster.settle()
    check_idempotence(cluster)
    check_end(cluster)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**20), catalogues(), ACTIONS, st.randoms(use_true_random=False))
def test_a_new_leader_at_any_moment_changes_nothing(
    seed: int, catalogue: dict[str, JobStatus], actions: list[Action], when: random.Random
) -> None:
    lasting, replaced = cluster_of(seed, catalogue), cluster_of(seed, catalogue)
    replaced.builds_tables = False  # nor does it matter whether a table was ready
    for action in actions:
        for cluster in (lasting, replaced):
            act(cluster, action)
            step(cluster, 2.0)
        if when.random() < 0.5:
            replaced.state = CoordinatorState()
    for cluster in (lasting, replaced):
        cluster.settle()
    assert replaced.snapshot().published is not None or lasting.snapshot().published is None
    assert replaced.nodes == lasting.nodes
    if replaced.published is not None and lasting.published is not None:
        assert replaced.published.seats == lasting.published.seats
        assert replaced.published.reason == lasting.published.reason
