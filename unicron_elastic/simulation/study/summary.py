"""A study's results as numbers over seeds, for tables, files and plots alike. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from unicron_elastic.simulation.model.study_result import LOST_PHASES, PolicyResult, SeedResult, StudyResult
from unicron_elastic.simulation.study.interval import Interval, interval


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
