"""When a standstill is slow and when it is a hang.

Evidence is gathered from two thirds of the limit on. At the limit it is a hang if nobody whom the others wait for has
been at work lately, at several looks; slow, after a while, if somebody has. A live job has some rank on a CPU, or
waiting for one, at nearly every instant: that tells a rank that the machine has paused from one that hangs.
"""

from __future__ import annotations

from dataclasses import replace

from unicron_elastic.detection.allowance import Allowance, allowance
from unicron_elastic.detection.arrivals import later_s
from unicron_elastic.detection.evidence import Suspects, is_blind, moved_on, suspects, work
from unicron_elastic.detection.policy import PacePolicy
from unicron_elastic.detection.sample import RankSample, Sample
from unicron_elastic.detection.sentences import at_work_again, attended, duration, idle, sentence, slow, verb, who
from unicron_elastic.detection.state import Habits, PaceState, RankPace, Signals, Standstill
from unicron_elastic.detection.telling import Attended, Hung, Recovered, Slow, Verdict, Waiting
from unicron_elastic.faults import HangKind

SLACK_S = 1e-9  # a look at the very moment it was wanted is not too early, however that was rounded


def suspected_at(allowed: Allowance, pace: RankPace, policy: PacePolicy) -> float:
    """Return from when on a rank without a step is looked at more closely.

    For short steps later than the share of the limit says: a look at every second step would cost more than the
    100 ms are worth that verifying may take.
    """
    return allowed.since + max(policy.suspect_share * allowed.limit_s, look_s(pace, policy))


def look_s(pace: RankPace, policy: PacePolicy) -> float:
    """The least time between two looks at a rank that goes on."""
    usual_s = pace.tempo.typical_s
    return min(policy.look_s_max, policy.hung_factor * usual_s + policy.look_slack_s) if usual_s else policy.look_s_max


def judged(state: PaceState, allowed: list[Allowance], sample: Sample) -> tuple[PaceState, list[Verdict]]:
    """The state after judging who stands still; ``allowed`` is what each rank may take."""
    latest = sample.at + SLACK_S
    paces = zip(state.ranks, allowed, strict=True)
    standing = [pace for pace, each in paces if latest >= suspected_at(each, pace, state.policy)]
    was = state.standstill
    if was is None and not standing:
        return state, []
    marks = tuple((pace.seen.rank, pace.seen.step) for pace in standing)
    verdicts: list[Verdict] = []
    if was is not None and not set(was.marks) & set(marks):
        state, verdicts = _ended(state, was, sample)
        was = None
    if not standing:
        return replace(state, standstill=None), verdicts
    if was is None:
        return replace(state, standstill=Standstill(marks=marks, seen=sample.ranks, at=sample.at)), verdicts
    standstill, verdict = _verdict(state, standing, replace(was, marks=marks), sample)
    return replace(state, standstill=standstill), verdicts if verdict is None else [*verdicts, verdict]


def _ended(state: PaceState, was: Standstill, sample: Sample) -> tuple[PaceState, list[Verdict]]:
    """After a standstill: nothing, or the word that it is over."""
    if not was.told:
        return state, []
    here = {rank.rank: rank for rank in sample.ranks}
    ranks = tuple(rank for rank in was.told_ranks if rank in here) or tuple(here)
    if not ranks:
        return state, []
    before = {rank.rank: rank for rank in was.seen}
    stood_s = max(_stood_s(before.get(rank), here[rank], sample.at) for rank in ranks)
    habits = _after(state.habits, was.told, stood_s, state.policy)
    reason = sentence(f"{who(ranks)} {verb(ranks, 'goes', 'go')} on after {duration(stood_s)}")
    was_hung = was.told == Hung.__name__
    return replace(state, habits=habits), [Recovered(at=sample.at, ranks=ranks, reason=reason, was_hung=was_hung)]


def _stood_s(before: RankSample | None, now: RankSample, at: float) -> float:
    """Return the seconds from the step before the standstill to the one after it; to ``at`` if that is not known."""
    if before is None or before.step_at is None:
        return 0.0
    is_next = before.step is not None and now.step == before.step + 1 and now.step_at is not None
    return max((now.step_at if is_next and now.step_at is not None else at) - before.step_at, 0.0)


def _after(habits: Habits, told: str, stood_s: float, policy: PacePolicy) -> Habits:
    """The habits after a standstill that was told and went on: the same is not told again."""
    if told == Hung.__name__:
        return replace(habits, survived_s=max(habits.survived_s, min(stood_s, policy.survived_s_max)))
    if told == Slow.__name__:
        return replace(habits, busy_s=max(habits.busy_s, stood_s))
    return habits


def _verdict(
    state: PaceState, standing: list[RankPace], was: Standstill, sample: Sample
) -> tuple[Standstill, Verdict | None]:
    """What to say at one more look at a standstill."""
    at, policy = sample.at, state.policy
    ranks = frozenset(pace.seen.rank for pace in standing)
    suspected = suspects(sample.everybody, ranks)
    if was.told == Hung.__name__:
        # A thread that waits for Python's lock wakes often, and one look may find it awake: that is no work.
        sample = replace(sample, ranks=tuple(replace(rank, runnable=False) for rank in sample.ranks))
    working = _working(was, suspected, ranks, sample, policy)
    now = _with_idleness(was, bool(working), sample)
    floor_s = policy.blind_floor_s if is_blind(tuple(pace.seen for pace in standing)) else 0.0
    paces = [pace for pace in standing if pace.seen.rank in suspected.ranks] or standing
    allowed = min((allowance(pace, state, floor_s) for pace in paces), key=lambda found: found.since + found.limit_s)
    standing_s = at - allowed.since
    if people := {rank.rank: rank.person for rank in sample.ranks if rank.person}:
        return _attended(replace(now, idle_since=None, idle_looks=0), people, tuple(sorted(ranks)), standing_s, policy)
    if was.told == Hung.__name__ and not working.keys().isdisjoint(was.told_ranks):
        return replace(now, told=""), at_work_again(was.told_ranks, working, standing_s, at)
    if was.told == Hung.__name__:
        return _surer(now, idle(tuple(sorted(ranks)), suspected, allowed, sample, state.whole_job))
    if standing_s < allowed.limit_s - SLACK_S or (was.told == Waiting.__name__ and not sample.remote_ranks):
        return now, None
    verdict: Hung | Slow | Waiting | None = None
    if not working:
        if _is_idle(now, standing_s, policy):
            verdict = idle(tuple(sorted(ranks)), suspected, allowed, sample, state.whole_job)
    elif was.told in ("", Attended.__name__) and standing_s >= _patience_s(allowed, state):
        verdict = slow(working, allowed, at, {rank.seen.rank: rank.node for rank in sample.remote_ranks})
    if verdict is None or not _is_news(verdict, was) or _is_early(verdict, suspected, allowed, state, sample):
        return now, None
    kind = verdict.kind if isinstance(verdict, Hung) else HangKind.UNCLEAR
    missing = verdict.missing if isinstance(verdict, Waiting) else ()
    now = replace(now, told=type(verdict).__name__, told_ranks=verdict.ranks, told_kind=kind, told_missing=missing)
    return now, verdict


def _attended(
    now: Standstill, people: dict[int, str], ranks: tuple[int, ...], standing_s: float, policy: PacePolicy
) -> tuple[Standstill, Verdict | None]:
    """While a person is at one of them nobody hangs, however long it takes."""
    if now.told == Hung.__name__:
        working = {rank: f"has a person at its {place}" for rank, place in people.items()}
        return replace(now, told=""), at_work_again(now.told_ranks, working, standing_s, now.at)
    if now.told == Attended.__name__ or standing_s < policy.attended_s:
        return now, None
    verdict = attended(people, ranks, now.at)
    return replace(now, told=Attended.__name__, told_ranks=verdict.ranks), verdict


def _is_news(verdict: Verdict, told: Standstill) -> bool:
    """Whether it says more than that somebody waits, if that was said."""
    if told.told != Waiting.__name__:
        return True
    return isinstance(verdict, Hung) or (
        isinstance(verdict, Waiting) and bool(verdict.missing) > bool(told.told_missing)
    )


def _is_early(verdict: Verdict, suspected: Suspects, allowed: Allowance, state: PaceState, sample: Sample) -> bool:
    """Whether the other nodes, which have not said yet where their ranks are, may show it in another light."""
    if not state.asks_remote_ranks or isinstance(verdict, Slow):
        return False
    if sample.remote_ranks:
        return any(rank.working is None and rank.seen.rank in suspected.ranks for rank in sample.remote_ranks)
    is_sure = isinstance(verdict, Hung) and verdict.kind is HangKind.STOPPED
    return not is_sure and sample.at - allowed.since < allowed.limit_s + state.policy.elsewhere_s


def _surer(told: Standstill, verdict: Verdict) -> tuple[Standstill, Verdict | None]:
    """A hang is told again if it is surer now, as when the others have come to the collective in which they wait."""
    if not isinstance(verdict, Hung) or verdict.kind <= told.told_kind:
        return told, None
    return replace(told, told_ranks=verdict.ranks, told_kind=verdict.kind), verdict


def _patience_s(allowed: Allowance, state: PaceState) -> float:
    """How long those at work may take before they are called slow."""
    policy = state.policy
    return max(allowed.limit_s + policy.slow_patience_s, policy.survived_factor * state.habits.busy_s)


def _working(
    was: Standstill, suspected: Suspects, standing: frozenset[int], sample: Sample, policy: PacePolicy
) -> dict[int, str]:
    """Tell who is at work, and how that is known; ranks that only wait in a collective are not asked."""
    before = {rank.rank: rank for rank in was.seen}
    found = {}
    for rank in sample.ranks:
        if rank.rank in suspected.ranks:
            words = "has begun what it does only now"
            if rank.rank in standing:
                least_s = policy.idle_tick_s if was.told == Hung.__name__ else 0.0
                words = work(before.get(rank.rank, rank), rank, sample.at - was.at, policy, least_cpu_s=least_s)
            if words:
                found[rank.rank] = words
    found.update(
        {
            rank.seen.rank: rank.working
            for rank in sample.remote_ranks
            if rank.working and rank.seen.rank in suspected.ranks
        }
    )
    if not found and moved_on(was.seen, sample.ranks, standing):
        found = dict.fromkeys(suspected.ranks or sorted(standing), "goes on through collectives")
    return found


def _with_idleness(was: Standstill, is_working: bool, sample: Sample) -> Standstill:
    if is_working:
        return replace(was, seen=sample.ranks, at=sample.at, idle_since=None, idle_looks=0)
    idle_since = sample.at if was.idle_since is None else was.idle_since
    return replace(was, seen=sample.ranks, at=sample.at, idle_since=idle_since, idle_looks=was.idle_looks + 1)


def _is_idle(now: Standstill, standing_s: float, policy: PacePolicy) -> bool:
    """Whether nobody has been at work for long enough, and at enough looks."""
    if now.idle_since is None or now.idle_looks < policy.idle_looks:
        return False
    return now.at - now.idle_since >= policy.idle_share * standing_s - SLACK_S


# Which rank holds the others up.
#
# In synchronous training all ranks show the same step time, so the time of a step names nobody. Two signals do: who
# begins collectives late and, where that is not known, whose CPU time for a step has grown. Each is compared with
# what it usually is on this rank: a rank that logs is always a little late.
_MEMORY = 50  # looks that make up what is usual
_OWN_SHARE = 0.5  # of the lost time: a rank that accounts for so much of it is the one
_LEAST_GROWTH = 0.1  # of the CPU time for a step: less may be chance
_LATE = 2.0  # steps without a step
_GROWN = "the CPU time for a step has grown there and not elsewhere"
_LOCK_STEP = 1  # steps between ranks that wait for each other


def learned(pace: RankPace, now: RankSample, at: float) -> Signals:
    """The signals of one rank after one more look."""
    was = pace.signals
    if pace.pending.recent:
        return was
    if now.step_at is None or at - now.step_at > _LATE * pace.tempo.typical_s:
        # What a rank does in a long gap is not what it does in a step.
        return Signals(was.cpu_share, was.looks, now.cpu_time_s, at)
    looks = min(was.looks + 1, _MEMORY)
    share = was.cpu_share
    if now.cpu_time_s is not None and was.cpu_time_s is not None and at > was.at:
        newest = max(now.cpu_time_s - was.cpu_time_s, 0.0) / (at - was.at)
        share = newest if share is None else share + (newest - share) / looks
    return Signals(share, looks, now.cpu_time_s, at)


def named(paces: tuple[RankPace, ...], slow: list[RankPace], factor: float, at: float) -> tuple[tuple[int, ...], str]:
    """The ranks that explain a degradation by ``factor``, and a clause that says how they are known; often nobody."""
    building_up = sum(bool(pace.pending.recent) for pace in paces)
    steps = [pace.seen.step or 0 for pace in paces]
    are_apart = max(steps) - min(steps) > _LOCK_STEP
    apart = slow if are_apart and building_up == len(slow) else []  # nobody else is even near an alarm
    lost_s = (factor - 1.0) * max(pace.tempo.typical_s for pace in paces)
    for found, clause in (
        (apart, "the others step as usual"),  # ranks that do not wait for each other
        _by_arrival(paces, lost_s) or (_by_work(paces, factor, at), _GROWN),
    ):
        if found and 2 * len(found) <= len(paces):
            return tuple(pace.seen.rank for pace in found), clause
    return (), ""


def _by_arrival(paces: tuple[RankPace, ...], lost_s: float) -> tuple[list[RankPace], str] | None:
    """The ranks whose lateness at collectives makes up the lost time; None if their lateness is not known."""
    arrivals = {pace.seen.rank: pace.seen.arrivals for pace in paces if pace.seen.arrivals is not None}
    if len(arrivals) < len(paces):
        return None
    per_step = max(each.end / max(pace.seen.step or 1, 1) for pace, each in zip(paces, arrivals.values(), strict=True))
    slow_steps = max(len(pace.pending.recent) * pace.steps_per_look for pace in paces)
    extra_s = later_s(arrivals, per_step, slow_steps)
    if not extra_s:
        return None
    found = [pace for pace in paces if extra_s[pace.seen.rank] >= _OWN_SHARE * lost_s]
    pronoun = verb(found, "it begins", "they begin")
    return found, f"{pronoun} collectives {duration(max(extra_s.values()))} later than usual"


def _by_work(paces: tuple[RankPace, ...], factor: float, at: float) -> list[RankPace]:
    """The ranks whose CPU time for a step has grown, beyond that of the others, by their share of the lost time.

    Per step is per second times the time of a step: exact, however few steps there were. Ranks that spin while they
    wait all grow alike, and ranks that lose time without a CPU do not grow: then this names nobody.
    """
    growth_s = {pace.seen.rank: _growth_s(pace, factor, at) for pace in paces}
    known = sorted(value for value in growth_s.values() if value is not None)
    if len(known) < len(paces):
        return []
    others_s = known[(len(known) - 1) // 2]
    return [pace for pace in paces if (growth_s[pace.seen.rank] or 0.0) - others_s >= _least_growth_s(pace, factor)]


def _growth_s(pace: RankPace, factor: float, at: float) -> float | None:
    """Return by how much the CPU time for a step has grown, in seconds."""
    was, now, usual_s = pace.signals, pace.seen.cpu_time_s, pace.tempo.typical_s
    if not was.cpu_share or now is None or was.cpu_time_s is None or at <= was.at:
        return None
    return ((now - was.cpu_time_s) / (at - was.at) * factor - was.cpu_share) * usual_s


def _least_growth_s(pace: RankPace, factor: float) -> float:
    usual_s = pace.tempo.typical_s
    return usual_s * max(_OWN_SHARE * (factor - 1.0), _LEAST_GROWTH * (pace.signals.cpu_share or 0.0))
