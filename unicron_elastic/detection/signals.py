"""Which rank holds the others up.

In synchronous training all ranks show the same step time, so the time of a step names nobody. Two signals do: who
begins collectives late and, where that is not known, whose CPU time for a step has grown. Each is compared with what it
usually is on this rank: a rank that logs is always a little late.
"""

from __future__ import annotations

from unicron_elastic.detection.arrivals import later_s
from unicron_elastic.detection.sample import RankSample
from unicron_elastic.detection.state import RankPace, Signals
from unicron_elastic.detection.words import duration, verb

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
    """By how much the CPU time for a step has grown, in seconds."""
    was, now, usual_s = pace.signals, pace.seen.cpu_time_s, pace.tempo.typical_s
    if not was.cpu_share or now is None or was.cpu_time_s is None or at <= was.at:
        return None
    return ((now - was.cpu_time_s) / (at - was.at) * factor - was.cpu_share) * usual_s


def _least_growth_s(pace: RankPace, factor: float) -> float:
    usual_s = pace.tempo.typical_s
    return usual_s * max(_OWN_SHARE * (factor - 1.0), _LEAST_GROWTH * (pace.signals.cpu_share or 0.0))
