"""Whether steps take longer than usual for a while: a cumulative sum (Page, 1954), per rank.

Each step adds what it took beyond the usual mean, less half of what counts as degraded; the sum never falls below
zero. So noise cancels out, one long step is soon forgotten, and a lasting excess is noticed after a fixed loss of
time: few steps if it is large, many if it is small. While the sum is high, steps are kept apart from the usual ones:
else a slow change would become the usual before it is told.

A job has no usual pace before one has held for a while. In its first seconds buffers run empty, clocks fall and caches
fill: steps that take longer before the pace has settled are its first change, and what is usual is learned anew.
"""

from __future__ import annotations

from dataclasses import replace

from unicron_elastic.detection.sentences import degraded, duration
from unicron_elastic.detection.standstill import named
from unicron_elastic.detection.state import Degradation, PaceState, RankPace
from unicron_elastic.detection.stride import Stride
from unicron_elastic.detection.telling import Recovered, Verdict
from unicron_elastic.detection.tempo import CAP, NOTHING, learn

_BUILDING_UP = 0.35  # of the alarm, which is more than one long step: from then on steps are kept apart
_ROOM = 1.25  # of the alarm: so far the sum goes, or the way back would be as long as the degradation was
_LOOK_MEMORY = 0.1  # weight of the newest look in the number of steps per look
_SPREADS = 0.75  # beyond the mean, on a noisy job: half of one, and what the mean of the window may be wrong by
ANSWER_S = 0.5  # which takes 10 ms, and on a loaded host a turn on a CPU
_NEAR = 0.98  # the median of few steps is not known more closely


def drifted(pace: RankPace, done: Stride, state: PaceState) -> RankPace:
    """The pace after ``done``: the sum, and the steps among the usual ones or apart."""
    policy, tempo, pending = state.policy, pace.tempo, pace.pending
    steps_per_look = pace.steps_per_look + _LOOK_MEMORY * (done.steps - pace.steps_per_look)
    alarm = _alarm(pace, state)
    lost = _lost_steps(pace, done, state)
    is_degraded = state.degradation is not None
    if is_degraded or lost > _BUILDING_UP * alarm:
        pending = learn(pending, done.step_time_s, policy.window)
    else:
        tempo, pending = learn(tempo, done.step_time_s, policy.window), NOTHING
    if not is_degraded and len(pending.recent) >= policy.window:
        tempo, pending, lost = pending, NOTHING, 0.0  # too little of a change to be told has lasted
    lost = min(lost, _ROOM * alarm)
    after = pace._replace(tempo=tempo, pending=pending, steps_per_look=steps_per_look, lost_steps=lost)
    return after if is_degraded else _settling(after, state)


def _settling(pace: RankPace, state: PaceState) -> RankPace:
    """The pace, which has held for one look more, or was no usual one yet: then what it is now is learned."""
    policy = state.policy
    if pace.settled_looks >= policy.settled_looks:
        return pace
    if pace.lost_steps < _alarm(pace, state):
        return pace._replace(settled_looks=pace.settled_looks + 1)
    tempo = pace.tempo
    for step_time_s in pace.pending.recent:
        tempo = learn(tempo, step_time_s, policy.window)
    if len(pace.pending.recent) >= policy.warmup_looks:
        tempo = pace.pending
    return pace._replace(tempo=tempo, pending=NOTHING, lost_steps=0.0, settled_looks=0)


def _lost_steps(pace: RankPace, done: Stride, state: PaceState) -> float:
    policy, tempo = state.policy, pace.tempo
    if len(tempo.recent) < policy.drift_looks:
        return 0.0
    allowed = tempo.mean + max((policy.degraded_factor - 1.0) / 2, _SPREADS * tempo.noise)
    ratio = min(done.step_time_s / tempo.typical_s, CAP)
    lost = (done.steps - done.outliers) * (ratio - allowed) + done.outliers * (CAP - allowed)
    if lost < 0.0 and state.degradation is not None:
        lost *= policy.recovery_speed
    return max(pace.lost_steps + lost, 0.0)


def _alarm(pace: RankPace, state: PaceState) -> float:
    """How large the sum must be for an alarm, in steps: what noise alone does not reach."""
    return max(state.policy.alarm_steps, state.policy.alarm_spreads * pace.tempo.noise * pace.steps_per_look)


def _factor(pace: RankPace) -> float:
    """What steps take since they began to take longer, over the usual."""
    return pace.pending.typical_s / pace.tempo.typical_s if pace.pending.recent else 1.0


def drift_judged(state: PaceState, at: float) -> tuple[PaceState, list[Verdict]]:
    """The state after asking whether a degradation begins or ends."""
    if state.degradation is not None:
        return _recovery(state, state.degradation, at)
    slow = [pace for pace in state.ranks if _is_alarmed(pace, state)]
    if not slow:
        return replace(state, arrivals_asked_at=None), []
    worst = max(slow, key=_factor)
    ranks, clause = named(state.ranks, slow, _factor(worst), at)
    may_stand_out = not ranks and worst.lost_steps < (_ROOM - 0.01) * _alarm(worst, state)
    if len(state.ranks) > 1 and (may_stand_out or not _has_heard(state, at)):
        asked_at = at if state.arrivals_asked_at is None else state.arrivals_asked_at
        return replace(state, arrivals_asked_at=asked_at), []  # a little later more is known
    state = replace(state, arrivals_asked_at=None)
    usual_s = worst.tempo.typical_s
    verdict = degraded(ranks, clause, factor=_factor(worst), usual_s=usual_s, at=at, policy=state.policy)
    return replace(state, degradation=Degradation(at=at, ranks=ranks, usual_s=usual_s)), [verdict]


def _has_heard(state: PaceState, at: float) -> bool:
    """Whether all ranks have answered when they began their collectives, or had enough time for it."""
    asked_at = state.arrivals_asked_at
    if asked_at is None:
        return False
    return all(pace.seen.arrivals is not None for pace in state.ranks) or at - asked_at > ANSWER_S


def _is_alarmed(pace: RankPace, state: PaceState) -> bool:
    return pace.lost_steps >= _alarm(pace, state) and _factor(pace) >= _NEAR * state.policy.degraded_factor


def _recovery(state: PaceState, was: Degradation, at: float) -> tuple[PaceState, list[Verdict]]:
    """Ends the degradation if steps are as before, or have been at their new pace for long enough."""
    if all(pace.lost_steps == 0.0 for pace in state.ranks):
        reason = f"the job's steps take the usual {duration(was.usual_s)} again."
        ranks = tuple(pace._replace(pending=NOTHING) for pace in state.ranks)
        return replace(state, ranks=ranks, degradation=None), [
            Recovered(at=at, ranks=was.ranks, reason=reason, is_of_pace=True)
        ]
    looks = min(len(pace.pending.recent) for pace in state.ranks)
    if looks < state.policy.window or at - was.at < state.policy.relearn_s:
        return state, []
    ranks = tuple(pace._replace(tempo=pace.pending, pending=NOTHING, lost_steps=0.0) for pace in state.ranks)
    usual_s = max(pace.tempo.typical_s for pace in ranks)
    reason = f"the job's steps have long taken {duration(usual_s)}, which now counts as usual."
    verdict = Recovered(at=at, ranks=was.ranks, reason=reason, is_of_pace=True, is_new_usual=True)
    return replace(state, ranks=ranks, degradation=None), [verdict]
