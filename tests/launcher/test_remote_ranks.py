"""The questions and answers of agents about their ranks, over a store, with and without the threads that carry them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.distributed import HashStore, Store

from unicron_elastic.detection.policy import PacePolicy
from unicron_elastic.detection.remote_ranks import FRESH_S
from unicron_elastic.detection.sample import GroupPosition, RankSample
from unicron_elastic.launcher.agent.core.peers import PeerWatch, tell_peers
from unicron_elastic.launcher.agent.hangs.remote_ranks import NEWS_KEY, ROUND_S, WISH_S, RemoteRanks, question_in

DEADLINE_S = 30.0
POLICY = PacePolicy()


class Counting:
    """A store in memory that counts what is asked of it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.requests: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.requests.append(name)
        return getattr(self.store, name)


class Agent:
    """One agent with two ranks; it answers at once."""

    def __init__(self, store: Store, number: int, size: int = 2, clock: Callable[[], float] = time.monotonic) -> None:
        self.store = Counting(store)
        self.number = number
        self.ranks = (_rank(2 * number), _rank(2 * number + 1))
        self.is_there = True
        self.questions: list[int] = []
        self.notes: list[str] = []
        self.remote_ranks = RemoteRanks(
            self.store,  # type: ignore[arg-type]
            rank=number,
            size=size,
            members=2 * size,
            host=f"node-{number}",
            clock=clock,
        )
        self.remote_ranks.on_question = self._answer
        self.remote_ranks.on_note = self.notes.append

    def poll(self) -> None:
        news = bytes(self.store.store.get(NEWS_KEY)) if self.store.store.check([NEWS_KEY]) else None
        self.remote_ranks.exchange(news)

    def known(self) -> list[tuple[int, str]]:
        return [(each.seen.rank, each.node) for each in self.remote_ranks.ranks(self.ranks, POLICY)]

    def _answer(self, question: int) -> None:
        self.questions.append(question)
        if self.is_there:
            self.remote_ranks.answer(question, self.ranks)


def _rank(number: int) -> RankSample:
    groups = (GroupPosition(name="0", begun=12, ended=11),)
    return RankSample(rank=number, step=9, cpu_time_s=1.0, runnable=False, in_io=False, groups=groups)


class Job:
    """Agents in simulated time."""

    def __init__(self, size: int = 2) -> None:
        self.now = 1000.0
        self.store: Store = HashStore()
        self.agents = [Agent(self.store, number, size, lambda: self.now) for number in range(size)]

    def run(self, seconds: float, *, wishes: tuple[int, ...] = ()) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 0.05
            for agent in self.agents:
                if agent.number in wishes:
                    agent.remote_ranks.wish()
                agent.poll()


@pytest.fixture
def job() -> Job:
    return Job()


def test_while_nobody_wishes_to_know_nothing_is_asked_of_the_store(job: Job) -> None:
    job.run(60.0)
    assert [agent.store.requests for agent in job.agents] == [[], []]
    assert [agent.remote_ranks.pause_s(0.1) for agent in job.agents] == [0.1, 0.1]


def test_who_wishes_to_know_hears_of_all_ranks_and_the_other_only_answers(job: Job) -> None:
    job.run(0.5, wishes=(0,))
    first, second = job.agents
    assert first.known() == [(2, "node-1"), (3, "node-1")]
    assert second.known() == []
    assert set(second.store.requests) == {"set"}
    (rank, _) = first.remote_ranks.ranks(first.ranks, POLICY)
    assert (rank.seen.collective, rank.seen.waiting, rank.seen.groups) == (12, True, _rank(2).groups)


def test_both_hear_if_both_wish_and_they_share_their_questions(job: Job) -> None:
    job.run(0.5, wishes=(0, 1))
    assert [agent.known() for agent in job.agents] == [
        [(2, "node-1"), (3, "node-1")],
        [(0, "node-0"), (1, "node-0")],
    ]
    assert job.agents[0].questions == job.agents[1].questions == list(range(1, len(job.agents[0].questions) + 1))


def test_questions_become_seldom_and_end_with_the_wish(job: Job) -> None:
    job.run(60.0, wishes=(0,))
    asked = len(job.agents[1].questions)
    job.run(20.0, wishes=(0,))
    assert len(job.agents[1].questions) - asked <= 12
    assert job.agents[0].known() != []
    job.run(WISH_S + 1.0)
    before = [len(agent.store.requests) for agent in job.agents]
    job.run(20.0)
    assert [len(agent.store.requests) for agent in job.agents] == before
    assert job.agents[0].known() == []  # too old


def test_an_agent_that_does_not_answer_is_asked_again_and_nothing_is_known(job: Job) -> None:
    job.agents[1].is_there = False
    job.run(3 * ROUND_S, wishes=(0,))
    assert job.agents[0].known() == []
    assert 2 <= len(job.agents[1].questions) <= 4
    job.agents[1].is_there = True
    job.run(2 * ROUND_S, wishes=(0,))
    assert job.agents[0].known() != []
    job.agents[1].is_there = False
    job.run(FRESH_S + 2 * ROUND_S, wishes=(0,))
    assert job.agents[0].known() == []


@pytest.mark.parametrize("has_answered", [False, True])
def test_without_a_lost_agent_the_others_know_all_who_train(has_answered: bool) -> None:
    job = Job(size=3)
    if has_answered:
        job.run(0.5, wishes=(0, 1, 2))
        assert [len(agent.known()) for agent in job.agents] == [4, 4, 4]
    job.agents.pop()
    for agent in job.agents:
        agent.remote_ranks.members = 4
    job.run(FRESH_S + 2 * ROUND_S, wishes=(0, 1))
    assert [agent.known() for agent in job.agents] == [
        [(2, "node-1"), (3, "node-1")],
        [(0, "node-0"), (1, "node-0")],
    ]
    job.run(20.0, wishes=(0, 1))
    assert all(agent.known() for agent in job.agents)


def test_many_agents_are_read_at_once_and_not_too_often() -> None:
    job = Job(size=40)
    job.run(10.0, wishes=tuple(range(40)))
    assert all(len(agent.known()) == 78 for agent in job.agents)
    for agent in job.agents:
        assert agent.store.requests.count("multi_get") <= 2 * len(agent.questions)
        assert len(agent.questions) <= 10.0 / 0.4


@pytest.mark.parametrize("text", ["", "nonsense", '{"asked": 1}', "[" * 10_000])
def test_odd_answers_are_ignored_and_noted_once(job: Job, text: str) -> None:
    job.agents[1].is_there = False
    job.store.set("unicron/position/1", text)
    job.run(3.0, wishes=(0,))
    first = job.agents[0]
    assert first.known() == []
    (note,) = first.notes
    assert note.startswith("What node 1 tells of its ranks is ignored: not a report on ranks: ")


def test_a_fault_is_not_lost_to_a_question(job: Job) -> None:
    job.run(0.1, wishes=(0,))
    tell_peers(job.store, "On n2, rank 5 is gone.")
    job.agents[0].remote_ranks.exchange(b"\x01where 1")  # who has not seen it yet, and asks again
    job.run(3.0, wishes=(0, 1))
    assert job.store.get(NEWS_KEY) == b"On n2, rank 5 is gone."


def test_a_store_that_cannot_do_it_is_left_alone(job: Job) -> None:
    def fail(*_: object) -> None:
        raise NotImplementedError("compare_set")

    first = job.agents[0]
    first.store.compare_set = fail  # type: ignore[attr-defined]
    job.run(3.0, wishes=(0,))
    assert first.notes == ["The other nodes cannot be asked where their ranks are: compare_set"]
    assert job.agents[1].questions == []


@pytest.mark.parametrize(
    ("news", "question"),
    [
        (b"\x01where 7", 7),
        (b"\x01where 123456789", 123456789),
        (b"\x01where 1234567890", None),
        (b"\x01where -1", None),
        (b"\x01where ", None),
        (b"\x01where 7\n", None),
        (b"where 7", None),
        (b"On n2, rank 5 is gone.", None),
        (b"", None),
        (b"\xff", None),
    ],
)
def test_a_question_is_told_from_a_fault(news: bytes, question: int | None) -> None:
    assert question_in(news) == question


# -- with the threads ---------------------------------------------------------------------------------------------


class Handler:
    """A rendezvous in which nobody waits."""

    def num_nodes_waiting(self) -> int:
        return 0

    def silent_ranks(self) -> tuple[int, ...]:
        return ()


class Watched:
    """Agents whose stores are asked by the threads that watch the other nodes."""

    def __init__(self) -> None:
        self.store: Store = HashStore()
        self.agents = [Agent(self.store, number) for number in range(2)]
        self.faults: list[str] = []
        self.errors: list[Exception] = []
        self.watches: list[PeerWatch] = []

    def begin(self, interval_s: float) -> None:
        for agent in self.agents:
            watch = PeerWatch(
                Handler(),  # type: ignore[arg-type]
                agent.store,  # type: ignore[arg-type]
                interval_s,
                on_fault=self.faults.append,
                on_waiting=lambda _: None,
                on_error=self.errors.append,
                remote_ranks=agent.remote_ranks,
            )
            self.watches.append(watch)
            watch.start()


@pytest.fixture
def watched() -> Iterator[Watched]:
    made = Watched()
    yield made
    for watch in made.watches:
        watch.stop()
    assert made.errors == []
    assert not [thread for thread in threading.enumerate() if thread.name == "unicron-peers"]


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_agents_hear_of_each_other_through_their_watches_and_then_of_a_fault(watched: Watched) -> None:
    watched.begin(0.01)
    first, second = watched.agents

    def hears() -> bool:
        first.remote_ranks.wish()
        return first.known() == [(2, "node-1"), (3, "node-1")]

    until(hears)
    assert second.known() == []
    tell_peers(watched.store, "rank 5 is gone.")
    until(lambda: watched.faults == ["rank 5 is gone."] * 2)


def test_a_healthy_job_asks_the_store_no_more_than_whether_there_is_news(watched: Watched) -> None:
    watched.begin(0.002)
    until(lambda: all(len(agent.store.requests) > 20 for agent in watched.agents))
    assert all(set(agent.store.requests) == {"check"} for agent in watched.agents)


def test_once_there_was_a_question_a_look_for_news_is_still_one_request(watched: Watched) -> None:
    watched.store.set(NEWS_KEY, "\x01where 1")
    for agent in watched.agents:
        agent.is_there = False
    watched.begin(0.002)
    until(lambda: all(len(agent.store.requests) > 20 for agent in watched.agents))
    assert all(agent.store.requests[:20] == ["check", *["get"] * 19] for agent in watched.agents)
    assert all(agent.questions == [1] for agent in watched.agents)


def test_a_wish_does_not_wait_for_the_next_look(watched: Watched) -> None:
    watched.begin(600.0)
    (first, _) = watched.agents
    first.remote_ranks.wish()
    until(lambda: first.questions == [1])
