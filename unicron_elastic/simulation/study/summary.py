"""A study's results as numbers over seeds, for tables, files and plots alike. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich import box
from rich.table import Table

from unicron_elastic.simulation.model.accounting import LOST_PHASES, PolicyResult, SeedResult, StudyResult

# Means over seeds with their 95 % confidence intervals (Student's t). Pure.


# The 97.5th percentile of Student's t for 1, 2, ... 30 degrees of freedom, then for as many as stand with it.
_T = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)
_T_LARGE = ((40, 2.0211), (60, 2.0003), (120, 1.9799), (1000, 1.9623))


class Interval(NamedTuple):
    """A mean, and the 95 % confidence interval of it; of one value it is not known (nan)."""

    mean: float
    low: float
    high: float

    @property
    def half(self) -> float:
        """Half of the interval's width."""
        return (self.high - self.low) / 2


def interval(values: Sequence[float]) -> Interval:
    """The mean of ``values``, one for each seed. Raises ``ValueError`` if there are none."""
    if not values:
        raise ValueError("there are no values: at least one seed is needed")
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Interval(mean, math.nan, math.nan)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    half = _quantile(len(values) - 1) * math.sqrt(variance / len(values))
    return Interval(mean, mean - half, mean + half)


def _quantile(freedom: int) -> float:
    """Take the next smaller number of degrees of freedom in the table: intervals are rather too wide."""
    if freedom <= len(_T):
        return _T[freedom - 1]
    return next((t for least, t in reversed(_T_LARGE) if freedom >= least), _T[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySummary:
    """One policy over its seeds.

    ``waf``: accumulated, weighted FLOP. ``of_ideal``: of what would have been without faults. ``of_baseline``: of the
    baseline's on the same history, seed by seed; None if there is no baseline. ``effective_ratio``: of GPU time.
    ``lost_gpu_h``: GPU-hours by phase, ``lost_share``: the same relative to all GPU-hours. ``incidents`` and ``moves``:
    in the mean.
    """

    policy: str
    seeds: int
    waf: Interval
    of_ideal: Interval
    of_baseline: Interval | None
    effective_ratio: Interval
    lost_gpu_h: dict[str, Interval]
    lost_share: dict[str, Interval]
    incidents: float
    moves: float

    @property
    def total_lost_gpu_h(self) -> float:
        return sum(each.mean for each in self.lost_gpu_h.values())


def summarise(study: StudyResult, baseline: str = "megatron") -> list[PolicySummary]:
    """Every policy, the one with the most WAF first. Raises ``ValueError`` if there is none, or one without seeds."""
    if not study.policies:
        raise ValueError(f"the study {study.scenario!r} has no policies")
    base = next((policy for policy in study.policies if policy.policy == baseline), None)
    found = [_one(policy, base) for policy in study.policies]
    return sorted(found, key=lambda each: (-each.waf.mean, each.policy))


def _one(policy: PolicyResult, base: PolicyResult | None) -> PolicySummary:
    seeds = policy.seeds

    def over(of: Callable[[SeedResult], float]) -> Interval:
        return interval([of(seed) for seed in seeds])

    return PolicySummary(
        policy=policy.policy,
        seeds=len(seeds),
        waf=over(lambda seed: seed.waf),
        of_ideal=over(lambda seed: seed.waf_ratio),
        of_baseline=None if base is None else _ratio(seeds, base.seeds),
        effective_ratio=over(lambda seed: seed.effective_ratio),
        lost_gpu_h={phase: interval([getattr(seed.lost_gpu_h, phase) for seed in seeds]) for phase in LOST_PHASES},
        lost_share={phase: interval([_share(seed, phase) for seed in seeds]) for phase in LOST_PHASES},
        incidents=sum(len(seed.incidents) for seed in seeds) / len(seeds),
        moves=sum(seed.moves for seed in seeds) / len(seeds),
    )


def _share(seed: SeedResult, phase: str) -> float:
    lost: float = getattr(seed.lost_gpu_s, phase)
    return lost / seed.gpu_s if seed.gpu_s else 0.0


def _ratio(seeds: Sequence[SeedResult], base: Sequence[SeedResult]) -> Interval | None:
    """Compare the seeds that both have: the same history, so that its luck does not count."""
    waf_of = {seed.seed: seed.waf for seed in base}
    ratios = [seed.waf / waf_of[seed.seed] for seed in seeds if waf_of.get(seed.seed)]
    return interval(ratios) if ratios else None


# A study's results as a table for the terminal.


_PREFIXES = ((1e24, "Y"), (1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1.0, ""))
_HEADS = {
    "detection": "detection",
    "transition": "transition",
    "sub_healthy": "sub-healthy",
    "overhead": "overhead",
}


def study_table(study: StudyResult, baseline: str = "megatron") -> Table:
    """One row for each policy, the best first; after "±" half of the 95 % confidence interval over seeds.

    GPU-hours lost are means over seeds. Raises ``ValueError`` for a study without policies or seeds.
    """
    found = summarise(study, baseline)
    scale, prefix = next(each for each in _PREFIXES if found[0].waf.mean >= each[0] or each[0] == 1.0)
    with_baseline = found[0].of_baseline is not None
    table = Table(
        title=_title(study),
        caption=_caption(study, found),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("policy", min_width=8)
    heads = [f"WAF, {prefix}FLOP", "of ideal, %", *([f"of {baseline}"] if with_baseline else []), "effective, %"]
    for head in (*heads, *_HEADS.values()):
        table.add_column(head, justify="right", min_width=6, overflow="fold")
    for each in found:
        cells = [each.policy, f"{each.waf.mean / scale:.4g}", _percent(each.of_ideal)]
        if with_baseline:
            cells.append("" if each.of_baseline is None else _factor(each.of_baseline))
        cells.append(_percent(each.effective_ratio))
        table.add_row(*cells, *(_hours(each.lost_gpu_h[phase].mean) for phase in LOST_PHASES))
    return table


def _title(study: StudyResult) -> str:
    varied = f", {study.varied}" if study.varied else ""
    return f"{study.scenario}{varied}: {study.gpus:,} GPUs on {study.nodes:,} nodes"


def _caption(study: StudyResult, found: list[PolicySummary]) -> str:
    seeds = found[0].seeds
    counted = "1 seed" if seeds == 1 else f"{seeds} seeds, ± half of the 95 % interval"
    return (
        f"Columns from detection to overhead: GPU-hours lost. {counted}; {found[0].incidents:.1f} faults each.\n"
        f"{study.history}"
    )


def _percent(value: Interval) -> str:
    return f"{value.mean * 100:.1f}" + ("" if math.isnan(value.half) else f" ±{value.half * 100:.1f}")


def _factor(value: Interval) -> str:
    return f"{value.mean:.3f}" + ("" if math.isnan(value.half) else f" ±{value.half:.3f}")


def _hours(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
