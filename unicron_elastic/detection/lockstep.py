"""Whether all ranks begin the same collectives in the same steps.

A rank that leaves one out goes on with the next one, which the others take for the one that is missing: nothing
hangs and nothing gets slow, but from then on every step mixes what does not belong together. Such a rank is ahead
of the others and stays so. The steps alone show that; which rank it is, and in which step it happened, follows from
when each rank has ended its steps and begun its collectives.

It is no proof. A step that one rank alone makes beside the training, or a thread whose collectives fall behind,
looks the same. Who makes one in a moment, though, is told from who computed as long as ever.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from unicron_elastic.detection.arrivals import Arrivals, Beats

PATIENCE_LOOKS = 4  # looks in a row at which the ranks are apart, each a step later: then it is asked why
_EARLY_LOOKS, _SOON_LOOKS = 8, 2  # before so many, an answer may only have come too early
_PATIENCE_MAX_LOOKS = 80
_CURIOUS_LOOKS = 20  # of a longer patience nobody is in a hurry
_STEPS_BEFORE = 3  # on which all ranks agree by how many collectives they differ, most often none...
_STEPS_AFTER = 3  # ... and by how many they differ now
_USUAL_STEPS = 16
_LEAST_STEP = 0.5  # of the usual time: what takes less is no training step whose collectives were left out


class Lockstep(NamedTuple):
    """By how many steps the ranks are ahead of the first of them, and for how many looks other than usual."""

    steps: tuple[int, ...] = ()  # at the latest look that counts
    usual: tuple[int, ...] = ()
    odd: tuple[int, ...] = ()
    odd_looks: int = 0
    patience: int = PATIENCE_LOOKS
    asked_at: float | None = None
    is_told: bool = False

    @property
    def is_curious(self) -> bool:
        """Whether it is to be looked again after the next step."""
        return 0 < self.odd_looks < self.patience <= _CURIOUS_LOOKS

    def unexplained(self) -> Lockstep:
        """After an answer that names nobody, or none: it is asked again if it lasts, and at last is taken for usual."""
        patience = self.patience + _SOON_LOOKS if self.patience < _EARLY_LOOKS else 2 * self.patience
        usual = self.odd if patience > _PATIENCE_MAX_LOOKS else self.usual
        return self._replace(usual=usual, patience=min(patience, _PATIENCE_MAX_LOOKS), asked_at=None)


NOTHING = Lockstep()


class Skip(NamedTuple):
    """One rank began fewer collectives in a step than it usually does, and so is apart from the others since."""

    rank: int
    step: int
    missing: int
    op: str  # of the others' collectives in that step; "" if there were several, or if it is not known


def followed(lockstep: Lockstep, steps: tuple[int, ...], at: float) -> Lockstep:
    """After one more look at the ``steps`` of all ranks. One at which somebody has not gone on does not count."""
    if lockstep.is_told or lockstep.asked_at is not None or len(steps) < 2:
        return lockstep
    if len(lockstep.steps) != len(steps):
        return Lockstep(steps=steps, usual=(0,) * len(steps))
    if any(now <= before for now, before in zip(steps, lockstep.steps, strict=True)):
        return lockstep
    leads = tuple(step - steps[0] for step in steps)
    if leads == lockstep.usual:
        return lockstep._replace(steps=steps, odd_looks=0)
    looks = lockstep.odd_looks + 1 if leads == lockstep.odd else 1
    asked_at = at if looks >= lockstep.patience else None
    return lockstep._replace(steps=steps, odd=leads, odd_looks=looks, asked_at=asked_at)


def skip(ranks: Mapping[int, tuple[Arrivals, Beats]]) -> Skip | None:
    """Return who left out collectives, if that is plain: the ranks were in step before, and are apart by that since.

    A rank that ended a step without its optimizer did something else and is not named.
    """
    begun = {rank: _begun(*told) for rank, told in ranks.items()}
    steps = sorted(set.intersection(*(set(each) for each in begun.values()))) if begun else []
    apart = [tuple(each[step] - min(of[step] for of in begun.values()) for each in begun.values()) for step in steps]
    at = _change(apart)
    if at is None or steps[at] - steps[at - 1] != 1:
        return None
    usual = steps[max(0, at - _USUAL_STEPS) : at]
    found = []
    for rank, of in begun.items():
        expected = median(of[now] - of[before] for before, now in pairwise(usual))
        done = of[steps[at]] - of[steps[at - 1]]
        if expected > done and (done > 0 or _took_usual_time(ranks[rank][1], steps[at], len(usual))):
            found.append((rank, int(expected - done)))
    if len(found) != 1:
        return None
    rank, missing = found[0]
    shift = [now - before for now, before in zip(apart[at], apart[at - 1], strict=True)]
    place = list(begun).index(rank)
    if any(other - shift[place] != missing for number, other in enumerate(shift) if number != place):
        return None
    return Skip(rank, steps[at], missing, _operation(ranks, begun, rank, steps[at]))


def _took_usual_time(beats: Beats, step: int, steps_before: int) -> bool:
    index = step - beats.first
    took_s = [now - before for before, now in pairwise(beats.at_s[max(0, index - steps_before - 1) : index + 1])]
    return len(took_s) > 1 and took_s[-1] >= _LEAST_STEP * median(took_s[:-1])


def _begun(arrivals: Arrivals, beats: Beats) -> dict[int, int]:
    """How many collectives a rank had begun at the end of each step, where that is known for sure."""
    if not arrivals.at_s:
        return {}
    return {
        step: arrivals.first + bisect_right(arrivals.at_s, at) - 1
        for step, at in enumerate(beats.at_s, beats.first)
        if arrivals.at_s[0] <= at < arrivals.at_s[-1]
    }


def _change(apart: list[tuple[int, ...]]) -> int | None:
    """The index from which on it is as it is now, if it was constant before as well."""
    at = len(apart) - 1
    while at > 0 and apart[at - 1] == apart[-1]:
        at -= 1
    if at < _STEPS_BEFORE + 1 or len(apart) - at < _STEPS_AFTER:
        return None
    return at if len(set(apart[at - _STEPS_BEFORE - 1 : at])) == 1 else None


def _operation(
    ranks: Mapping[int, tuple[Arrivals, Beats]], begun: Mapping[int, Mapping[int, int]], but: int, step: int
) -> str:
    names: set[str] = set()
    for rank, (arrivals, _) in ranks.items():
        if rank != but and arrivals.ops:
            first, end = begun[rank][step - 1] + 1 - arrivals.first, begun[rank][step] + 1 - arrivals.first
            names.update(arrivals.ops[first:end])
    return names.pop() if len(names) == 1 else ""
