"""From two looks at a rank to what it did between them: how many steps, and how long each took."""

from __future__ import annotations

from typing import NamedTuple

from unicron_elastic.detection.sample import RankSample

_HIDDEN_GAP = 1.25  # a mean so far above both the usual and the last step is one long step among ordinary ones
_LEAST_S = 1e-6  # no optimizer step is shorter


class Stride(NamedTuple):
    """The steps between two looks, all of which took about ``step_time_s`` but for ``outliers`` that took longer."""

    steps: int
    step_time_s: float
    outliers: int
    longest_s: float  # an upper bound for the longest of them


def stride(before: RankSample, now: RankSample, usual_s: float) -> Stride | None:
    """What happened between two looks; None if that is not known. ``usual_s`` is zero if not known."""
    if before.step is None or now.step is None or before.step_at is None or now.step_at is None:
        return None
    steps = now.step - before.step
    total_s = max(now.step_at - before.step_at, steps * _LEAST_S)
    if steps == 1:
        return Stride(1, total_s, 0, total_s)
    mean_s = total_s / steps
    last_s = mean_s if now.step_time_s is None else min(max(now.step_time_s, _LEAST_S), total_s)
    longest_s = max(last_s, total_s - (steps - 1) * usual_s)
    if mean_s <= _HIDDEN_GAP * max(last_s, usual_s):
        return Stride(steps, mean_s, 0, longest_s)
    return Stride(steps, last_s, 1, longest_s)
