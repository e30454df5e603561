"""The agent's part in hangs: from the workers' pace to events, and from the wish for evidence to its report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from unicron_elastic.detection.telling import Degraded, Hung, OutOfStep, Recovered, Verdict, Waiting
from unicron_elastic.faults import HangKind
from unicron_elastic.launcher.agent.hangs.evidence import Evidence, Subject, gather
from unicron_elastic.launcher.agent.hangs.newcomer_watch import NewcomerWatch
from unicron_elastic.launcher.agent.hangs.progress import ProgressWatch, is_silent
from unicron_elastic.launcher.agent.hangs.remote_ranks import RemoteRanks
from unicron_elastic.launcher.agent.hangs.slowness import Slowness
from unicron_elastic.launcher.agent.process.activity import activity
from unicron_elastic.launcher.agent.process.workers import WorkerProcess
from unicron_elastic.launcher.common.loop import Loop
from unicron_elastic.recovery.commands import GatherEvidence
from unicron_elastic.recovery.events import (
    Event,
    EvidenceGathered,
    WatchBegan,
    WorkerOutOfStep,
    WorkersGoOn,
    WorkersHung,
)
from unicron_elastic.worker.pulse import TRAIN


class HangWatch:
    """Watches the workers of one generation after another."""

    def __init__(
        self,
        loop: Loop,
        say: Callable[[str], None],
        keep: Callable[[str], str | None],
        post: Callable[[Event], None],
        gpu_lines: Callable[[], Sequence[str]] = list,
        *,
        progress: Callable[[Loop, Callable[[Verdict], None]], ProgressWatch] = ProgressWatch,
        gather: Callable[..., None] = gather,
    ) -> None:
        """``say`` tells people a sentence, ``keep`` writes a report and returns its path, ``post`` takes events.

        ``gpu_lines`` says how the GPUs are, in lines for the report; it is called in a thread of its own.
        ``progress`` makes what watches the workers' pace, and ``gather`` gathers evidence.
        """
        self._loop = loop
        self._say = say
        self._keep = keep
        self._post = post
        self._gpu_lines = gpu_lines
        self._gather = gather
        self._progress = progress(loop, self._judged)
        self._newcomers = NewcomerWatch(loop, self._newcomer_stopped, self._newcomer_goes_on)
        self._slowness = Slowness(loop, say)
        self._waiting: Waiting | None = None  # not told yet
        self._tell_after_s = 0.0
        self._generation = 0
        self._workers: dict[int, WorkerProcess] = {}
        self._hung: frozenset[int] = frozenset()  # the ranks of the latest verdict
        self._has_told = False  # of a hang that is not over

    def start(
        self,
        generation: int,
        workers: Mapping[int, WorkerProcess],
        *,
        whole_job: bool,
        remote_ranks: RemoteRanks | None = None,
        is_first_world: bool = True,
        tell_after_s: float = 0.0,
    ) -> None:
        """Watches ``workers``, by global rank, in the first world or a later one.

        ``elsewhere`` asks the other nodes where their ranks are, ``tell_after_s`` is how long the workers must wait for
        what is not here until people hear of it.
        """
        if self._has_told:
            self._post(WatchBegan(at=time.monotonic(), generation=generation))
        self._generation = generation
        self._workers = dict(workers)
        self._hung = frozenset()
        self._has_told = False
        self._waiting = None
        self._tell_after_s = tell_after_s
        if remote_ranks is not None:
            remote_ranks.on_note = lambda note: self._loop.call_soon(lambda: self._say(note))
        self._progress.start(workers, whole_job=whole_job, remote_ranks=remote_ranks, is_first_world=is_first_world)

    def watch_newcomers(self, workers: Mapping[int, WorkerProcess]) -> None:
        """Watches those, by global rank, that are on their way to join ``start``'s; until they are told to be none."""
        self._newcomers.watch(workers)

    def look_now(self) -> None:
        """Sees whether what hangs still does: the last look may be a second old."""
        self._progress.look_now()

    def stop(self) -> None:
        """Watches no more; evidence that is being gathered still comes."""
        self._progress.stop()
        self._newcomers.watch({})
        self._waiting = None
        self._slowness.forget()

    def gather(self, command: GatherEvidence) -> None:
        """Gather the evidence; ``EvidenceGathered`` is posted when it is there."""
        generation = self._generation
        subjects = [
            _subject(rank, worker, hangs=rank in self._hung)
            for rank, worker in {**self._workers, **self._newcomers.workers}.items()
            if worker.local_rank in command.local_ranks
        ]

        def found(evidence: Evidence) -> None:
            self._loop.call_soon(lambda: self._gathered(evidence, generation))

        self._gather(subjects, command.reason, found, self._gpu_lines)

    def _gathered(self, evidence: Evidence, generation: int) -> None:
        report = self._keep(evidence.text)
        now = time.monotonic()
        self._post(EvidenceGathered(at=now, report=report, stacks=evidence.stacks, generation=generation))

    def _newcomer_stopped(self, rank: int, worker: WorkerProcess, lasted_s: float) -> None:
        now = time.monotonic()
        event = WorkersHung(
            at=now,
            since=now - lasted_s,
            local_ranks=(worker.local_rank,),
            reason=f"rank {rank}, on its way to join the others, has been stopped by a signal for {lasted_s:.0f} s.",
            kind=HangKind.STOPPED,
            generation=self._generation,
        )
        self._post(event)

    def _newcomer_goes_on(self, rank: int) -> None:
        reason = f"rank {rank} is on its way again."
        self._post(WorkersGoOn(at=time.monotonic(), reason=reason, generation=self._generation))

    def _judged(self, verdict: Verdict) -> None:
        now = time.monotonic()
        was_untold = self._waiting is not None
        if not (isinstance(verdict, Degraded | OutOfStep) or (isinstance(verdict, Recovered) and verdict.is_of_pace)):
            self._waiting = None  # this is about the same standstill
        match verdict:
            case Hung():
                # The native stacks hold a process for a while: not for what may be nothing.
                self._hung = frozenset(verdict.ranks if verdict.kind is not HangKind.UNCLEAR else ())
                event = WorkersHung(
                    at=now,
                    since=verdict.at - verdict.standing_s,
                    local_ranks=tuple(self._workers[rank].local_rank for rank in verdict.ranks),
                    reason=verdict.reason,
                    kind=verdict.kind,
                    generation=self._generation,
                )
                self._has_told = True
                self._post(event)
            case OutOfStep():
                self._post(
                    WorkerOutOfStep(
                        at=now,
                        since=verdict.since,
                        step=verdict.step,
                        local_rank=self._workers[verdict.rank].local_rank,
                        reason=verdict.reason,
                        generation=self._generation,
                    )
                )
            case Degraded():
                self._slowness.begins(verdict)
            case Recovered(was_hung=True):
                self._has_told = False
                self._post(WorkersGoOn(at=now, reason=verdict.reason, generation=self._generation))
            case Waiting():
                self._waits(verdict, now)
            case Recovered(is_of_pace=True):
                self._slowness.ends(verdict.reason)
            case Recovered() if was_untold:
                pass  # nobody has heard of its beginning
            case _:
                self._say(verdict.reason)

    def _waits(self, verdict: Waiting, now: float) -> None:
        """Says so if it lasts, or at once if who is missing will not come; the node where it is does what is to do."""
        self._waiting = verdict

        def lasts() -> None:
            if self._waiting is verdict:
                self._waiting = None
                self._say(verdict.reason)

        if verdict.kind is HangKind.STOPPED or not self._tell_after_s:
            lasts()
        else:
            self._loop.call_at(now + self._tell_after_s, lasts)


def _subject(rank: int, worker: WorkerProcess, *, hangs: bool) -> Subject:
    reading = worker.reading()
    done = "nothing is known of its steps"
    if reading is not None:
        phase = "" if reading.phase == TRAIN else f', in phase "{reading.phase}"'
        done = f"{reading.step} steps done{phase}"
    owes = reading is not None and is_silent(worker, reading, time.monotonic())
    doing = activity(worker.pid) if owes else None
    return Subject(
        rank=rank,
        local_rank=worker.local_rank,
        pid=worker.pid,
        doing=done,
        is_silent=owes and (doing is None or not doing.answering),
        groups=worker.whereabouts.groups,
        stack_fd=worker.stack_fd,
        hangs=hangs,
    )
