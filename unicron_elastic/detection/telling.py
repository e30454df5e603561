"""What the detection has to say. Each verdict carries its reason as one sentence; nothing here acts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from unicron_elastic.faults import HangKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Degraded:
    """Steps take longer than usual, for some time now. Said once; ``Recovered`` follows."""

    at: float
    ranks: tuple[int, ...]  # who holds the others up; empty: the job, no rank stands out
    factor: float  # of the usual step time
    usual_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """Three times the usual and more, but somebody is at work. Said once; ``Hung`` or ``Recovered`` follows.

    Either step after step takes so long, or one has not ended for minutes beyond its limit.
    """

    at: float
    ranks: tuple[int, ...]  # who is at work while the others wait; empty: the job, no rank stands out
    standing_s: float  # without a step so far, or what each step takes
    expected_s: float | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Attended:
    """No step, as a person is at a rank's debugger or terminal, and may stay as long as that takes. Said once."""

    at: float
    ranks: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hung:
    """No step for more than the limit, and nobody is at work: a fault. Said once, and again if it gets surer.

    If ``Recovered`` follows before anybody acted, it was none: they step again, or are at work again.
    """

    at: float
    ranks: tuple[int, ...]  # who holds the others up; all of them if nobody can be singled out
    kind: HangKind
    standing_s: float
    expected_s: float | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """As ``Hung``, but what is missing is not here: a rank of another node, or the network. Said once.

    Only for a caller that watches a part of the job. No ground to act on by itself: a rank elsewhere may be slow, and
    if it hangs, its own node says ``Hung``. If every part of the job says this, names nobody, and none says ``Slow`` or
    ``Hung``, the network is stuck. Said again if it is known later who is missing.
    """

    at: float
    ranks: tuple[int, ...]  # who waits
    standing_s: float
    expected_s: float | None
    reason: str
    missing: tuple[int, ...] = ()  # the ranks elsewhere for which they wait, as far as that is known...
    kind: HangKind = HangKind.UNCLEAR  # ... and how sure it is that these will not go on


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What was said last is over: the ranks step or work again, or their pace has lasted and is now the usual one."""

    at: float
    ranks: tuple[int, ...]
    reason: str
    is_of_pace: bool = False  # what was said last is that steps take longer
    is_new_usual: bool = False
    was_hung: bool = False  # what was said last is ``Hung``


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfStep:
    """A rank seems to have left out a collective in ``step``, so that it and the others do not the same. Said once."""

    at: float
    since: float  # the end of that step
    step: int
    rank: int
    reason: str


Verdict: TypeAlias = Attended | Degraded | Slow | Hung | Waiting | OutOfStep | Recovered
