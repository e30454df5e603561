"""What the detection remembers: of bounded size, whatever the job does."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from unicron_elastic.detection.lockstep import NOTHING as NOT_APART
from unicron_elastic.detection.lockstep import Lockstep
from unicron_elastic.detection.policy import PacePolicy
from unicron_elastic.detection.sample import RankSample
from unicron_elastic.detection.tempo import NOTHING, Tempo
from unicron_elastic.faults import HangKind

PHASES_MAX = 16


class Signals(NamedTuple):
    """What tells the rank that holds the others up: what it usually does."""

    cpu_share: float | None = None  # of a core
    looks: int = 0  # at which these were learned
    cpu_time_s: float | None = None  # at the latest of them
    at: float = 0.0


class RankPace(NamedTuple):
    """One rank. One is made per rank and look: a named tuple is made several times as fast as a frozen dataclass."""

    seen: RankSample
    began_at: float  # when this worker was first seen
    first_step: int | None = None  # the first step it was seen at
    slowest_s: float = 0.0  # of the warm-up
    tempo: Tempo = NOTHING
    pending: Tempo = NOTHING  # of the steps since they began to take longer; they may become the new tempo
    steps_per_look: float = 1.0
    lost_steps: float = 0.0  # by how much the latest steps exceed the usual, in steps: a cumulative sum
    settled_looks: int = 0  # after the warm-up, without a change
    signals: Signals = Signals()

    def is_warm(self, policy: PacePolicy) -> bool:
        """Whether enough steps were seen to say what is usual."""
        if self.seen.step is None or self.first_step is None or len(self.tempo.recent) < policy.warmup_looks:
            return False
        return self.seen.step - self.first_step >= policy.warmup_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Standstill:
    """Some ranks have made no step for longer than two thirds of what they may take."""

    marks: tuple[tuple[int, int | None], ...]  # rank and step of those who stand
    seen: tuple[RankSample, ...]  # all ranks, when they were last looked at
    at: float  # ... which was then
    idle_since: float | None = None  # the look since which nobody was at work
    idle_looks: int = 0
    told: str = ""  # the name of the gravest verdict that was given
    told_kind: HangKind = HangKind.UNCLEAR  # of a hang
    told_ranks: tuple[int, ...] = ()
    told_missing: tuple[int, ...] = ()  # ranks elsewhere that were named


@dataclass(frozen=True, slots=True, kw_only=True)
class Degradation:
    """A degradation that was told and is not over."""

    at: float
    ranks: tuple[int, ...]
    usual_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Occasion:
    """A phase that the worker named, and the longest it took."""

    phase: str
    longest_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """What a job does beside stepping. It stays true for new workers."""

    phases: tuple[Occasion, ...] = ()  # the latest used last
    start_s: float | None = None  # the longest way to the first step
    survived_s: float = 0.0  # the longest standstill that was called a hang and went on
    busy_s: float = 0.0  # the longest that was called slow and went on

    def longest_s(self, phase: str) -> float | None:
        """The longest that ``phase`` has taken; None if it is new."""
        return next((seen.longest_s for seen in self.phases if seen.phase == phase), None)

    def with_phase(self, phase: str, duration_s: float) -> Habits:
        """The habits after one more ``phase``."""
        longest_s = max(duration_s, self.longest_s(phase) or 0.0)
        others = tuple(seen for seen in self.phases if seen.phase != phase)
        return replace(self, phases=(*others, Occasion(phase=phase, longest_s=longest_s))[-PHASES_MAX:])


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceState:
    """Everything a verdict depends on. ``PaceState()`` has seen nothing yet.

    ``whole_job`` says whether the samples hold every rank of the job, or those of one node among several;
    ``asks_remote_ranks``, whether the other nodes are asked for theirs when ranks are late.
    """

    policy: PacePolicy = field(default_factory=PacePolicy)
    whole_job: bool = True
    asks_remote_ranks: bool = False
    at: float | None = None  # of the latest sample
    next_at: float = 0.0
    is_ending: bool = False  # some rank has ended; the others may have nothing left to do but to wait
    ranks: tuple[RankPace, ...] = ()
    habits: Habits = field(default_factory=Habits)
    standstill: Standstill | None = None
    degradation: Degradation | None = None
    arrivals_asked_at: float | None = None  # since when it is asked by whom steps take longer
    lockstep: Lockstep = NOT_APART
