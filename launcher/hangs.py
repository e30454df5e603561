"""The agent's part in hangs: from the workers' pace to events, and from the wish for evidence to its report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from unicron_elastic.detection.verdicts import Degraded, Hung, Recovered, Verdict
from unicron_elastic.launcher.evidence import Evidence, Subject, gather
from unicron_elastic.launcher.loop import Loop
from unicron_elastic.launcher.progress import ProgressWatch, is_silent
from unicron_elastic.launcher.slowness import Slowness
from unicron_elastic.launcher.workers import WorkerProcess
from unicron_elastic.recovery.commands import GatherEvidence
from unicron_elastic.recovery.events import Event, EvidenceGathered, WorkersGoOn, WorkersHung
from unicron_elastic.worker.pulse import TRAIN

__all__ = ["HangWatch"]


class HangWatch:
    """Watches the workers of one generation after another."""

    def __init__(
        self, loop: Loop, say: Callable[[str], None], keep: Callable[[str], str | None], post: Callable[[Event], None]
    ) -> None:
        """``say`` tells people a sentence, ``keep`` writes a report and returns its path, ``post`` takes events."""
        self._loop = loop
        self._say = say
        self._keep = keep
        self._post = post
        self._progress = ProgressWatch(loop, self._judged)
        self._slowness = Slowness(loop, say)
        self._generation = 0
        self._workers: dict[int, WorkerProcess] = {}

    def start(self, generation: int, workers: Mapping[int, WorkerProcess], *, whole_job: bool) -> None:
        """Watches ``workers``, by global rank."""
        self._generation = generation
        self._workers = dict(workers)
        self._progress.start(workers, whole_job=whole_job)

    def look_now(self) -> None:
        """Sees whether what hangs still does: the last look may be a second old."""
        self._progress.look_now()

    def stop(self) -> None:
        """Watches no more; evidence that is being gathered still comes."""
        self._progress.stop()
        self._slowness.forget()

    def gather(self, command: GatherEvidence) -> None:
        """Has the evidence gathered; ``EvidenceGathered`` is posted when it is there."""
        generation = self._generation
        subjects = [
            _subject(rank, worker) for rank, worker in self._workers.items() if worker.local_rank in command.local_ranks
        ]

        def found(evidence: Evidence) -> None:
            self._loop.call_soon(lambda: self._gathered(evidence, generation))

        gather(subjects, command.reason, found)

    def _gathered(self, evidence: Evidence, generation: int) -> None:
        report = self._keep(evidence.text)
        now = time.monotonic()
        self._post(EvidenceGathered(at=now, report=report, stacks=evidence.stacks, generation=generation))

    def _judged(self, verdict: Verdict) -> None:
        now = time.monotonic()
        match verdict:
            case Hung():
                event = WorkersHung(
                    at=now,
                    since=verdict.at - verdict.standing_s,
                    local_ranks=tuple(self._workers[rank].local_rank for rank in verdict.ranks),
                    reason=verdict.reason,
                    kind=verdict.kind,
                    generation=self._generation,
                )
                self._post(event)
            case Degraded():
                self._slowness.begins(verdict)
            case Recovered(was_hung=True):
                self._post(WorkersGoOn(at=now, reason=verdict.reason, generation=self._generation))
            case Recovered():
                self._slowness.ends(verdict.reason)
            case _:
                self._say(verdict.reason)


def _subject(rank: int, worker: WorkerProcess) -> Subject:
    reading = worker.reading()
    doing = "nothing is known of its steps"
    if reading is not None:
        phase = "" if reading.phase == TRAIN else f', in phase "{reading.phase}"'
        doing = f"{reading.step} steps done{phase}"
    return Subject(
        rank=rank,
        local_rank=worker.local_rank,
        pid=worker.pid,
        doing=doing,
        is_silent=reading is not None and is_silent(worker, reading, time.monotonic()),
        groups=worker.whereabouts.groups,
        stack_fd=worker.stack_fd,
    )
