"""What a job's agent tells the cluster of it: in a thread of its own, and never in anybody's way."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from test_incident_picture import INCIDENT

from unicron_elastic.base.world import Member, World
from unicron_elastic.launcher.agent.core.job_teller import JobTeller, news_of
from unicron_elastic.launcher.view.job.view import LocalJobView, WorkerView
from unicron_elastic.rendezvous.records.news import JobNews
from unicron_elastic.rendezvous.torch.local import LocalRendezvous

DEADLINE_S = 10.0
VIEW = LocalJobView(
    job="train.py",
    run_id="chat",
    generation=1,
    restarts_used=1,
    max_restarts=3,
    nodes=2,
    world_size=16,
    workers=(WorkerView(rank=0, local_rank=0, pid=7, state="running", step=12, step_time_s=0.5),),
    uptime_s=1.0,
    last_incident=None,
)


class Loop:
    """Keeps what is to be called later."""

    def __init__(self) -> None:
        self.later: list[Any] = []

    def call_at(self, _at: float, call: Any) -> None:
        self.later.append(call)


class Writer:
    """Keeps what it is told; the store answers once it may."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.changed = threading.Condition()
        self.error: Exception | None = None

    def _take(self, what: Any) -> bool:
        assert self.may_answer.wait(DEADLINE_S)
        with self.changed:
            self.told.append(what)
            self.changed.notify_all()
        if self.error is not None:
            raise self.error
        return True

    tell_job = tell_incident = _take

    def wait_for(self, count: int) -> list[Any]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.told) >= count, DEADLINE_S)
            return list(self.told)


@pytest.fixture
def writer() -> Writer:
    return Writer()


def _teller(writer: Writer) -> tuple[JobTeller, Loop]:
    loop = Loop()
    return JobTeller(loop, SimpleNamespace(news_writer=lambda: writer)), loop  # type: ignore[arg-type]


def _news() -> JobNews:
    found = news_of(VIEW, SimpleNamespace(world=None), SimpleNamespace(group_rank=0))  # type: ignore[arg-type]
    assert found is not None
    return found


def test_a_rendezvous_without_a_store_is_told_nothing():
    loop = Loop()
    teller = JobTeller(loop, LocalRendezvous(backend="c10d", run_id="job"))
    teller.start(_news)
    teller.recorded(INCIDENT)
    teller.close()
    assert loop.later == []


def test_news_are_told_again_and_again_and_incidents_once(writer):
    teller, loop = _teller(writer)
    teller.start(_news)
    writer.wait_for(1)
    loop.later.pop()()
    teller.recorded(INCIDENT)
    told = writer.wait_for(3)
    teller.close()
    assert sum(isinstance(each, JobNews) for each in told) == 2
    assert told.count(INCIDENT) == 1
    assert (told[0].step, told[0].workers, told[0].restarts_used) == (12, 16, 1)


def test_when_the_job_stepped_is_known_although_its_new_workers_have_made_no_step(writer):
    teller, loop = _teller(writer)
    looks = [replace(_news(), stepped_unix_s=stepped_unix_s) for stepped_unix_s in (None, 7.0, None, 9.0, None)]
    teller.start(iter(looks).__next__)
    for count in range(1, len(looks)):
        writer.wait_for(count)
        loop.later.pop()()
    told = writer.wait_for(len(looks))
    teller.close()
    assert [each.stepped_unix_s for each in told] == [None, 7.0, 7.0, 9.0, 9.0]


def test_while_the_store_takes_its_time_only_the_newest_news_wait_and_all_incidents(writer):
    teller, loop = _teller(writer)
    writer.may_answer.clear()
    teller.start(_news)
    for number in range(5):
        loop.later.pop()()
        teller.recorded(replace(INCIDENT, number=number))
    writer.may_answer.set()
    teller.close()
    assert [each.number for each in writer.told if each.__class__ is INCIDENT.__class__] == [0, 1, 2, 3, 4]
    assert sum(isinstance(each, JobNews) for each in writer.told) <= 2


def test_an_error_of_the_store_does_not_end_it(writer):
    teller, _ = _teller(writer)
    writer.error = RuntimeError("odd")
    teller.start(_news)
    teller.recorded(INCIDENT)
    assert INCIDENT in writer.wait_for(2)
    teller.close()


def test_what_cannot_be_looked_at_is_not_looked_at_again(writer):
    def fail() -> JobNews:
        raise RuntimeError("odd")

    teller, loop = _teller(writer)
    teller.start(fail)
    teller.close()
    assert (loop.later, writer.told) == ([], [])


def test_a_timer_after_the_end_tells_nothing(writer):
    teller, loop = _teller(writer)
    teller.start(lambda: None)
    teller.close()
    loop.later.pop()()
    assert (loop.later, writer.told) == ([], [])


def test_only_the_first_node_tells():
    def told(world: World | None, rank: int | None, node: str = "n1#1") -> JobNews | None:
        state = SimpleNamespace(world=world, node=node)
        return news_of(VIEW, state, SimpleNamespace(group_rank=rank))  # type: ignore[arg-type]

    members = tuple(Member(name=f"m{i}", node=node, local_rank=0) for i, node in enumerate(("n2#1", "n1#1", "n3#1")))
    world = World(number=4, members=members, store="n2:1")
    assert told(None, 0) is not None
    assert told(None, 1) is None
    assert told(None, None) is None
    assert told(world, 0, "n1#1") is None
    first = told(world, 1, "n2#1")
    assert first is not None
    assert (first.world, first.workers) == (4, 3)


def test_without_workers_there_is_nothing_to_tell():
    view = replace(VIEW, workers=())
    assert news_of(view, SimpleNamespace(world=None), SimpleNamespace(group_rank=0)) is None  # type: ignore[arg-type]
