"""When the watch over progress looks, what it looks at, and what it passes on; in simulated time."""

from __future__ import annotations

import heapq
import itertools
import socket
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from unicron_elastic.detection.policy import PacePolicy
from unicron_elastic.detection.sample import GroupPosition, RankSample, RemoteRank
from unicron_elastic.detection.telling import Hung, Recovered, Verdict, Waiting
from unicron_elastic.faults import HangKind
from unicron_elastic.launcher.agent.hangs.progress import HostSight, ProgressWatch, is_silent
from unicron_elastic.launcher.agent.process.activity import Activity
from unicron_elastic.launcher.agent.process.whereabouts import Whereabouts
from unicron_elastic.worker.pulse import PulseReading

STEP_S = 0.02
IDLE = Activity(stopped=False, runnable=False, in_io=False)
WARM_S = 3.0  # more than enough steps and looks


QUIET, _OTHER_END = socket.socketpair()  # a channel on which nothing comes


class FakeLoop:
    """Timers and calls in simulated time."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.timers: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = itertools.count()
        self.soon: deque[Callable[[], None]] = deque()
        self.readable: Callable[[], None] = lambda: None

    def call_at(self, at: float, callback: Callable[[], None]) -> None:
        heapq.heappush(self.timers, (at, next(self.numbers), callback))

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.soon.append(callback)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.timers and self.timers[0][0] <= end:
            at, _, callback = heapq.heappop(self.timers)
            self.now = max(self.now, at)
            callback()
            while self.soon:
                self.readable()  # as the loop does: first what can be read, then the calls
                self.soon.popleft()()
        self.now = end


class FakeWorker:
    """A worker that steps evenly until it stands; ``position`` is what it says of its collectives."""

    def __init__(self, loop: FakeLoop, rank: int) -> None:
        self.loop = loop
        self.local_rank = rank
        self.pid = 100 + rank
        self.returncode: int | None = None
        self.page: Any = object()
        self.control: Any = QUIET
        self.whereabouts = Whereabouts()
        self.owes_arrivals = False
        self.phase_limits_s: dict[str, float] = {}
        self.doing: Activity | None = IDLE
        self.answers = True
        self.began = loop.now
        self.stood_at: float | None = None
        self.position = (1, 1)
        self.looked_at: list[float] = []
        self.asked_at: list[float] = []
        self.is_overwritten = False

    def stand(self, *position: int, **doing: bool) -> None:
        self.stood_at = self.loop.now
        self.position = position or self.position  # type: ignore[assignment]
        self.doing = replace(IDLE, **doing)

    def go_on(self) -> None:
        assert self.stood_at is not None
        self.began += self.loop.now - self.stood_at
        self.stood_at = None

    def reading(self) -> PulseReading | None:
        self.looked_at.append(self.loop.now)
        if self.is_overwritten:
            return None
        step = int(((self.stood_at or self.loop.now) - self.began) / STEP_S)
        if step < 1:
            return PulseReading(step=0)
        return PulseReading(
            step=step, step_time_s=STEP_S, first_step_at=self.began + STEP_S, at=self.began + step * STEP_S
        )

    def ask_whereabouts(self) -> None:
        if self.whereabouts.asked_at is None:
            self.asked_at.append(self.loop.now)
            self.whereabouts = self.whereabouts.asked(self.loop.now)
            if self.answers:
                self.loop.call_at(self.loop.now + 0.0002, self.answered)

    def answered(self) -> None:
        begun, ended = self.position
        self.whereabouts = self.whereabouts.answered((GroupPosition(name="0", begun=begun, ended=ended),))


class Job:
    """Two workers that are watched."""

    def __init__(self) -> None:
        self.loop = FakeLoop()
        self.verdicts: list[Verdict] = []
        self.watch = ProgressWatch(self.loop, self.verdicts.append, self.sight())  # type: ignore[arg-type]
        self.workers: dict[int, FakeWorker] = {}

    def start(self, *, whole_job: bool = True, remote_ranks: Any = None, is_first_world: bool = True) -> None:
        self.workers = {rank: FakeWorker(self.loop, rank) for rank in range(2)}
        workers: Any = self.workers
        self.watch.start(workers, whole_job=whole_job, remote_ranks=remote_ranks, is_first_world=is_first_world)

    def sight(self) -> HostSight:
        return HostSight(
            monotonic=lambda: self.loop.now,
            realtime=lambda: self.loop.now,
            activity=lambda pid: self.of(pid).doing,
            cpu_time_s=lambda _pid: 1.0,
            state=self.state,
        )

    def of(self, pid: int) -> FakeWorker:
        return self.workers[pid - 100]

    def state(self, pid: int) -> str:
        doing = self.of(pid).doing
        return "T" if doing is not None and doing.stopped else "S"

    def looks(self) -> int:
        return len(self.workers[0].looked_at)

    def hang(self, **doing: bool) -> None:
        """Rank 1 stands, and rank 0 waits for it."""
        self.workers[0].stand(55, 54)
        self.workers[1].stand(54, 54, **doing)


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    made.watch.stop()


def test_a_job_that_steps_is_looked_at_seldom_and_never_asked(job: Job) -> None:
    job.start()
    job.loop.run(WARM_S)
    before = job.looks()
    job.loop.run(10.0)
    assert job.verdicts == []
    assert job.looks() - before <= 12 * 10
    assert all(worker.asked_at == [] for worker in job.workers.values())


def test_who_stands_while_another_waits_is_named(job: Job) -> None:
    job.start()
    job.loop.run(WARM_S)
    job.hang()
    job.loop.run(2.0)
    (verdict,) = job.verdicts
    assert isinstance(verdict, Hung)
    assert verdict.ranks == (1,)
    assert verdict.standing_s < 0.5
    assert "at collective 54 while others are at 55" in verdict.reason


def test_who_is_stopped_is_named(job: Job) -> None:
    job.start()
    job.loop.run(WARM_S)
    job.hang(stopped=True)
    job.workers[1].answers = False
    job.loop.run(2.0)
    (verdict,) = job.verdicts
    assert isinstance(verdict, Hung)
    assert verdict.ranks == (1,)
    assert "stopped by a signal" in verdict.reason


def test_who_is_stopped_in_the_warm_up_is_named_well_before_that_may_have_taken(job: Job) -> None:
    job.start()
    job.loop.run(3 * STEP_S)
    stood_at = job.loop.now
    job.hang(stopped=True)
    job.loop.run(20.0)
    (verdict,) = job.verdicts
    assert isinstance(verdict, Hung)
    assert (verdict.ranks, verdict.kind) == ((1,), HangKind.STOPPED)
    assert 10.0 <= verdict.at - stood_at <= 15.0


@pytest.mark.parametrize("is_first_world", [True, False])
def test_who_is_stopped_before_its_first_step_may_be_on_purpose_only_at_the_beginning(
    job: Job, is_first_world: bool
) -> None:
    job.start(is_first_world=is_first_world)
    job.hang(stopped=True)
    job.loop.run(20.0)
    kinds = [verdict.kind for verdict in job.verdicts if isinstance(verdict, Hung)]
    assert kinds == ([] if is_first_world else [HangKind.STOPPED])


def test_who_waits_in_the_warm_up_is_not_looked_at_closely(job: Job) -> None:
    job.start()
    job.loop.run(3 * STEP_S)
    job.hang()
    job.loop.run(35.0)
    assert job.verdicts == []
    assert [worker.asked_at for worker in job.workers.values()] == [[], []]


def test_who_does_not_answer_is_named(job: Job) -> None:
    job.start()
    job.loop.run(WARM_S)
    job.hang()
    job.workers[1].answers = False
    job.loop.run(2.0)
    (verdict,) = job.verdicts
    assert "without an answer while others answer" in verdict.reason
    assert isinstance(verdict, Hung)
    assert verdict.ranks == (1,)
    assert len(job.workers[1].asked_at) == 1  # who owes an answer is not asked again


def test_whose_answer_waits_for_a_cpu_is_waited_for(job: Job) -> None:
    job.start()
    job.loop.run(WARM_S)
    job.hang()
    waits = job.workers[0]
    waits.answers, waits.doing = False, replace(IDLE, answering=True)
    job.loop.run(2.0)
    assert job.verdicts == []
    waits.answers, waits.doing = True, IDLE
    waits.answered()
    job.loop.run(2.0)
    (verdict,) = job.verdicts
    assert "at collective 54 while others are at 55" in verdict.reason


@pytest.mark.parametrize("doing", [{"runnable": True}, {"in_io": True}])
def test_who_is_at_work_does_not_hang(job: Job, doing: dict[str, bool]) -> None:
    job.start()
    job.loop.run(WARM_S)
    job.hang(**doing)
    job.loop.run(30.0)
    assert job.verdicts == []


def test_an_answer_that_was_not_read_yet_is_read_before_it_is_judged(job: Job) -> None:
    job.start()
    job.loop.run(WARM_S)
    job.hang()
    worker = job.workers[1]
    worker.answers = False  # by itself; its answers lie in the channel until the loop reads it
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    worker.control = ours
    asked = worker.ask_whereabouts

    def ask() -> None:
        if worker.whereabouts.asked_at is None:
            theirs.send(b"x")
        asked()

    def read() -> None:
        try:
            ours.recv(1)
        except BlockingIOError:
            return
        worker.answered()

    worker.ask_whereabouts = ask  # type: ignore[method-assign]
    job.loop.readable = read
    job.loop.run(2.0)
    (verdict,) = job.verdicts
    assert "at collective 54 while others are at 55" in verdict.reason
    ours.close()
    theirs.close()


def test_a_worker_that_closed_its_channel_is_not_taken_for_silent(job: Job) -> None:
    job.start()
    job.loop.run(WARM_S)
    job.hang()
    job.workers[0].answers = False  # the one that waits
    job.workers[0].whereabouts = Whereabouts().asked(0.0)
    job.workers[0].control = None
    job.loop.run(2.0)
    (verdict,) = job.verdicts
    assert "without an answer" not in verdict.reason


def test_before_its_first_step_nobody_owes_an_answer() -> None:
    loop = FakeLoop()
    worker: Any = FakeWorker(loop, 0)
    worker.whereabouts = Whereabouts().asked(0.0)
    assert not is_silent(worker, PulseReading(step=0), 10.0)
    assert is_silent(worker, PulseReading(step=1), 10.0)


def test_positions_of_an_earlier_standstill_are_forgotten(job: Job) -> None:
    job.start()
    job.loop.run(WARM_S)
    job.hang()
    job.loop.run(2.0)
    for worker in job.workers.values():
        worker.go_on()
    job.loop.run(20.0)
    assert [type(verdict) for verdict in job.verdicts] == [Hung, Recovered]
    job.workers[0].stand(90, 90)  # now the other one
    job.workers[1].stand(91, 90)
    job.loop.run(10.0)
    verdict = job.verdicts[-1]
    assert isinstance(verdict, Hung)
    assert verdict.ranks == (0,)
    assert "at collective 90 while others are at 91" in verdict.reason


def test_the_part_of_a_job_only_waits(job: Job) -> None:
    job.start(whole_job=False)
    job.loop.run(WARM_S)
    for worker in job.workers.values():
        worker.stand(55, 54)
    job.loop.run(2.0)
    assert [type(verdict) for verdict in job.verdicts] == [Waiting]


class FakeElsewhere:
    """Says of another node's ranks what a test wants it to."""

    def __init__(self) -> None:
        self.on_question: Callable[[int], None] = lambda _: None
        self.wishes = 0
        self.answers: list[tuple[int, tuple[RankSample, ...]]] = []
        self.known: tuple[RemoteRank, ...] = ()
        self.here: list[int] = []

    def wish(self) -> None:
        self.wishes += 1

    def answer(self, question: int, ranks: tuple[RankSample, ...]) -> None:
        self.answers.append((question, ranks))

    def ranks(self, here: tuple[RankSample, ...], _policy: PacePolicy) -> tuple[RemoteRank, ...]:
        self.here = [rank.rank for rank in here]
        return self.known


def test_the_others_are_asked_only_if_nobody_here_is_at_work(job: Job) -> None:
    other = FakeElsewhere()
    job.start(whole_job=False, remote_ranks=other)
    job.loop.run(WARM_S)
    job.hang(runnable=True)
    job.loop.run(5.0)
    assert other.wishes == 0
    for worker in job.workers.values():
        worker.stand(55, 54)
    job.loop.run(0.5)
    assert other.wishes > 0
    assert other.here == [0, 1]


def test_who_is_missing_on_another_node_is_named(job: Job) -> None:
    other = FakeElsewhere()
    job.start(whole_job=False, remote_ranks=other)
    job.loop.run(WARM_S)
    for worker in job.workers.values():
        worker.stand(55, 54)
    job.loop.run(1.0)
    assert job.verdicts == []
    step = int(WARM_S / STEP_S)
    group = GroupPosition(name="0", begun=54, ended=54)
    late = RankSample(rank=2, step=step, collective=54, waiting=False, groups=(group,))
    other.known = (RemoteRank(node="node-b", seen=late, working=""),)
    job.loop.run(1.0)
    (verdict,) = job.verdicts
    assert isinstance(verdict, Waiting)
    assert verdict.missing == (2,)
    assert "; at collective 54 while others are at 55 of process group 0, it is not at work." in verdict.reason


@pytest.mark.parametrize("is_late", [False, True])
def test_a_question_of_another_node_is_answered(job: Job, is_late: bool) -> None:
    other = FakeElsewhere()
    job.start(whole_job=False, remote_ranks=other)
    job.loop.run(WARM_S)
    if is_late:
        job.hang()
        job.loop.run(0.3)
    job.workers[1].answers = False
    other.on_question(7)
    job.loop.soon.popleft()()
    job.loop.run(0.2)
    ((question, ranks),) = other.answers
    assert question == 7
    assert [(rank.rank, rank.silent, len(rank.groups)) for rank in ranks] == [(0, False, 1), (1, True, 0)]
    assert ranks[0].runnable is False


def test_a_question_that_comes_after_the_end_is_not_answered(job: Job) -> None:
    other = FakeElsewhere()
    job.start(whole_job=False, remote_ranks=other)
    job.loop.run(WARM_S)
    other.on_question(7)
    job.loop.soon.popleft()()
    job.start(whole_job=False, remote_ranks=FakeElsewhere())
    job.loop.run(WARM_S)
    other.on_question(8)
    job.loop.soon.popleft()()
    job.loop.run(1.0)
    assert other.answers == []


def test_after_its_end_it_looks_no_more(job: Job) -> None:
    job.start()
    job.loop.run(WARM_S)
    before = job.looks()
    job.watch.stop()
    job.watch.stop()
    job.loop.run(WARM_S)
    assert job.looks() == before


def test_new_workers_are_watched_and_the_old_ones_left_alone(job: Job) -> None:
    job.start()
    job.loop.run(WARM_S)
    job.hang()
    job.loop.run(2.0)
    old = job.workers
    job.start()
    before = len(old[0].looked_at)
    job.loop.run(WARM_S)
    job.hang()
    job.loop.run(2.0)
    assert [type(verdict) for verdict in job.verdicts] == [Hung, Hung]
    assert len(old[0].looked_at) == before
    job.watch.stop()
    assert job.watch._workers == {}


def test_new_workers_may_take_their_time(job: Job) -> None:
    job.start()
    job.loop.run(WARM_S)
    job.start()
    for worker in job.workers.values():
        worker.began = job.loop.now + PacePolicy().warmup_s / 2  # they make no step before
    job.loop.run(PacePolicy().warmup_s / 2 + WARM_S)
    assert job.verdicts == []


def test_workers_of_whom_one_cannot_be_seen_are_not_watched(job: Job) -> None:
    workers = {rank: FakeWorker(job.loop, rank) for rank in range(2)}
    workers[1].page = None
    job.watch.start(workers, whole_job=True)  # type: ignore[arg-type]
    job.loop.run(WARM_S)
    assert workers[0].looked_at == []


def test_it_ends_with_the_last_worker(job: Job) -> None:
    job.start()
    job.loop.run(WARM_S)
    job.workers[1].returncode = 0
    before = job.looks()
    job.loop.run(1.0)
    assert job.looks() > before  # the other one is still there
    job.workers[0].returncode = 0
    job.loop.run(1.0)
    before = job.looks()
    job.loop.run(10.0)
    assert job.looks() == before
    assert job.loop.timers == []


def test_it_ends_when_a_script_overwrites_its_page(job: Job) -> None:
    job.start()
    job.loop.run(WARM_S)
    job.hang()
    job.workers[1].is_overwritten = True
    job.loop.run(30.0)
    assert job.verdicts == []
    assert job.loop.timers == []


def test_a_worker_that_is_gone_is_no_error(job: Job) -> None:
    job.start()
    job.loop.run(WARM_S)
    job.hang()
    job.loop.run(0.15)
    job.workers[1].doing = None
    job.loop.run(1.0)  # its end will be heard of
    assert all(isinstance(verdict, Hung) for verdict in job.verdicts)


def test_who_watches_may_stop_it_at_a_verdict(job: Job) -> None:
    def judged(verdict: Verdict) -> None:
        job.verdicts.append(verdict)
        job.watch.stop()

    job.watch = ProgressWatch(job.loop, judged, job.sight())  # type: ignore[arg-type]
    job.start()
    job.loop.run(WARM_S)
    job.hang()
    job.loop.run(2.0)
    before = job.looks()
    job.loop.run(60.0)
    assert (len(job.verdicts), job.looks()) == (1, before)


def test_who_owes_a_longer_answer_is_not_silent() -> None:
    # One thread of a worker answers; when its collectives began takes it longer to say than where it is.
    asked = Whereabouts().asked(10.0)
    worker: Any = SimpleNamespace(control=object(), whereabouts=asked, owes_arrivals=True)
    reading: Any = SimpleNamespace(step=7)
    assert not is_silent(worker, reading, 11.0)
    worker.owes_arrivals = False
    assert is_silent(worker, reading, 11.0)
