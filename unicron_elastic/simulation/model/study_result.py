"""What one simulated history came to under one policy, as values; nothing here decides or draws.

Of all that is lost, four phases are told apart: the three of the paper's cost model, C_detection + C_transition +
C_sub-healthy, and what a policy costs while nothing is wrong. What was achieved and what was lost add up to what
the same jobs would have achieved without any fault, in WAF as in GPU-seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

LOST_PHASES = ("detection", "transition", "sub_healthy", "overhead")


@dataclass(frozen=True, slots=True, kw_only=True)
class LostIn:
    """One amount for each phase; the unit is that of the field which holds it.

    ``detection``: from a fault until it is noticed, while the job stands still. ``transition``: from there until
    training goes on with something new, the computing that is done a second time included. ``sub_healthy``: training
    with less than there would be without faults, because nodes are away or idle, or a process is being replaced.
    ``overhead``: what the policy costs without any fault, such as checkpoints and redundant computing.
    """

    detection: float = 0.0
    transition: float = 0.0
    sub_healthy: float = 0.0
    overhead: float = 0.0

    @property
    def total(self) -> float:
        """Return the sum of all phases."""
        return self.detection + self.transition + self.sub_healthy + self.overhead


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedIncident:
    """One fault of the history and what it led to.

    ``at_s``: simulated seconds since the history began. ``node``: its number. ``kind``: the paper's word for the
    fault. ``job``: the job that was disturbed, "" if the node was idle or away. ``severity``: 1 to 3, at which the
    fault was answered in the end. ``detection_s`` and ``transition_s``: for how long the job stood still;
    ``sub_healthy_s``: for how long after that something was missing. ``lost_flop``: weighted FLOP, all phases
    together. ``reason``: the decision, as the deciding code says it, one sentence.
    """

    at_s: float
    node: int
    kind: str
    job: str
    severity: int
    detection_s: float
    transition_s: float
    sub_healthy_s: float
    lost_flop: float
    reason: str


class CurvePoint(NamedTuple):
    """From ``at_s`` on the cluster achieves ``waf_flops`` (weighted FLOP/s), until the next point."""

    at_s: float
    waf_flops: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedResult:
    """One policy on one seed's history.

    ``waf``: the integral of weighted achieved FLOP/s, weighted FLOP; ``waf_ideal``: the same jobs on all nodes without
    a fault, by the best plan, without overhead; ``waf == waf_ideal - lost_waf.total`` up to rounding.
    ``gpu_s``: GPU-seconds of the whole cluster; ``lost_gpu_s``: of them, those that trained nothing new.
    ``effective_ratio``: the effective training time ratio, 1 - lost_gpu_s.total / gpu_s. ``plans`` and ``moves``:
    published plans and moved nodes. ``curve``: ascending times, the first at 0.
    """

    policy: str
    seed: int
    duration_s: float
    waf: float
    waf_ideal: float
    gpu_s: float
    effective_ratio: float
    lost_waf: LostIn
    lost_gpu_s: LostIn
    incidents: tuple[SimulatedIncident, ...]
    curve: tuple[CurvePoint, ...]
    plans: int = 0
    moves: int = 0

    @property
    def waf_ratio(self) -> float:
        """Return the share of what would have been achieved without faults."""
        return self.waf / self.waf_ideal if self.waf_ideal else 0.0

    @property
    def lost_gpu_h(self) -> LostIn:
        """Return what is lost, in GPU-hours."""
        lost = self.lost_gpu_s
        return LostIn(
            detection=lost.detection / 3600.0,
            transition=lost.transition / 3600.0,
            sub_healthy=lost.sub_healthy / 3600.0,
            overhead=lost.overhead / 3600.0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyResult:
    """One policy on all seeds, in their order."""

    policy: str
    seeds: tuple[SeedResult, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyResult:
    """All policies of a study on the same histories. ``varied``: "" or what was changed, such as "checkpoint interval
    900 s", where this is one of several studies of a sensitivity.

    ``scenario``: its name. ``history``: of what the faults were made, with its source. ``gpus``: of the cluster.
    """

    scenario: str
    history: str
    nodes: int
    gpus: int
    policies: tuple[PolicyResult, ...]
    varied: str = ""
