"""What the agent of a node does with its orders: scenarios, and any events in any order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGINT, SIGKILL
from typing import Any, get_args

import decisions
import pytest
from fake_cluster import spec
from hypothesis import given
from hypothesis import strategies as st

from unicron_elastic.planning.coordinate.agent import (
    END_S,
    AgentState,
    ChildEnded,
    ChildWorks,
    Claimed,
    Command,
    EndJob,
    Event,
    JobSeen,
    NodeTick,
    Ordered,
    RecallChild,
    SayStatus,
    SnapshotsKept,
    StartChild,
    StopChild,
    Stopped,
    TellJob,
    TellPeople,
    WatchJob,
    handle,
)
from unicron_elastic.planning.coordinate.node_status import REFUSED_S, NodeState, NodeStatus
from unicron_elastic.planning.coordinate.snapshot import JobPhase
from unicron_elastic.planning.model.jobs import JobSpec

GOLDEN = Path(__file__).parent / "golden" / "node_agent"
IDLE, JOINING, WORKING, LEAVING = NodeState.IDLE, NodeState.JOINING, NodeState.WORKING, NodeState.LEAVING


@dataclass
class Node:
    """One agent, its child, and what it was told to do; checks after each event what must always hold."""

    state: AgentState = field(default_factory=lambda: AgentState(status=NodeStatus(node_id="n", host="h")))
    now: float = 1.7e9
    has_child: bool = False
    log: list[Command] = field(default_factory=list)  # of the latest event
    said: NodeStatus = field(default_factory=lambda: NodeStatus(node_id="n", host="h"))
    watched: str = ""
    is_killed: bool = False  # the child

    def feed(self, event: Event) -> list[Command]:
        if isinstance(event, ChildEnded):
            self.has_child = self.is_killed = False
        before = self.state
        self.state, commands = handle(self.state, event)
        self.log = list(commands)
        if isinstance(event, Claimed) and self.state.is_claimed and not before.is_claimed:
            assert not self.has_child
            self.has_child = True  # whoever claims starts it
        for command in commands:
            self._do(command)
        self._check()
        return self.log

    def _do(self, command: Command) -> None:
        match command:
            case StartChild():
                assert not self.has_child, "two children at once"
                assert command.spec.name == self.state.status.job
                self.has_child = True
            case StopChild() | RecallChild():
                assert self.has_child, "there is nothing to stop"
                self.is_killed |= command == StopChild(SIGKILL)
            case SayStatus(status):
                self.said = status
            case WatchJob(job):
                self.watched = job

    def _check(self) -> None:
        state, status = self.state, self.state.status
        NodeStatus(**{name: getattr(status, name) for name in NodeStatus.__slots__})  # raises for a contradiction
        assert self.said == status
        assert self.watched == status.job
        assert state.has_child == self.has_child
        assert self.has_child or status.state in (IDLE, JOINING)
        assert not self.has_child or status.state is not IDLE
        if state.is_stopping:
            assert status.heads_for == ""
        ends = [isinstance(each, EndJob) for each in self.log]
        assert ends == sorted(ends, reverse=True), "how a job has ended comes first"

    # -- what happens --------------------------------------------------------------------------------------------------

    def order(self, target: str, why_not: str = "", **more: str) -> list[Command]:
        return self.feed(Ordered(at_unix_s=self.now, target=target, reason=f"to {target}", why_not=why_not, **more))

    def see(
        self, job: str = "a", phase: JobPhase | None = JobPhase.RUNNING, start: int = 7, **more: Any
    ) -> list[Command]:
        told = {"spec": spec(job), "nodes": 2, **more}
        return self.feed(JobSeen(at_unix_s=self.now, job=job, phase=phase, start=start, **told))

    def works(self) -> list[Command]:
        return self.feed(ChildWorks(at_unix_s=self.now))

    def ends(self, code: int | None = 0, verdict: str = "", why: str = "", **more: Any) -> list[Command]:
        return self.feed(ChildEnded(at_unix_s=self.now, exit_code=code, verdict=verdict, why=why, **more))

    def claim(self, job: str = "loose") -> list[Command]:
        return self.feed(Claimed(at_unix_s=self.now, job=job))

    def stop(self) -> list[Command]:
        return self.feed(Stopped(at_unix_s=self.now))

    def keeps(self, *jobs: str) -> list[Command]:
        return self.feed(SnapshotsKept(at_unix_s=self.now, jobs=jobs))

    def works_for(self, job: str) -> list[Command]:
        """It is ordered there, and has come so far."""
        return [*self.order(job), *self.see(job), *self.works()]

    def wait(self, seconds: float) -> list[Command]:
        self.now += seconds
        return self.feed(NodeTick(at_unix_s=self.now))

    @property
    def at(self) -> tuple[NodeState, str, str]:
        status = self.state.status
        return status.state, status.job, status.towards


def answer(_node: Node, event: Callable[[], list[Command]]) -> Iterator[str]:
    """Yield what a node's agent does, with what it says of the node."""
    yield from (decisions.shown(command, short) for command in event())


def short(each: Any) -> str:
    """Return a field's value in a few words."""
    if isinstance(each, NodeStatus):
        told = [each.state.value, each.job, each.towards and f"then {each.towards}"]
        told += [f"refuses {refusal.job}" for refusal in each.refusals]
        told += [f"keeps {job}" for job in each.keeps]
        return f"<{', '.join(filter(None, told))}>"
    return f"<{each.name}>" if isinstance(each, JobSpec) else repr(each)


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.txt")), ids=lambda path: path.stem)
def test_a_node_answers_as_it_is_written(path: Path, request: pytest.FixtureRequest) -> None:
    words = {**decisions.names_of(JobPhase), "SIGINT": SIGINT}
    decisions.check(path, decisions.played(path.read_text(encoding="utf-8"), {"node": Node}, words, answer), request)


def test_every_command_occurs_in_a_scenario() -> None:
    assert decisions.never_told(GOLDEN, get_args(Command)) == []


def working(job: str = "a") -> Node:
    node = Node()
    node.order(job)
    node.see(job)
    node.works()
    assert node.at == (WORKING, job, "")
    return node


def kinds(commands: list[Command]) -> list[type]:
    return [type(each) for each in commands if not isinstance(each, SayStatus | WatchJob | TellPeople)]


def test_an_order_for_what_cannot_run_here_is_refused_before_the_old_job_is_left() -> None:
    node = working()
    said = node.order("b", why_not="its script is not there.")
    assert said[1:] == [TellJob("b", "h refuses b: its script is not there.")]
    assert node.at == (WORKING, "a", "")
    assert node.state.status.refuses("b", node.now)
    assert not node.state.status.refuses("b", node.now + REFUSED_S)
    for _ in range(500):  # others are forgotten in time
        node.now += REFUSED_S / 5
        node.order("b", why_not="no.")
        node.order("c", why_not="no.")
    assert [each.job for each in node.state.status.refusals] == ["b", "c"]


@pytest.mark.parametrize(
    ("code", "verdict", "exit_code"),
    [
        (0, "well", 0),
        (1, "failed", 1),
        (3, "failed", 3),
        (0, "", 0),
        (1, "well", 0),
        (0, "failed", 1),
        (-9, "failed", 1),
    ],
)
def test_the_end_of_a_job_is_written_before_the_node_offers_itself(code: int, verdict: str, exit_code: int) -> None:
    node = working()
    end, *others = node.ends(code, verdict)
    assert isinstance(end, EndJob)
    assert (end.job, end.start, end.exit_code) == ("a", 7, exit_code)
    assert kinds(others) == []
    assert node.at == (IDLE, "", "")


def test_why_a_job_has_failed_is_said_once() -> None:
    end = working().ends(1, "failed", why_failed="rank 1 raised ValueError: bad data. No restart: there is none.")[0]
    assert isinstance(end, EndJob)
    assert end.reason == "a has failed, as h says: rank 1 raised ValueError: bad data. No restart: there is none."


def _joining() -> Node:
    node = Node()
    node.order("a")
    return node


def _starting() -> Node:
    node = _joining()
    node.see()
    return node


def _recalled() -> Node:
    node = working()
    node.order("b")
    return node


def _claiming() -> Node:
    node = Node()
    node.claim()
    return node


@pytest.mark.parametrize("make", [Node, _joining, _starting, working, _recalled, _claiming])
def test_an_agent_that_ends_leaves_whatever_it_has(make: Any) -> None:
    node = make()
    had_child = node.has_child
    is_asked_first = make is working  # the others are to do without it
    first = ([RecallChild] if is_asked_first else [StopChild]) if had_child else []
    assert kinds(node.stop()) == first
    assert kinds(node.order("c")) == []
    assert kinds(node.claim()) == []
    assert kinds(node.stop()) == ([StopChild] if is_asked_first else [])
    if had_child:
        assert node.wait(END_S) == [StopChild(SIGKILL)]
        node.ends(-9)
    assert node.at == (IDLE, "", "")
    assert kinds(node.see("a")) == []


# -- any events in any order -------------------------------------------------------------------------------------------

JOBS = st.sampled_from(["a", "b"])
WAITS = st.sampled_from([0.0, 0.25, 30.0, 61.0, 601.0, -3600.0])
HAPPENINGS = st.one_of(
    st.tuples(st.just("order"), st.sampled_from(["a", "b", ""]), st.sampled_from(["", "", "it must not."])),
    st.tuples(st.just("see"), JOBS, st.sampled_from([*JobPhase, None]), st.integers(1, 3), st.booleans()),
    st.tuples(st.just("works")),
    st.tuples(st.just("ends"), st.sampled_from([0, 1, -9, None]), st.sampled_from(["", "well", "failed"])),
    st.tuples(st.just("claim"), JOBS),
    st.tuples(st.just("wait"), WAITS),
    st.tuples(st.just("stop")),
)


def _happen(node: Node, happening: tuple[Any, ...]) -> None:
    match happening:
        case ("see", job, phase, start, is_there):
            commands = node.see(job, phase, start, spec=spec(job) if is_there else None)
            assert phase is not None or not {StopChild, RecallChild} & set(kinds(commands)), "absence ends nothing"
        case ("ends", code, verdict):
            if node.has_child:
                node.ends(code, verdict)
        case (what, *values):
            getattr(node, what)(*values)


@given(st.lists(HAPPENINGS, max_size=40))
def test_whatever_happens_there_is_one_child_and_a_status_that_can_be(happenings: list[tuple[Any, ...]]) -> None:
    node = Node()
    for happening in happenings:
        _happen(node, happening)


@given(st.lists(HAPPENINGS, max_size=25), st.sampled_from(["stop", "order"]))
def test_whatever_has_happened_a_node_that_is_to_be_idle_becomes_so(
    happenings: list[tuple[Any, ...]], how: str
) -> None:
    node = Node()
    for happening in happenings:
        _happen(node, happening)
    if how == "stop":
        node.stop()
    else:
        node.order("")
    for _ in range(3):  # its child listens to nothing but SIGKILL
        if node.has_child and node.is_killed:
            node.ends(-9)
        node.wait(61.0)
    assert node.at == (IDLE, "", "")
