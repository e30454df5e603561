"""What the agents of a planned job tell of its pace, and of how long it stood still; in simulated time."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from unicron_elastic.base.world import Member, World
from unicron_elastic.launcher.agent.core.pace import (
    OVERDUE_MIN_S,
    STEPS_KEPT,
    STILL_S,
    Pace,
    PaceFigures,
    PaceObservation,
    after,
    reported,
)
from unicron_elastic.launcher.agent.core.pace_report import PaceReport, merged, seen_of
from unicron_elastic.launcher.config.forwarded import PLANNED_JOB
from unicron_elastic.planning.model.measured import MeasuredJob
from unicron_elastic.worker.pulse import BEATS_MAX, PulseReading

STEP_S = 0.02
DEADLINE_S = 20.0
UNIX_S = 1.8e9  # ahead of the monotonic clock
ABC = frozenset("abc")


class Trainer:
    """A job whose steps are looked at: by default as by an agent whose job is not changed in place."""

    def __init__(self, nodes: str = "ab", look_s: float = 0.5) -> None:
        self.now = 1000.0
        self.nodes = frozenset(nodes)
        self.look_s = look_s
        self.ends: list[float] = []
        self.first = 1
        self.pid = 1
        self.is_settled = True
        self.more: dict[str, Any] = {}
        self.pace = Pace()
        self.reports: list[PaceFigures] = []

    def train(self, seconds: float, step_s: float = STEP_S) -> None:
        """Steps, and is looked at."""
        end = self.now + seconds
        next_look = self.now + self.look_s
        while self.now + step_s <= end:
            self.now += step_s
            self.step()
            while next_look <= self.now:
                self.look()
                next_look += self.look_s
        self.now = end
        self.look()

    def step(self) -> None:
        self.ends.append(self.now)
        kept = self.ends[-(BEATS_MAX - 1) :]
        self.first += len(self.ends) - len(kept)
        self.ends = kept

    def restart(self, nodes: str, pause_s: float) -> None:
        """Other processes on other nodes; their first step takes the pause."""
        self.look()
        self.nodes, self.pid, self.first, self.ends = frozenset(nodes), self.pid + 1, 1, []
        self.look()
        self.now += pause_s
        self.step()

    def look(self) -> None:
        seen = PaceObservation(
            at=self.now,
            at_unix_s=self.now + UNIX_S,
            nodes=self.nodes,
            is_settled=self.is_settled,
            pid=self.pid,
            first=self.first,
            ends=tuple(self.ends),
            **self.more,
        )
        self.pace = after(self.pace, seen)
        report = reported(self.pace, seen, self.reports[-1] if self.reports else None)
        if report is not None:
            self.reports.append(report)
            self.pace = replace(self.pace, stood=())

    @property
    def stood(self) -> list[tuple[str, float]]:
        return [each for report in self.reports for each in report.stood]


# -- the pace ------------------------------------------------------------------------------------------------------


def test_nothing_is_told_before_there_are_some_steps() -> None:
    job = Trainer(look_s=0.01)
    job.train(5 * STEP_S)
    assert job.reports == []
    job.train(2 * STEP_S)
    assert [(report.nodes, report.steps) for report in job.reports] == [(2, 5)]
    assert job.reports[0].step_s == pytest.approx(STEP_S)


def test_news_are_told_seldom_and_what_stays_the_same_more_seldom() -> None:
    job = Trainer()
    job.train(60.0)
    assert all(later.at - report.at >= STILL_S for report, later in itertools.pairwise(job.reports))
    assert len(job.reports) >= 5
    before = len(job.reports)
    job.train(30.0, step_s=2 * STEP_S)
    assert job.reports[before].at - job.reports[before - 1].at < STILL_S
    assert job.reports[-1].step_now_s == job.reports[-1].step_s == pytest.approx(2 * STEP_S)
    assert job.reports[-1].steps == STEPS_KEPT
    assert len({report.since_unix_s for report in job.reports}) == 1


def test_a_step_that_takes_long_is_no_usual_step() -> None:
    job = Trainer()
    job.train(1.0)
    job.now += 3.0  # an evaluation
    job.train(2.0)
    assert job.reports[-1].step_s == pytest.approx(STEP_S)
    assert job.stood == []


def test_steps_that_were_not_seen_are_not_taken_for_one_long_one() -> None:
    job = Trainer(look_s=1.0)
    job.train(20.0, step_s=0.001)
    assert max(job.pace.steps_s) == pytest.approx(0.001)


def test_long_steps_are_told_between_them_but_not_when_nobody_steps() -> None:
    job = Trainer()
    job.train(700.0, step_s=100.0)
    told = len(job.reports)
    for _ in range(100):
        job.now += 1.0
        job.look()
    assert len(job.reports) >= told + 9
    job.now += 300.0
    told = len(job.reports)
    job.look()
    assert len(job.reports) == told


def test_who_stands_still_is_not_told_to_train() -> None:
    job = Trainer()
    job.train(3.0)
    told = len(job.reports)
    for _ in range(100):
        job.now += 1.0
        job.look()
    assert len(job.reports) <= told + int(OVERDUE_MIN_S / STILL_S) + 1


# -- transitions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "kind"), [("a", "shrink"), ("abc", "grow"), ("ac", "replace")])
def test_a_restart_with_other_nodes(nodes: str, kind: str) -> None:
    job = Trainer()
    job.train(3.0)
    since = job.reports[-1].since_unix_s
    job.restart(nodes, pause_s=7.0)
    job.train(3.0, step_s=0.03)
    assert [each for each, _ in job.stood] == [kind]
    assert job.stood[0][1] == pytest.approx(7.0 - STEP_S, abs=0.001)
    assert job.reports[-1].nodes == len(nodes)
    assert job.reports[-1].step_s == pytest.approx(0.03)
    assert job.reports[-1].since_unix_s > since


def test_a_restart_with_the_same_nodes_is_no_transition() -> None:
    job = Trainer()
    job.train(3.0)
    job.restart("ab", pause_s=7.0)
    job.train(3.0)
    assert job.stood == []
    assert job.reports[-1].step_s == pytest.approx(STEP_S)


def test_two_changes_without_a_step_between_them_are_one() -> None:
    job = Trainer("abc")
    job.train(3.0)
    job.restart("ab", pause_s=0.0)
    job.ends = []
    job.now += 4.0
    job.restart("a", pause_s=5.0)
    job.train(3.0)
    assert [each for each, _ in job.stood] == ["shrink"]
    assert job.stood[0][1] == pytest.approx(9.0 - STEP_S, abs=0.001)


def test_a_node_that_is_back_before_the_next_step_has_changed_nothing() -> None:
    job = Trainer()
    job.train(3.0)
    job.restart("a", pause_s=0.0)
    job.ends = []
    job.restart("ab", pause_s=3.0)
    job.train(3.0)
    assert job.stood == []
    assert job.reports[-1].nodes == 2


def test_nobody_stood_still_before_the_first_step() -> None:
    job = Trainer("a")
    job.look()
    job.now += 10.0
    job.nodes = frozenset("ab")
    job.train(3.0)
    assert job.stood == []


def test_in_place_the_pause_ends_with_the_first_step_of_the_new_world() -> None:
    job = Trainer("a")
    job.train(3.0)
    job.nodes, job.is_settled = frozenset("ab"), False  # the others are told, and this step is still one of before
    job.look()
    job.train(3 * STEP_S)
    assert job.pace.change is not None
    job.now += 1.5
    job.step()
    job.is_settled = True
    job.train(3.0, step_s=STEP_S / 2)
    assert [each for each, _ in job.stood] == ["grow"]
    assert job.stood[0][1] == pytest.approx(1.5 - STEP_S, abs=0.001)
    assert job.reports[-1].step_s == pytest.approx(STEP_S / 2)


def test_in_place_the_steps_before_the_change_are_those_of_before() -> None:
    job = Trainer("ab", look_s=10.0)
    job.train(3.0)
    job.train(3.0)
    job.now += STEP_S
    job.step()  # not looked at yet
    job.nodes, job.is_settled = frozenset("a"), False
    job.look()
    assert job.pace.change is not None
    assert not job.pace.change.has_stepped


def test_where_no_round_is_nothing_is_concluded() -> None:
    job = Trainer()
    job.train(3.0)
    pace = job.pace
    job.nodes = frozenset()
    job.look()
    assert job.pace == pace


# -- the record ----------------------------------------------------------------------------------------------------


REPORT = PaceFigures(
    at=1.0,
    at_unix_s=UNIX_S + 1.0,
    nodes=2,
    since_unix_s=UNIX_S,
    step_s=0.5,
    steps=20,
    step_now_s=0.4,
    is_global_batch_fixed=True,
    flops_per_step=1e15,
    unsaved_s=7.0,
    stood=(("grow", 2.0), ("shrink", 3.0)),
)


def test_a_report_is_merged_with_what_is_there() -> None:
    text = merged(replace(REPORT, nodes=3), merged(REPORT, None))
    found = MeasuredJob.from_json(text)
    assert [(each.nodes, each.step_s, each.flops_per_step) for each in found.steps] == [(2, 0.5, 1e15), (3, 0.5, 1e15)]
    assert (found.grow_s, found.shrink_s, found.replace_s) == ((2.0,), (3.0,), ())
    assert found.now is not None
    assert (found.now.step_s, found.now.unsaved_s) == (0.4, 7.0)
    assert found.is_global_batch_fixed


@pytest.mark.parametrize("text", [b"", b"garbage", b"{}"])
def test_what_cannot_be_read_is_left_out(text: bytes) -> None:
    assert merged(REPORT, text) == merged(REPORT, None)


# -- the agent -----------------------------------------------------------------------------------------------------


class FakeLoop:
    """Timers in simulated time."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.timers: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = itertools.count()

    def call_at(self, at: float, callback: Callable[[], None]) -> None:
        heapq.heappush(self.timers, (at, next(self.numbers), callback))

    def run(self, seconds: float) -> None:
        """The job trains meanwhile."""
        end = self.trainer.now + seconds
        while self.trainer.now < end:
            self.trainer.now += STEP_S
            self.trainer.step()
            while self.timers and self.timers[0][0] <= self.trainer.now:
                heapq.heappop(self.timers)[2]()


class Handler:
    """A rendezvous that keeps what is measured."""

    def __init__(self) -> None:
        self.told: list[tuple[str, MeasuredJob]] = []
        self.text: bytes | None = None
        self.answers: Iterator[bool] = itertools.repeat(True)
        self.changed = threading.Condition()
        self.blocked = threading.Event()
        self.blocked.set()

    def keep_measured(self, job: str, merge: Callable[[bytes | None], bytes]) -> bool:
        assert threading.current_thread() is not threading.main_thread()
        self.blocked.wait(DEADLINE_S)
        text = merge(self.text)
        with self.changed:
            self.told.append((job, MeasuredJob.from_json(text)))
            is_kept = next(self.answers)
            self.text = text if is_kept else self.text
            self.changed.notify_all()
        return is_kept

    def wait(self, condition: Callable[[], object]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: bool(condition()), DEADLINE_S), self.told


class Agent:
    """The part of an agent that reports."""

    def __init__(self) -> None:
        self.trainer = Trainer()
        self.loop = FakeLoop(self.trainer)
        self.handler = Handler()
        self.report = self.make_report()

    def make_report(self) -> PaceReport:
        loop: Any = self.loop
        return PaceReport(loop, self.handler, lambda: self.trainer.now)

    def see(self) -> PaceObservation:
        job = self.trainer
        return PaceObservation(
            at=job.now,
            at_unix_s=job.now + UNIX_S,
            nodes=job.nodes,
            pid=job.pid,
            first=job.first,
            ends=tuple(job.ends),
            **job.more,
        )


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    monkeypatch.setenv(PLANNED_JOB, "chat")
    made = Agent()
    yield made
    made.report.close()


def test_it_reports_from_a_thread_of_its_own(agent: Agent) -> None:
    agent.report.start(agent.see)
    agent.loop.run(1.0)
    agent.handler.wait(lambda: agent.handler.told)
    name, found = agent.handler.told[0]
    assert name == "chat"
    assert [each.nodes for each in found.steps] == [2]
    assert found.steps[0].step_s == pytest.approx(STEP_S)


def test_a_store_that_does_not_answer_holds_nobody_up(agent: Agent) -> None:
    agent.handler.blocked.clear()
    agent.report.start(agent.see)
    agent.loop.run(60.0)
    agent.handler.blocked.set()
    agent.handler.wait(lambda: len(agent.handler.told) == 2)  # the first, and then the latest
    now = agent.handler.told[1][1].now
    assert now is not None
    assert now.at_unix_s > UNIX_S + agent.trainer.now - STILL_S - 1.0


def test_a_transition_that_could_not_be_written_is_told_again(agent: Agent) -> None:
    agent.report.start(agent.see)
    agent.loop.run(1.0)
    agent.handler.wait(lambda: agent.handler.told)
    agent.handler.answers = itertools.chain([False], itertools.repeat(True))
    agent.report.stop()
    agent.trainer.nodes, agent.trainer.pid, agent.trainer.ends = ABC, 2, []
    agent.report.start(agent.see)
    agent.trainer.now += 5.0
    agent.loop.run(1.0)
    agent.handler.wait(lambda: len(agent.handler.told) == 2)
    agent.loop.run(STILL_S + 1.0)
    agent.handler.wait(lambda: len(agent.handler.told) == 3)
    for _, found in agent.handler.told[1:]:
        assert found.grow_s == pytest.approx((5.0,), abs=2 * STEP_S)


def test_what_goes_wrong_in_the_store_is_nobodys_concern(agent: Agent) -> None:
    seen = threading.Event()

    def fail(_job: str, _merge: object) -> bool:
        seen.set()
        raise OSError("no route")

    agent.handler.keep_measured = fail  # type: ignore[method-assign,assignment]
    agent.report = agent.make_report()
    agent.report.start(agent.see)
    agent.loop.run(1.0)
    assert seen.wait(DEADLINE_S)
    agent.loop.run(30.0)


def test_what_goes_wrong_in_looking_ends_it(agent: Agent) -> None:
    looked = []

    def fail() -> PaceObservation:
        looked.append(1)
        raise ValueError("of something that nobody thought of")

    agent.report.start(fail)
    agent.report.look()
    agent.loop.run(2.0)
    assert len(looked) == 1


def test_another_node_reports(agent: Agent) -> None:
    agent.trainer.more["is_first"] = False
    agent.report.start(agent.see)
    agent.loop.run(5.0)
    agent.trainer.nodes = ABC
    agent.loop.run(5.0)
    assert agent.handler.told == []
    agent.trainer.nodes, agent.trainer.more["is_first"] = frozenset("bc"), True  # the first one is lost
    agent.report.look()
    agent.trainer.now += 2.0
    agent.loop.run(1.0)
    agent.handler.wait(lambda: agent.handler.told)
    found = agent.handler.told[0][1]
    assert found.grow_s == ()
    assert len(found.shrink_s) == 1


def test_it_looks_no_more_once_it_is_stopped(agent: Agent) -> None:
    agent.report.start(agent.see)
    agent.report.stop()
    agent.loop.run(5.0)
    assert agent.handler.told == []
    assert agent.loop.timers == []


def test_a_job_that_nobody_planned_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PLANNED_JOB, raising=False)
    loop, handler = cast("Any", FakeLoop(Trainer())), cast("Any", Handler())
    report = PaceReport(loop, handler)
    report.start(lambda: pytest.fail("it was looked at"))
    report.look()
    report.stop()
    report.close()
    assert loop.timers == []


# -- what there is to see ------------------------------------------------------------------------------------------


class Page:
    def __init__(self, first: int, *ends: float) -> None:
        self.told = first, ends

    def beats(self) -> tuple[int, tuple[float, ...]]:
        return self.told


def worker(pid: int, page: Page, step: int = 9, returncode: int | None = None, flops: float | None = None) -> Any:
    reading = PulseReading(step=step)
    return SimpleNamespace(pid=pid, page=page, returncode=returncode, reading=lambda: reading, flops_per_step=flops)


def seen(state: Any, rank: int, *workers: Any, kept_at: float | None = None) -> PaceObservation:
    handler: Any = SimpleNamespace(node_ids=("a/1", "b/2"))
    group: Any = SimpleNamespace(group_rank=rank)
    return seen_of(state, group, handler, dict(enumerate(workers)), kept_at)


def test_agents_without_a_world_see_their_round() -> None:
    state = SimpleNamespace(world=None)
    found = seen(state, 0, worker(7, Page(3, 1.0, 2.0), flops=None), worker(8, Page(1, 5.0), flops=1e15))
    assert (found.nodes, found.is_first, found.is_settled) == (frozenset({"a/1", "b/2"}), True, True)
    assert (found.pid, found.first, found.ends) == (7, 3, (1.0, 2.0))
    assert found.flops_per_step == 1e15
    assert not found.is_global_batch_fixed
    assert not seen(state, 1).is_first


@pytest.mark.parametrize(
    ("saved_ago_s", "kept_ago_s", "unsaved_s"),
    [(None, None, 900.0), (100.0, None, 100.0), (100.0, 30.0, 30.0), (None, 5000.0, 900.0)],
)
def test_what_is_unsaved_counts_from_the_last_save_or_the_first_step(
    saved_ago_s: float | None, kept_ago_s: float | None, unsaved_s: float
) -> None:
    now = time.monotonic()
    page = PulseReading(step=9, first_step_at=now - 900.0, saved_at=None if saved_ago_s is None else now - saved_ago_s)
    others = worker(7, Page(3, 1.0)), worker(8, Page(3, 1.0))
    others[0].reading = lambda: page
    state = SimpleNamespace(world=None)
    found = seen(state, 0, *others, kept_at=None if kept_ago_s is None else now - kept_ago_s)
    assert found.unsaved_s == pytest.approx(unsaved_s, abs=5.0)
    assert seen(state, 0, others[1]).unsaved_s == 0.0, "nothing is known of it"


def test_the_steps_are_those_of_a_worker_that_steps() -> None:
    ended, newcomer = worker(1, Page(1, 1.0), returncode=1), worker(2, Page(0), step=0)
    replacement = worker(3, Page(4, 0.0, 0.0, 3.0, 4.0))  # the first two of these steps were made by another
    found = seen(SimpleNamespace(world=None), 0, ended, newcomer, replacement)
    assert (found.pid, found.first, found.ends) == (3, 6, (3.0, 4.0))


@pytest.mark.parametrize(("went_on_in", "is_settled"), [(0, False), (2, False), (3, True)])
def test_members_of_a_world_see_that(went_on_in: int, is_settled: bool) -> None:
    members = tuple(Member(name=str(rank), node=node, local_rank=rank) for rank, node in enumerate(("b/2#x", "b/2#x")))
    world = World(number=3, members=members, store="localhost:1")
    state = SimpleNamespace(world=world, node="b/2#x", workers=(SimpleNamespace(went_on_in=went_on_in),))
    found = seen(state, 1)
    assert found.nodes == frozenset({"b/2"})
    assert found.is_first
    assert found.is_global_batch_fixed
    assert found.is_settled is is_settled
