"""The values that metrics are made from: what an agent, a job and a plan look like at one moment. Seconds, FLOP/s."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Distribution:
    """How many values fell up to each bound, and above the one before it; the last of ``counts`` is for all above.

    ``total`` is the sum of the values.
    """

    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentFigures:
    """What all incidents of a node come to. ``counts``: by severity and status; ``lost_gpu_s``: by phase."""

    counts: tuple[tuple[int, str, int], ...]
    lost_gpu_s: tuple[tuple[str, float], ...]
    recovery: Distribution
    reused: int
    recomputed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFigures:
    """One worker. ``step`` and ``step_time_s`` are None where it does not tell them."""

    rank: int
    is_running: bool
    step: int | None
    step_time_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFigures:
    """A job as one of its nodes sees it.

    ``last_step_unix_s``: None before the first. ``incidents``: None until those of before have been counted.
    """

    run_id: str
    script: str
    node: str
    phase: str
    generation: int
    restarts_used: int
    restarts_limit: int
    nodes: int
    world_size: int
    workers: tuple[WorkerFigures, ...]
    is_incident_open: bool
    started_unix_s: float
    last_step_unix_s: float | None
    incidents: IncidentFigures | None

    @property
    def step(self) -> int | None:
        """The furthest step of any worker; None if none tells one."""
        return max((worker.step for worker in self.workers if worker.step is not None), default=None)

    @property
    def step_time_s(self) -> float | None:
        """The median of the workers, so that one straggler does not speak for all; None if none tells one."""
        times = [worker.step_time_s for worker in self.workers if worker.step_time_s]
        return median(times) if times else None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFigures:
    """An agent of the cluster, and what it does."""

    node: str
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinationFigures:
    """One process's part in the coordination of the cluster. ``lost_nodes``: that it has removed."""

    leads: bool
    knows_coordinator: bool
    sees_store: bool
    lost_nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJobFigures:
    """One job that is alive. ``plan_flops`` and ``achieved_flops`` are weighted FLOP/s; ``nodes``: by state.

    ``is_estimate``: nobody says what a step of it computes.
    """

    run_id: str
    plan_nodes: int
    plan_flops: float
    achieved_flops: float
    nodes: tuple[tuple[str, int], ...]
    is_estimate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFigures:
    """What the coordinator knows of the cluster. ``made_unix_s``, ``waf_flops``: of the plan; None before the first.

    ``nodes``: how many by state; ``quarantined``: hosts.
    """

    nodes: tuple[tuple[str, int], ...] = ()
    quarantined: tuple[str, ...] = ()
    made_unix_s: float | None = None
    waf_flops: float | None = None
    jobs: tuple[PlannedJobFigures, ...] = ()
