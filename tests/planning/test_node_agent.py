"""What the agent of a node does with its orders: scenarios, and any events in any order."""

from __future__ import annotations

from dataclasses import dataclass, field
from signal import SIGINT, SIGKILL, SIGTERM
from typing import Any

import pytest
from fake_cluster import spec
from hypothesis import given
from hypothesis import strategies as st

from unicron_elastic.planning.coordinate.agent import (
    END_S,
    RECALL_S,
    STOP_S,
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

    def order(self, target: str, why_not: str = "") -> list[Command]:
        return self.feed(Ordered(at_unix_s=self.now, target=target, reason=f"to {target}", why_not=why_not))

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

    def wait(self, seconds: float) -> list[Command]:
        self.now += seconds
        return self.feed(NodeTick(at_unix_s=self.now))

    @property
    def at(self) -> tuple[NodeState, str, str]:
        status = self.state.status
        return status.state, status.job, status.towards


def working(job: str = "a") -> Node:
    node = Node()
    node.order(job)
    node.see(job)
    node.works()
    assert node.at == (WORKING, job, "")
    return node


def kinds(commands: list[Command]) -> list[type]:
    return [type(each) for each in commands if not isinstance(each, SayStatus | WatchJob | TellPeople)]


def test_an_ordered_node_joins_waits_for_the_start_and_works() -> None:
    node = Node()
    assert node.order("a") == [SayStatus(node.state.status), WatchJob("a"), TellPeople("to a")]
    assert node.at == (JOINING, "a", "")
    assert node.see(phase=JobPhase.SUBMITTED, start=0) == []
    assert node.see(start=7) == [StartChild(spec("a"), 7, 2)]
    assert node.see(start=7) == []  # news of the job that change nothing
    assert node.works() == [SayStatus(node.state.status)]
    assert node.at == (WORKING, "a", "")
    assert node.order("a") == []  # it does


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


def test_an_order_to_who_joins_another_job_changes_where_it_goes() -> None:
    node = Node()
    node.order("a")
    node.see("a", JobPhase.SUBMITTED, 0)
    node.order("b")
    assert node.at == (JOINING, "b", "")
    assert node.see("a") == []  # that is no business of this node's any more
    assert kinds(node.see("b")) == [StartChild]


def test_one_whose_workers_only_start_is_stopped_as_nobody_misses_it() -> None:
    node = Node()
    node.order("a")
    node.see("a")
    assert StopChild(SIGTERM) in node.order("b")
    assert node.at == (LEAVING, "a", "b")


def test_a_node_is_recalled_and_goes_to_its_next_job() -> None:
    node = working()
    assert kinds(node.order("b")) == [RecallChild]
    assert node.at == (LEAVING, "a", "b")
    assert kinds(node.order("c")) == []
    assert node.at == (LEAVING, "a", "c")
    node.ends(0)
    assert node.at == (JOINING, "c", "")
    assert not node.state.status.refusals
    assert kinds(node.see("c")) == [StartChild]


def test_a_node_that_is_to_come_back_starts_again_with_news_of_the_job() -> None:
    node = working()
    node.order("")
    node.order("a")
    assert node.at == (LEAVING, "a", "a")
    assert WatchJob("a") in node.ends(0)  # else it would wait for news that do not come
    assert node.at == (JOINING, "a", "")
    assert node.see() == [StartChild(spec("a"), 7, 2)]


def test_who_is_not_let_go_is_stopped_and_then_killed() -> None:
    node = working()
    node.order("")
    assert node.wait(RECALL_S - 1) == []
    assert node.wait(1) == [StopChild(SIGTERM)]
    assert node.wait(END_S - 1) == []
    assert node.wait(1) == [StopChild(SIGKILL)]
    assert node.wait(1000) == []
    assert node.ends(-9) == [SayStatus(node.state.status), WatchJob("")]
    assert node.at == (IDLE, "", "")


def test_a_clock_that_is_set_back_makes_no_wait_longer() -> None:
    node = working()
    node.order("")
    assert node.wait(0.0) == []
    assert node.wait(-3600) == [StopChild(SIGTERM)]
    assert node.wait(0.0) == []
    assert node.wait(-3600) == [StopChild(SIGKILL)]


@pytest.mark.parametrize(
    ("news", "command"),
    [
        # The plan has other nodes for others, and later some for it.
        ({"phase": JobPhase.SUBMITTED, "start": 9}, StopChild(SIGTERM, saves_first=True)),
        ({"phase": JobPhase.CANCELLED, "start": 9, "signal": SIGINT}, StopChild(SIGINT)),
        ({"phase": JobPhase.SUBMITTED, "start": 0, "spec": None}, StopChild(SIGTERM)),  # it is gone
        ({"phase": JobPhase.RUNNING, "start": 9}, StopChild(SIGTERM)),  # it has started again
    ],
)
def test_a_job_that_does_not_go_on_is_stopped_at_once(news: dict[str, Any], command: StopChild) -> None:
    node = working()
    assert node.see(**news) == [SayStatus(node.state.status), command]
    assert node.at == (LEAVING, "a", "")
    assert node.see(**news) == []  # once
    node.ends(1)
    assert node.at == (IDLE, "", "")
    assert not node.state.status.refusals


@pytest.mark.parametrize("there", [spec("a"), None])
def test_a_store_that_has_forgotten_the_job_stops_nothing(there: Any) -> None:
    node = working()
    assert node.see(phase=None, start=0, spec=there) == []
    assert node.see(phase=JobPhase.RUNNING, start=7, spec=None) == [], "nobody can read the spec"
    assert node.at == (WORKING, "a", "")
    assert kinds(node.order("b")) == [RecallChild], "it goes on, as it was last seen to do"


def test_who_waits_for_a_job_of_which_nothing_is_told_waits_on() -> None:
    node = Node()
    node.order("a")
    assert node.see(phase=None, start=0) == []
    assert node.at == (JOINING, "a", "")
    assert kinds(node.see()) == [StartChild]


def test_a_recalled_node_of_a_job_that_is_cancelled_waits_no_longer() -> None:
    node = working()
    node.order("b")
    assert kinds(node.see(phase=JobPhase.CANCELLED, start=9, signal=SIGINT)) == [StopChild]
    node.ends(1)
    assert node.at == (JOINING, "b", "")


def test_a_finished_job_ends_by_itself_or_is_stopped() -> None:
    node = working()
    assert node.see(phase=JobPhase.FINISHED, start=9) == []
    node.wait(END_S / 2)
    assert node.see(phase=JobPhase.FINISHED, start=10) == []
    assert node.wait(END_S / 2) == [StopChild(SIGTERM)]
    node.ends(1)
    assert not node.state.status.refusals  # that it was stopped says nothing of this node
    assert node.at == (IDLE, "", "")


def test_a_finished_job_ends_by_itself_also_if_its_node_is_wanted_elsewhere() -> None:
    node = working()
    node.see(phase=JobPhase.FINISHED, start=9)
    assert kinds(node.order("b")) == []
    assert node.at == (LEAVING, "a", "b")
    assert node.wait(END_S - 1) == []
    assert node.wait(1) == [StopChild(SIGTERM)]
    node.ends(0, "well")
    assert node.at == (JOINING, "b", "")


@pytest.mark.parametrize("phase", [JobPhase.FINISHED, JobPhase.CANCELLED, None])
def test_who_comes_to_a_job_that_is_over_is_idle(phase: JobPhase | None) -> None:
    node = Node()
    node.order("a")
    node.see(phase=phase or JobPhase.SUBMITTED, start=0 if phase is None else 9, spec=phase and spec("a"))
    assert node.at == (IDLE, "", "")


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


def test_who_has_left_says_how_the_job_ended_meanwhile() -> None:
    node = working()
    node.order("b")
    assert kinds(node.ends(0, "well")) == [EndJob]
    assert node.at == (JOINING, "b", "")


@pytest.mark.parametrize(
    ("code", "why", "told"),
    [
        (1, "", "h leaves a: its part of it ended with exit code 1 while the job goes on."),
        (-9, "", "h leaves a: its part of it ended with exit code -9 while the job goes on."),
        (None, "it cannot be started (no memory)", "h leaves a: it cannot be started (no memory)."),
    ],
)
def test_a_part_that_breaks_while_the_job_goes_on_is_a_refusal(code: int | None, why: str, told: str) -> None:
    node = working()
    assert TellJob("a", told) in node.ends(code, why=why)
    assert node.at == (IDLE, "", "")
    assert node.state.status.refuses("a", node.now)


def test_a_node_that_is_kept_out_has_not_refused_what_it_left() -> None:
    node = working()
    assert kinds(node.ends(1, is_kept_out=True)) == [TellJob]
    assert node.at == (IDLE, "", "")
    assert not node.state.status.refuses("a", node.now)


def test_an_idle_node_that_claimed_a_job_runs_it_whatever_is_seen() -> None:
    node = Node()
    node.claim()
    assert node.at == (JOINING, "loose", "")
    assert node.state.is_claimed
    node.works()
    assert node.see("loose", JobPhase.CANCELLED, 9) == []  # that is another job, a planned one
    assert kinds(node.ends(0)) == []
    assert node.at == (IDLE, "", "")
    assert not node.state.is_claimed


def test_a_claimed_job_is_left_for_an_ordered_one_also_if_that_is_called_the_same() -> None:
    for target in ("a", "loose"):
        node = Node()
        node.claim("loose")
        node.works()
        assert StopChild(SIGTERM) in node.order(target)
        assert node.order(target) == []
        node.ends(1)
        assert node.at == (JOINING, target, "")
        assert kinds(node.see(target)) == [StartChild]


def test_only_an_idle_node_claims() -> None:
    node = working()
    assert node.claim() == []
    assert node.at == (WORKING, "a", "")
    assert not node.state.is_claimed


def test_a_claimed_job_that_fails_is_refused_for_a_while() -> None:
    node = Node()
    node.claim()
    node.ends(None, why="no memory")
    assert node.at == (IDLE, "", "")
    assert node.state.status.refuses("loose", node.now)


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


def test_an_agent_that_ends_waits_a_little_for_its_job_to_do_without_it() -> None:
    node = working()
    assert kinds(node.stop()) == [RecallChild]
    assert kinds(node.wait(STOP_S)) == [StopChild]


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
