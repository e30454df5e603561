"""Looks at a simulated job exactly when the detection asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from simulated import Job

from unicron_elastic.detection.policy import PacePolicy
from unicron_elastic.detection.sample import Sample
from unicron_elastic.detection.state import PaceState
from unicron_elastic.detection.telling import Verdict
from unicron_elastic.detection.watch import needs_arrivals, needs_evidence, next_look_at, observe

_V = TypeVar("_V", bound=Verdict)


class Watcher:
    """Looks at a job as an agent does, and keeps what is said."""

    def __init__(
        self,
        job: Job,
        *,
        counts_collectives: bool = False,
        ranks: Sequence[int] | None = None,
        policy: PacePolicy | None = None,
    ) -> None:
        self.job, self.counts_collectives = job, counts_collectives
        self.ranks = range(job.script.ranks) if ranks is None else ranks
        self.now = job.workers[0].clock - job.script.start_s
        self.state = PaceState(policy=policy or PacePolicy(), whole_job=ranks is None)
        self.said: list[Verdict] = []
        self.looks = 0

    def look(self) -> list[Verdict]:
        self.now = max(self.now + 1e-4, next_look_at(self.state))
        self.job.plan_to(self.now)
        evidence = needs_evidence(self.state)
        ranks = tuple(
            self.job.workers[rank].seen(
                self.now,
                counts_collectives=self.counts_collectives,
                with_evidence=evidence,
                with_arrivals=needs_arrivals(self.state),
            )
            for rank in self.ranks
        )
        self.state, verdicts = observe(self.state, Sample(at=self.now, ranks=ranks))
        self.said += verdicts
        self.looks += 1
        return verdicts

    def run(self, seconds: float) -> None:
        """Looks for ``seconds`` of the job's time."""
        end = self.now + seconds
        while next_look_at(self.state) < end:
            self.look()
        self.now = max(self.now, end)

    def run_to_step(self, step: int) -> None:
        """Looks until the job is past ``step``."""
        while self.step < step:
            self.look()

    def wait_for(self, kind: type[_V], seconds: float) -> _V:
        """Looks until a verdict of this kind is said; fails after ``seconds``."""
        end = self.now + seconds
        while self.now <= end:
            for verdict in self.look():
                if isinstance(verdict, kind):
                    return verdict
        raise AssertionError(f"no {kind.__name__} within {seconds} s, only {self.said}")

    @property
    def step(self) -> int:
        """The steps that all ranks have done, as far as was seen."""
        return min((pace.seen.step or 0 for pace in self.state.ranks), default=0)
