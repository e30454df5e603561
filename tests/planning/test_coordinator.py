"""The coordinator of several jobs: what it decides, when it does not, and what it tells."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import decisions
import pytest
from fake_cluster import A, B, FakeCluster, job, two_jobs

from unicron_elastic.planning.allocate.cluster import Cluster, NodesLost, TaskSubmitted
from unicron_elastic.planning.allocate.plan_table import build_table
from unicron_elastic.planning.coordinate import proposal
from unicron_elastic.planning.coordinate.coordinator import (
    REPEAT_S,
    AdoptRates,
    BuildTable,
    Command,
    CoordinatorState,
    CoordinatorTick,
    PublishPlan,
    SnapshotSeen,
    TableBuilt,
    handle,
)
from unicron_elastic.planning.coordinate.node_status import NodeStatus
from unicron_elastic.planning.coordinate.proposal import propose
from unicron_elastic.planning.coordinate.published import Published
from unicron_elastic.planning.coordinate.reconcile import reconcile
from unicron_elastic.planning.coordinate.situation import Bounds, changes_of, situation_of
from unicron_elastic.planning.coordinate.snapshot import JobPhase
from unicron_elastic.planning.model.tasks import Task

GOLDEN = Path(__file__).parent / "golden" / "plans"


@dataclass
class ToldCluster(FakeCluster):
    """`ToldCluster` does what the words of a scenario say, and keeps what its coordinator answers."""

    answers: list[Command] = field(default_factory=list)
    lost: list[NodeStatus] = field(default_factory=list)

    def coordinate(self) -> tuple[Command, ...]:
        commands = super().coordinate()
        self.answers += commands
        return commands

    def submit(self, found: Any, *rates: float, **options: Any) -> None:
        """A job, or one with this name and these rates."""
        super().submit(job(found, list(rates), **options) if isinstance(found, str) else found)

    def later(self, seconds: float) -> None:
        self.reasons(seconds)

    def lose_one_of(self, name: str) -> None:
        self.lost.append(self.nodes[self.node_of(name)])
        self.lose(self.node_of(name))

    def start_lost(self) -> None:
        for node in self.lost:
            self.start(node.host, node.label)

    def drain_one_of(self, name: str) -> None:
        self.drain(self.node_of(name))

    def refuses(self, host: str, name: str) -> None:
        self.refusing.add((host, name))

    def all_refuse(self, name: str) -> None:
        self.refusing |= {(node.host, name) for node in self.nodes.values()}


def cluster_of(hosts: int = 0) -> ToldCluster:
    """Some hosts in two racks."""
    cluster = ToldCluster()
    for place in range(hosts):
        cluster.start(f"h{place}", f"rack{place % 2}")
    return cluster


def told_jobs() -> ToldCluster:
    """A and B, which run on three nodes each."""
    cluster = cluster_of(6)
    for each in (A, B):
        cluster.submit(each)
    cluster.settle()
    return cluster


def answer(cluster: ToldCluster, event: Callable[[], object]) -> Iterator[str]:
    """Yield what the coordinator answers, and how many nodes work for each job if that has changed."""
    before = cluster.held()
    cluster.answers.clear()
    event()
    yield from (decisions.shown(command, short) for command in cluster.answers)
    if cluster.held() != before:
        yield f"({', '.join(f'{name} has {count}' for name, count in cluster.held().items())})"


def short(each: Any) -> str:
    """Return a field's value in a few words."""
    if isinstance(each, Published):
        return f"<{' '.join(f'{seat.host}:{seat.job}' for seat in each.seats)}>"
    if isinstance(each, Cluster):
        return f"<{each.nodes} nodes>"
    if isinstance(each, tuple) and each and isinstance(each[0], Task):
        return f"<{' '.join(task.name for task in each)}>"
    return repr(each)


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.txt")), ids=lambda path: path.stem)
def test_the_coordinator_answers_as_it_is_written(path: Path, request: pytest.FixtureRequest) -> None:
    begins = {"cluster": cluster_of, "two_jobs": told_jobs}
    text = path.read_text(encoding="utf-8")
    decisions.check(path, decisions.played(text, begins, decisions.names_of(JobPhase), answer), request)


def test_every_command_occurs_in_a_scenario() -> None:
    assert decisions.never_told(GOLDEN, get_args(Command)) == []


def test_a_lost_node_is_answered_from_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = two_jobs()
    table = cluster.state.table
    assert table is not None
    cluster.lose(cluster.node_of("b"))
    computed = propose(cluster.snapshot(), cluster.wall)
    monkeypatch.setattr(proposal, "plan_for", None)  # nothing is computed
    monkeypatch.setattr(type(table), "plan", lambda self, event: self.plans[event])
    assert propose(cluster.snapshot(), cluster.wall, table) == computed
    assert computed.reason.startswith("Job b lost a node")


@pytest.mark.parametrize("what", ["joined", "submitted", "finished"])
def test_the_table_changes_no_plan(what: str) -> None:
    cluster = two_jobs()
    if what == "joined":
        cluster.start("new")
    elif what == "submitted":
        cluster.submit(job("c", [0, 50, 100]))
    else:
        cluster.end("b", JobPhase.FINISHED)
    assert propose(cluster.snapshot(), cluster.wall, cluster.state.table) == propose(cluster.snapshot(), cluster.wall)


def test_a_plan_that_was_overtaken_is_replaced_and_not_carried_out() -> None:
    cluster = two_jobs()
    cluster.submit(job("c", [0, 50, 100]))
    cluster.coordinate()
    first = cluster.published
    assert first is not None
    stale = reconcile(cluster.snapshot(), first)
    assert stale
    cluster.lose(cluster.node_of("a"))
    (publish,) = cluster.coordinate()
    assert isinstance(publish, PublishPlan)
    assert publish.expected_revision == first.revision
    assert publish.reason.startswith("Job a lost a node")
    before = cluster.nodes.copy(), cluster.jobs.copy()
    for command in stale:  # they come late, and are refused
        cluster.obey(command)
    assert (cluster.nodes, cluster.jobs) == before
    cluster.settle()
    assert cluster.held() == {"a": 3, "b": 0, "c": 2}


def test_a_plan_is_published_only_over_the_one_it_was_made_from() -> None:
    cluster = two_jobs()
    cluster.start("new")
    (publish,) = handle(CoordinatorState(), SnapshotSeen(cluster.wall, cluster.snapshot()))[1]
    cluster.obey(publish)
    found = cluster.published
    cluster.obey(publish)  # of one who did not know
    assert cluster.published is found


def test_a_command_is_repeated_only_after_a_while() -> None:
    cluster = two_jobs()
    cluster.start("new")
    state, first = handle(cluster.state, SnapshotSeen(cluster.wall, cluster.snapshot()))
    assert len(first) == 1
    state, again = handle(state, CoordinatorTick(cluster.wall + REPEAT_S - 0.1))
    assert again == ()
    state, again = handle(state, CoordinatorTick(cluster.wall + REPEAT_S))
    assert [type(each) for each in again] == [PublishPlan]
    _, again = handle(state, CoordinatorTick(cluster.wall - 1000.0))  # the clock was set back
    assert [type(each) for each in again] == [PublishPlan]


def test_a_table_is_built_once_everything_is_in_its_place() -> None:
    cluster = two_jobs()
    state = CoordinatorState()
    state, (command,) = handle(state, SnapshotSeen(cluster.wall, cluster.snapshot()))
    assert isinstance(command, BuildTable)
    state, commands = handle(state, CoordinatorTick(cluster.wall))
    assert commands == ()
    state, commands = handle(state, TableBuilt(cluster.wall, None))  # it failed, and is not tried again
    assert commands == ()
    assert state.table is None


def test_the_table_has_what_may_come_again_and_any_two_losses() -> None:
    cluster = two_jobs()
    cluster.end("b", JobPhase.FINISHED)
    cluster.settle()
    _, (command,) = handle(CoordinatorState(), SnapshotSeen(cluster.wall, cluster.snapshot()))
    assert isinstance(command, BuildTable)
    assert [task.name for task in command.expected] == ["b"]
    table = build_table(command.cluster, command.expected, with_pairs=command.with_pairs)
    assert NodesLost(("a", "a")) in table.plans
    cluster.submit(B)
    _, event = situation_of(cluster.snapshot(), changes_of(cluster.snapshot()), Bounds())
    assert event in table.plans
    assert isinstance(event, TaskSubmitted)


def test_rates_are_adopted_when_they_have_changed_by_enough() -> None:
    cluster = two_jobs()
    cluster.measure("a", 1.04)
    assert cluster.coordinate() == ()
    cluster.measure("a", 1.04)
    (adopt,) = cluster.coordinate()
    assert isinstance(adopt, AdoptRates)
    assert adopt.reason == "The rate of a on 4 nodes has changed by 8 %."
    found = cluster.jobs["b"]
    cluster.jobs["b"] = replace(found, newest_flops=(*found.newest_flops, 7e12))
    (adopt,) = [each for each in cluster.coordinate() if isinstance(each, AdoptRates)]
    assert adopt.reason == "Rates of b are known for 7 nodes now."


def test_a_job_without_rates_waits_for_them() -> None:
    cluster = two_jobs()
    cluster.submit(replace(job("c", [0, 50, 100]), rates_flops=()))
    cluster.settle()
    assert cluster.held()["c"] == 2


def test_every_reason_is_one_sentence() -> None:
    cluster = two_jobs()
    cluster.lose(cluster.node_of("a"))
    cluster.lose(cluster.node_of("b"))
    cluster.start("new")
    cluster.submit(job("c", [0, 50]))
    (told,) = cluster.reasons(5.0)
    assert told.startswith("Since the last plan: 2 lost nodes, 1 new node, 1 new job")
    assert told.endswith(".")
    assert told.count(". ") == 0
