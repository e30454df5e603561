"""What a console shows of a job: plain values, made by the agent, drawn by the panel."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One worker of this node. ``step`` and ``step_time_s`` are None where the worker does not report them."""

    rank: int
    local_rank: int
    pid: int
    state: str  # "running", "ended (1)", ... : a word or two that read well after "2 workers"
    step: int | None
    step_time_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalJobView:
    """One job as this node sees it."""

    job: str
    run_id: str
    generation: int
    restarts_used: int
    max_restarts: int
    nodes: int
    world_size: int
    workers: tuple[WorkerView, ...]  # of this node only
    uptime_s: float
    last_incident: str | None
    phase: str = ""  # of recovery.state.Phase
    is_incident_open: bool = False  # there was no step yet since a fault
    last_step_at: float | None = None  # monotonic seconds; None before the first

    @property
    def step(self) -> int | None:
        """The furthest step of any worker; None before the first."""
        return max((worker.step for worker in self.workers if worker.step is not None), default=None)

    @property
    def step_time_s(self) -> float | None:
        """The median step time of the workers, so that one straggler does not speak for all; None if none reports."""
        times = [worker.step_time_s for worker in self.workers if worker.step_time_s]
        return median(times) if times else None

    @property
    def steps_per_s(self) -> float | None:
        """Steps a second at the median step time; None if no worker reports one."""
        time_s = self.step_time_s
        return None if time_s is None else 1 / time_s
