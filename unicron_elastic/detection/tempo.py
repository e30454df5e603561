"""How long a step takes: median, mean and spread over a sliding window, which outliers do not drag along."""

from __future__ import annotations

from typing import NamedTuple

from unicron_elastic.detection.sample import RankSample

CAP = 1.4  # of the median: what one step may count in mean and spread, so that one evaluation is no change of pace
_LEAST_NOISE = 0.01  # clocks and schedulers are no better
_FEW = 16  # values; of more, the figures are worked out anew only at every _EVERY-th one, which is exact enough
_EVERY = 8


class Tempo(NamedTuple):
    """The step times of one rank. All zero while nothing is known."""

    recent: tuple[float, ...] = ()  # seconds
    typical_s: float = 0.0  # median
    mean: float = 1.0  # over the median, of values cut at ``CAP``
    noise: float = 0.0  # standard deviation over the median, of values cut at ``CAP``
    since: int = 0  # values since these figures were worked out

    def forgotten(self) -> Tempo:
        """The same figures, to be replaced by the first values that come."""
        return Tempo((), self.typical_s, self.mean, self.noise)


NOTHING = Tempo()


def learn(tempo: Tempo, step_time_s: float, window: int) -> Tempo:
    """The tempo after one more step time, of which the last ``window`` count."""
    recent = (*tempo.recent, step_time_s)[-window:]
    if len(recent) > _FEW and tempo.since < _EVERY - 1:
        return Tempo(recent, tempo.typical_s, tempo.mean, tempo.noise, tempo.since + 1)
    ordered = sorted(recent)
    half = len(ordered) // 2
    typical_s = ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
    ratios = [min(value / typical_s, CAP) for value in recent]
    mean = sum(ratios) / len(ratios)
    variance = sum([(ratio - mean) ** 2 for ratio in ratios]) / len(ratios)
    return Tempo(recent, typical_s, mean, max(variance**0.5, _LEAST_NOISE))


# From two looks at a rank to what it did between them: how many steps, and how long each took.


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
