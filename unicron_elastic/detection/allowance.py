"""How long a rank may go without a step, by what it is doing."""

from __future__ import annotations

import math
from typing import NamedTuple

from unicron_elastic.detection.sample import MEET, SPARE, TRAIN
from unicron_elastic.detection.state import PaceState, RankPace


class Allowance(NamedTuple):
    """From ``since`` on, ``limit_s``; infinite if there is nothing to judge by."""

    since: float
    expected_s: float | None  # what it usually takes; None: not known
    limit_s: float
    doing: str = ""  # what takes so long, as the end of a sentence; "" for a step


def allowance(pace: RankPace, state: PaceState, floor_s: float = 0.0) -> Allowance:
    """What ``pace`` may take for what it is doing, but at least ``floor_s``; less if it is stopped."""
    found = _allowance(pace, state)
    if pace.seen.stopped:
        limit_s = min(found.limit_s, max(_step_limit_s(pace, state), state.policy.stopped_s))
    else:
        limit_s = max(found.limit_s, floor_s, state.policy.unseen_phase_s if state.is_ending else 0.0)
    if limit_s == found.limit_s:
        return found
    return Allowance(found.since, found.expected_s, limit_s, found.doing)


def _allowance(pace: RankPace, state: PaceState) -> Allowance:
    seen, policy = pace.seen, state.policy
    if seen.phase == SPARE:
        return Allowance(seen.phase_since or pace.began_at, None, math.inf, " of the wait")
    if not seen.step or seen.step_at is None:
        return _start(pace, state)
    since = max(seen.step_at, seen.phase_since or seen.step_at)
    if seen.phase == MEET:  # it takes as long as the last one takes to come
        return Allowance(since, None, max(policy.warmup_s, _step_limit_s(pace, state)), " of the meeting")
    if seen.phase != TRAIN:
        return _phase(pace, state, since)
    if not pace.is_warm(policy):
        limit_s = max(policy.warmup_s, policy.warmup_factor * pace.slowest_s)
        return Allowance(since, pace.slowest_s or None, limit_s, " of the warm-up")
    return Allowance(since, pace.tempo.typical_s, _step_limit_s(pace, state))


def _step_limit_s(pace: RankPace, state: PaceState) -> float:
    """How long one step may take; while steps take longer, of what they take now."""
    policy, tempo = state.policy, pace.tempo
    return max(
        policy.hung_factor * max(tempo.typical_s, pace.pending.typical_s),
        (1.0 + policy.spreads * tempo.noise) * tempo.typical_s,
        policy.survived_factor * state.habits.survived_s,
    )


def _start(pace: RankPace, state: PaceState) -> Allowance:
    start_s = state.habits.start_s
    if start_s is None:
        return Allowance(pace.began_at, None, math.inf, " of the start")
    return Allowance(
        pace.began_at, start_s, max(state.policy.warmup_s, state.policy.hung_factor * start_s), " of the start"
    )


def _phase(pace: RankPace, state: PaceState, since: float) -> Allowance:
    phase, policy = pace.seen.phase, state.policy
    longest_s = state.habits.longest_s(phase)
    doing = f' of phase "{phase}"'
    if pace.seen.phase_limit_s is not None:
        return Allowance(since, None, max(pace.seen.phase_limit_s, _step_limit_s(pace, state)), doing)
    if longest_s is None:
        return Allowance(since, None, policy.unseen_phase_s, doing)
    limit_s = max(policy.hung_factor * longest_s, policy.phase_floor_s, _step_limit_s(pace, state))
    return Allowance(since, longest_s, limit_s, doing)
