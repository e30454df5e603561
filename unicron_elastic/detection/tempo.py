"""How long a step takes: median, mean and spread over a sliding window, which outliers do not drag along."""

from __future__ import annotations

from typing import NamedTuple

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
