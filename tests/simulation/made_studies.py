"""Studies made by hand, for what presents results."""

from __future__ import annotations

from unicron_elastic.simulation.history.events import History
from unicron_elastic.simulation.model.study_result import (
    CurvePoint,
    LostIn,
    PolicyResult,
    SeedResult,
    SimulatedIncident,
    StudyResult,
)

GPUS = 128
FLOPS = 2e16  # of the whole cluster
DURATION_S = 86400.0


def seed_result(policy: str, seed: int, history: History | None = None, **lost_s: float) -> SeedResult:
    """A result in which the whole cluster stands still for ``lost_s`` seconds of each phase, from the middle on."""
    duration_s = DURATION_S if history is None else history.duration_s
    lost = LostIn(**lost_s)
    start_s = duration_s / 2
    faults = () if history is None else history.faults
    return SeedResult(
        policy=policy,
        seed=seed,
        duration_s=duration_s,
        waf=FLOPS * (duration_s - lost.total),
        waf_ideal=FLOPS * duration_s,
        gpu_s=GPUS * duration_s,
        effective_ratio=1 - lost.total / duration_s,
        lost_waf=LostIn(**{phase: FLOPS * each for phase, each in lost_s.items()}),
        lost_gpu_s=LostIn(**{phase: GPUS * each for phase, each in lost_s.items()}),
        incidents=tuple(
            SimulatedIncident(
                at_s=fault.at_s,
                node=fault.node,
                kind=str(fault.kind),
                job="chat",
                severity=int(fault.severity),
                detection_s=1.0,
                transition_s=2.0,
                sub_healthy_s=0.0,
                lost_flop=1e18,
                reason='It restarts, as "rank 3", or another, died.',
            )
            for fault in faults
        ),
        curve=(CurvePoint(0.0, FLOPS), CurvePoint(start_s, 0.0), CurvePoint(start_s + lost.total, FLOPS)),
        plans=3,
        moves=seed,
    )


def study(varied: str = "", **lost_h: tuple[float, ...]) -> StudyResult:
    """A study of policies; for each the hours that are lost with seed 0, 1, ..., a quarter of them in each phase."""
    phases = ("detection", "transition", "sub_healthy", "overhead")
    return StudyResult(
        scenario="six jobs",
        history="made by hand",
        nodes=16,
        gpus=GPUS,
        varied=varied,
        policies=tuple(
            PolicyResult(
                policy=policy,
                seeds=tuple(
                    seed_result(policy, seed, None, **dict.fromkeys(phases, hours * 900))
                    for seed, hours in enumerate(each)
                ),
            )
            for policy, each in lost_h.items()
        ),
    )
