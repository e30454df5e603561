"""From verdicts to events, and from the wish for evidence to its report."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from unicron_elastic.detection.sample import GroupPosition
from unicron_elastic.detection.telling import Degraded, Hung, Recovered, Slow, Verdict, Waiting
from unicron_elastic.faults import HangKind
from unicron_elastic.launcher.agent.hangs.evidence import Evidence, Subject
from unicron_elastic.launcher.agent.hangs.watch import HangWatch
from unicron_elastic.launcher.agent.process.whereabouts import Whereabouts
from unicron_elastic.launcher.common.loop import Loop
from unicron_elastic.recovery.commands import GatherEvidence
from unicron_elastic.recovery.events import Event, EvidenceGathered, WatchBegan, WorkersGoOn, WorkersHung
from unicron_elastic.worker.pulse import PulseReading

DEADLINE_S = 30.0
REASON = "rank 5 hangs: no step for 3 s."


class FakeProgress:
    """Stands in for the watch over progress, and says what a test wants it to."""

    def __init__(self, _loop: Loop, on_verdict: Callable[[Verdict], None]) -> None:
        self.say = on_verdict
        self.watched: list[int] | None = None
        self.whole_job = False

    def start(
        self,
        workers: Mapping[int, Any],
        *,
        whole_job: bool,
        remote_ranks: Any,  # noqa: ARG002
        is_first_world: bool,  # noqa: ARG002
    ) -> None:
        self.watched, self.whole_job = list(workers), whole_job

    def stop(self) -> None:
        self.watched = None


class FakeWorker:
    """Of local rank 0 or 1; on this node these are the ranks 4 and 5."""

    def __init__(self, local_rank: int) -> None:
        self.local_rank = local_rank
        self.pid = 100 + local_rank
        self.stack_fd: int | None = 9
        self.control: Any = object()
        self.whereabouts = Whereabouts()
        self.owes_arrivals = False
        self.phase_limits_s: dict[str, float] = {}
        self.read: PulseReading | None = PulseReading(step=41)

    def reading(self) -> PulseReading | None:
        return self.read


class Watch:
    """The watch over hangs, and all that came of it."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.said: list[str] = []
        self.kept: list[str] = []
        self.path: str | None = "/logs/evidence.txt"
        self.events: list[Event] = []
        self.asked: queue.SimpleQueue[tuple[Sequence[Subject], str, Callable[[Evidence], None]]] = queue.SimpleQueue()
        self.watch_with(list)
        self.workers = {4: FakeWorker(0), 5: FakeWorker(1)}

    def watch_with(self, gpu_lines: Callable[[], Sequence[str]]) -> None:
        make_progress: Any = FakeProgress
        self.hangs = HangWatch(
            self.loop,
            self.said.append,
            self._keep,
            self.events.append,
            gpu_lines,
            progress=make_progress,
            gather=self._gather,
        )

    @property
    def progress(self) -> FakeProgress:
        found: Any = self.hangs._progress
        return found

    def start(self, generation: int = 1, *, whole_job: bool = True) -> None:
        workers: Any = self.workers
        self.hangs.start(generation, workers, whole_job=whole_job)

    def gather(self, *local_ranks: int) -> tuple[list[Subject], Callable[[Evidence], None]]:
        self.hangs.gather(GatherEvidence(local_ranks=local_ranks, reason=REASON))
        subjects, reason, on_done = self.asked.get(timeout=DEADLINE_S)
        assert reason == REASON
        return list(subjects), on_done

    def wait(self) -> None:
        assert self.loop.run_until(lambda: bool(self.events), time.monotonic() + DEADLINE_S)

    def _gather(
        self,
        subjects: Sequence[Subject],
        reason: str,
        on_done: Callable[[Evidence], None],
        gpu_lines: Callable[[], Sequence[str]],
    ) -> None:
        self.gpu_lines = gpu_lines
        self.asked.put((subjects, reason, on_done))

    def _keep(self, text: str) -> str | None:
        self.kept.append(text)
        return self.path


@pytest.fixture
def watch() -> Iterator[Watch]:
    made = Watch()
    yield made
    made.loop.close()


def hung(*ranks: int, at: float) -> Hung:
    return Hung(at=at, ranks=ranks, kind=HangKind.AWAITED, standing_s=3.0, expected_s=0.1, reason=REASON)


def test_it_watches_by_global_rank(watch: Watch) -> None:
    watch.start(whole_job=False)
    assert (watch.progress.watched, watch.progress.whole_job) == ([4, 5], False)
    watch.hangs.stop()
    assert watch.progress.watched is None


def test_a_hang_becomes_an_event_with_local_ranks(watch: Watch) -> None:
    watch.start(generation=3)
    at = time.monotonic()
    watch.progress.say(hung(5, at=at))
    (event,) = watch.events
    assert isinstance(event, WorkersHung)
    assert (event.local_ranks, event.reason, event.kind, event.generation) == ((1,), REASON, HangKind.AWAITED, 3)
    assert event.since == at - 3.0
    assert at <= event.at <= time.monotonic()
    assert watch.said == []  # that is for the recovery to decide


def test_the_end_of_a_hang_becomes_an_event(watch: Watch) -> None:
    watch.start(generation=3)
    watch.progress.say(Recovered(at=1.0, ranks=(5,), reason="rank 5 goes on.", was_hung=True))
    (event,) = watch.events
    assert isinstance(event, WorkersGoOn)
    assert (event.reason, event.generation) == ("rank 5 goes on.", 3)


def test_a_hang_is_in_doubt_when_the_watch_begins_anew(watch: Watch) -> None:
    watch.start(generation=3)
    watch.start(generation=3)
    assert watch.events == []  # nobody hung
    watch.progress.say(hung(5, at=1.0))
    watch.start(generation=3)
    assert isinstance(watch.events[-1], WatchBegan)
    assert watch.events[-1].generation == 3
    watch.start(generation=3)
    assert len(watch.events) == 2


def test_what_is_over_is_in_no_doubt(watch: Watch) -> None:
    watch.start(generation=3)
    watch.progress.say(hung(5, at=1.0))
    watch.progress.say(Recovered(at=1.0, ranks=(5,), reason="rank 5 goes on.", was_hung=True))
    watch.start(generation=3)
    assert [type(event) for event in watch.events] == [WorkersHung, WorkersGoOn]


def waiting(kind: HangKind, reason: str = "ranks 4 and 5 wait for rank 0 on n1.") -> Waiting:
    return Waiting(at=1.0, ranks=(4, 5), standing_s=3.0, expected_s=0.1, reason=reason, missing=(0,), kind=kind)


def test_that_workers_wait_for_another_node_is_told_if_it_lasts(watch: Watch) -> None:
    watch.hangs.start(1, watch.workers, whole_job=False, tell_after_s=0.2)  # type: ignore[arg-type]
    at = time.monotonic()
    watch.progress.say(waiting(HangKind.AWAITED))
    assert watch.said == []
    assert watch.loop.run_until(lambda: bool(watch.said), at + DEADLINE_S)
    assert time.monotonic() - at >= 0.2
    assert watch.said == ["ranks 4 and 5 wait for rank 0 on n1."]
    assert watch.events == []  # the other node does what is to do
    watch.progress.say(Recovered(at=2.0, ranks=(4, 5), reason="ranks 4 and 5 go on."))
    assert watch.said[1:] == ["ranks 4 and 5 go on."]


def test_a_wait_for_who_was_stopped_is_told_at_once(watch: Watch) -> None:
    watch.hangs.start(1, watch.workers, whole_job=False, tell_after_s=600.0)  # type: ignore[arg-type]
    watch.progress.say(waiting(HangKind.STOPPED))
    assert watch.said == ["ranks 4 and 5 wait for rank 0 on n1."]


@pytest.mark.parametrize("how", ["goes on", "ended", "hangs", "better known"])
def test_a_wait_that_is_over_is_not_told(watch: Watch, how: str) -> None:
    watch.hangs.start(1, watch.workers, whole_job=False, tell_after_s=0.05)  # type: ignore[arg-type]
    watch.progress.say(waiting(HangKind.AWAITED, "old"))
    if how == "goes on":
        watch.progress.say(Recovered(at=2.0, ranks=(4, 5), reason="ranks 4 and 5 go on."))
    elif how == "ended":
        watch.hangs.stop()
    elif how == "hangs":
        watch.progress.say(hung(5, at=time.monotonic()))
    else:
        watch.progress.say(waiting(HangKind.STOPPED, "new"))
    watch.loop.run_until(lambda: False, time.monotonic() + 0.1)
    assert watch.said == (["new"] if how == "better known" else [])


def test_what_the_exchange_with_other_nodes_notes_is_told_in_the_loops_thread(watch: Watch) -> None:
    class Other:
        on_note: Callable[[str], None]

    other: Any = Other()
    watch.hangs.start(1, watch.workers, whole_job=False, remote_ranks=other)  # type: ignore[arg-type]
    other.on_note("odd")
    assert watch.said == []
    assert watch.loop.run_until(lambda: bool(watch.said), time.monotonic() + DEADLINE_S)


def test_slowness_is_only_told(watch: Watch) -> None:
    watch.start()
    watch.progress.say(Slow(at=1.0, ranks=(5,), standing_s=9.0, expected_s=0.1, reason="rank 5 is slow."))
    watch.progress.say(Degraded(at=1.0, ranks=(5,), factor=2.0, usual_s=0.1, reason="rank 5 holds up."))
    watch.progress.say(Recovered(at=2.0, ranks=(5,), reason="rank 5 goes on."))
    assert watch.said == ["rank 5 is slow.", "rank 5 holds up.", "rank 5 goes on."]
    assert watch.events == []


def test_evidence_is_kept_and_posted_in_the_loops_thread(watch: Watch) -> None:
    watch.start(generation=3)
    subjects, on_done = watch.gather(0, 1)
    assert [(each.rank, each.local_rank, each.pid, each.stack_fd) for each in subjects] == [
        (4, 0, 100, 9),
        (5, 1, 101, 9),
    ]
    on_done(Evidence(text="report", stacks=((1, "stack"),)))
    assert (watch.kept, watch.events) == ([], [])
    watch.wait()
    assert watch.kept == ["report"]
    (event,) = watch.events
    assert isinstance(event, EvidenceGathered)
    assert (event.report, event.stacks, event.generation) == ("/logs/evidence.txt", ((1, "stack"),), 3)


def test_a_report_that_cannot_be_kept_is_posted_nevertheless(watch: Watch) -> None:
    watch.path = None
    watch.start()
    _, on_done = watch.gather(0, 1)
    on_done(Evidence(text="report", stacks=()))
    watch.wait()
    assert watch.events[0].report is None  # type: ignore[union-attr]


def test_late_evidence_belongs_to_its_own_generation(watch: Watch) -> None:
    watch.start(generation=3)
    _, on_done = watch.gather(0, 1)
    watch.hangs.stop()
    watch.start(generation=4)
    on_done(Evidence(text="report", stacks=()))
    watch.wait()
    assert watch.events[0].generation == 3  # type: ignore[union-attr]


def test_only_those_who_are_meant_are_looked_at(watch: Watch) -> None:
    watch.start()
    subjects, _ = watch.gather(1)
    assert [each.rank for each in subjects] == [5]


def test_who_hangs_is_looked_at_more_closely(watch: Watch) -> None:
    watch.start()
    subjects, _ = watch.gather(0, 1)
    assert [each.hangs for each in subjects] == [False, False]
    watch.progress.say(hung(5, at=1.0))
    subjects, _ = watch.gather(0, 1)
    assert [each.hangs for each in subjects] == [False, True]
    watch.start(generation=2)  # other workers
    subjects, _ = watch.gather(0, 1)
    assert [each.hangs for each in subjects] == [False, False]


def test_how_the_gpus_are_is_asked_for_the_report(watch: Watch) -> None:
    watch.start()
    watch.gather(0)
    assert watch.gpu_lines() == []
    watch.watch_with(lambda: ["GPU 0"])
    watch.start()
    watch.gather(0)
    assert watch.gpu_lines() == ["GPU 0"]


@pytest.mark.parametrize(
    ("reading", "doing"),
    [
        (PulseReading(step=41), "41 steps done"),
        (PulseReading(step=0), "0 steps done"),
        (PulseReading(step=41, phase="evaluation", phase_since=1.0), '41 steps done, in phase "evaluation"'),
        (None, "nothing is known of its steps"),
    ],
)
def test_what_a_worker_does_is_told(watch: Watch, reading: PulseReading | None, doing: str) -> None:
    watch.workers[5].read = reading
    watch.start()
    subjects, _ = watch.gather(1)
    assert subjects[0].doing == doing


def test_who_was_asked_only_now_is_not_silent(watch: Watch) -> None:
    # Evidence takes longer than an answer may: what counts is who owed one when it was asked for.
    now = time.monotonic()
    group = GroupPosition(name="0", begun=2, ended=1)
    watch.workers[4].whereabouts = Whereabouts().asked(now - 5.0).answered((group,)).asked(now + 1.0)
    watch.workers[5].whereabouts = Whereabouts().asked(now - 5.0)
    watch.start()
    (answers, silent), _ = watch.gather(0, 1)
    assert (answers.is_silent, silent.is_silent) == (False, True)
    assert (answers.groups, silent.groups) == ((group,), ())
    watch.workers[5].control = None  # closed by the script
    (_, closed), _ = watch.gather(0, 1)
    assert not closed.is_silent
