"""The watch over a job's pace: ``observe(state, sample) -> (state, verdicts)``, and when to look again.

The paper's fourth detection method (Unicron, arXiv 2401.00134: "online statistical monitoring"), without a configured
time-out: what is usual is learned from the job itself.
"""

from __future__ import annotations

from dataclasses import replace

from unicron_elastic.detection.allowance import Allowance, allowance
from unicron_elastic.detection.drift import ANSWER_S, drift_judged, drifted
from unicron_elastic.detection.lockstep import followed, skip
from unicron_elastic.detection.sample import MEET, TRAIN, RankSample, Sample
from unicron_elastic.detection.sentences import out_of_step
from unicron_elastic.detection.standstill import SLACK_S, judged, learned, look_s, suspected_at
from unicron_elastic.detection.state import Habits, PaceState, RankPace
from unicron_elastic.detection.stride import stride
from unicron_elastic.detection.telling import Verdict
from unicron_elastic.detection.tempo import learn


def observe(state: PaceState, sample: Sample) -> tuple[PaceState, list[Verdict]]:
    """The state after one more look, and what there is to say. A sample that is not newer than the last is ignored."""
    if state.at is not None and sample.at <= state.at:
        return state, []
    state = _advanced(state, sample)
    allowed = [allowance(pace, state) for pace in state.ranks]
    state, verdicts = judged(state, allowed, sample)
    state, more = drift_judged(state, sample.at)
    state, last = _lockstep_judged(_followed(state, sample.at), sample.at)
    return replace(state, at=sample.at, next_at=_next_at(state, allowed, sample.at)), [*verdicts, *more, *last]


def next_look_at(state: PaceState) -> float:
    """When to look again, in monotonic seconds; at once if nothing was seen yet."""
    return state.next_at


def needs_evidence(state: PaceState) -> bool:
    """Whether the next sample should have the signals that cost a read of /proc: some rank is late."""
    return state.standstill is not None


def needs_arrivals(state: PaceState) -> bool:
    """Whether the next sample should have the ranks' arrivals at their collectives."""
    return arrivals_since(state) is not None


def arrivals_since(state: PaceState) -> float | None:
    """After when the answers must have been asked for; None if there is no question."""
    asked = (state.arrivals_asked_at, state.lockstep.asked_at)
    return max((at for at in asked if at is not None), default=None)


def needs_remote_ranks(state: PaceState) -> bool:
    """Whether the next sample should have the ranks of the other nodes: nobody here is at work."""
    return state.asks_remote_ranks and state.standstill is not None and state.standstill.idle_looks > 0


def forget(state: PaceState) -> PaceState:
    """The state for new workers: what is usual stays known, but they have to warm up again."""
    ranks = tuple(
        RankPace(seen=RankSample(rank=pace.seen.rank), began_at=0.0, tempo=pace.tempo.forgotten())
        for pace in state.ranks
    )
    return PaceState(
        policy=state.policy,
        whole_job=state.whole_job,
        asks_remote_ranks=state.asks_remote_ranks,
        ranks=ranks,
        habits=state.habits,
    )


def _advanced(state: PaceState, sample: Sample) -> PaceState:
    """The state with what each rank did since the look before."""
    is_start = state.at is None
    known = {pace.seen.rank: pace for pace in state.ranks}
    left = not is_start and bool(known.keys() - {rank.rank for rank in sample.ranks})
    paces = []
    habits = state.habits
    for rank in sample.ranks:
        pace = known.get(rank.rank)
        if pace is None or is_start or _is_new_worker(pace.seen, rank):
            paces.append(_begun(rank, sample.at, pace))
        else:
            habits = _habits(habits, pace, rank)
            pace = _moved(pace, rank, state)
            paces.append(pace._replace(seen=rank, signals=learned(pace, rank, sample.at)))
    return replace(state, ranks=tuple(paces), habits=habits, is_ending=state.is_ending or left)


def _followed(state: PaceState, at: float) -> PaceState:
    """The state with who is how many steps ahead."""
    if not all(pace.is_warm(state.policy) for pace in state.ranks):
        return state
    steps = tuple(pace.seen.step or 0 for pace in state.ranks)
    lockstep = followed(state.lockstep, steps, at)
    return state if lockstep is state.lockstep else replace(state, lockstep=lockstep)


def _lockstep_judged(state: PaceState, at: float) -> tuple[PaceState, list[Verdict]]:
    """Says who left out a collective, once all ranks have answered; who does not answer records nothing."""
    asked_at = state.lockstep.asked_at
    if asked_at is None or asked_at == at:
        return state, []
    answers = [(pace.seen.rank, pace.seen.arrivals, pace.seen.beats) for pace in state.ranks]
    told = {rank: (arrivals, beats) for rank, arrivals, beats in answers if arrivals is not None and beats is not None}
    if len(told) < len(answers):
        is_over = at - asked_at > ANSWER_S
        return (replace(state, lockstep=state.lockstep.unexplained()) if is_over else state), []
    found = skip(told)
    if found is None:
        return replace(state, lockstep=state.lockstep.unexplained()), []
    beats = told[found.rank][1]
    since = at - (beats.at_s[-1] - beats.at_s[found.step - beats.first])
    verdict = out_of_step(found, since, at)
    return replace(state, lockstep=state.lockstep._replace(asked_at=None, is_told=True)), [verdict]


def _is_new_worker(before: RankSample, now: RankSample) -> bool:
    return before.step is not None and now.step is not None and now.step < before.step


def _begun(rank: RankSample, at: float, before: RankPace | None) -> RankPace:
    pace = RankPace(seen=rank, began_at=at, first_step=rank.step or None)
    return pace if before is None else pace._replace(tempo=before.tempo.forgotten())


def _habits(habits: Habits, pace: RankPace, now: RankSample) -> Habits:
    """the job's habits with what one rank has ended since the look before: a phase, its start."""
    before = pace.seen
    lasted_s = (now.phase_since or 0.0) - (before.phase_since or 0.0)
    if before.phase not in (TRAIN, MEET) and before.phase_since is not None and lasted_s > 0:
        habits = habits.with_phase(before.phase, lasted_s)
    if not before.step and now.step and now.step_at is not None:
        habits = replace(habits, start_s=max(habits.start_s or 0.0, now.step_at - pace.began_at))
    return habits


def _moved(pace: RankPace, now: RankSample, state: PaceState) -> RankPace:
    """One rank with the steps that it has done since the look before."""
    before, policy = pace.seen, state.policy
    if now.step == before.step or now.step is None:
        return pace
    if not before.step:
        return pace._replace(first_step=now.step)
    done = stride(before, now, pace.tempo.typical_s)
    if done is None:
        return pace
    if pace.is_warm(policy):
        return drifted(pace, done, state)
    tempo = learn(pace.tempo, done.step_time_s, policy.window)
    return pace._replace(slowest_s=max(pace.slowest_s, done.longest_s), tempo=tempo)


def _next_at(state: PaceState, allowed: list[Allowance], at: float) -> float:
    """The earliest time at which there may be something to say or to learn."""
    policy = state.policy
    paces = zip(state.ranks, allowed, strict=True)
    wanted = min((_rank_next_at(*each, state, at) for each in paces), default=at + policy.standing_s_max)
    if state.lockstep.is_curious:
        wanted = min(wanted, at + max(pace.tempo.typical_s for pace in state.ranks))
    if state.lockstep.asked_at is not None:
        wanted = min(wanted, at + policy.verify_s)
    return max(wanted, at + policy.look_s_min)


def _rank_next_at(pace: RankPace, allowed: Allowance, state: PaceState, at: float) -> float:
    policy = state.policy
    if not pace.seen.step:
        return at + policy.start_look_s
    suspect_at = suspected_at(allowed, pace, policy)
    if at + SLACK_S < suspect_at:
        return min(at + _pause_s(pace, state), suspect_at)
    return _standing_next_at(state, allowed, at)


def _pause_s(pace: RankPace, state: PaceState) -> float:
    """The time between two looks at a rank that goes on."""
    policy, usual_s = state.policy, pace.tempo.typical_s
    if pace.pending.recent and state.degradation is None:
        return max(policy.look_share * usual_s, min(usual_s, policy.look_s_max))  # short steps one by one
    return max(policy.look_share * usual_s, look_s(pace, policy))


def _standing_next_at(state: PaceState, allowed: Allowance, at: float) -> float:
    """The next look at a standstill: soon at first, then less and less often, and just when the limit is reached."""
    policy = state.policy
    limit_at = allowed.since + allowed.limit_s
    pause_s = max(policy.verify_s, min(policy.standing_share * (at - allowed.since), policy.standing_s_max))
    if state.standstill is not None and state.standstill.told:
        pause_s = policy.standing_s_max
    return min(at + pause_s, limit_at) if at + SLACK_S < limit_at else at + pause_s
