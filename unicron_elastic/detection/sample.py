"""What the caller saw of its ranks at one moment."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TRAIN", "RankSample", "Sample"]

TRAIN = "train"  # the phase of a worker that says nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSample:
    """One rank. Times are monotonic seconds of this host. What is not known is None.

    The first fields come from the worker's pulse page and from its CPU clock, which cost about a microsecond, and are
    wanted at every look. Those of the last group cost a read of /proc or a call of the driver, and are wanted only
    when ``needs_evidence`` says so. "The worker" includes its descendants: data loaders and compilers work for it.
    """

    rank: int
    step: int | None = None  # optimizer steps done since the worker started
    step_at: float | None = None  # end of the latest step
    step_time_s: float | None = None  # duration of the latest step
    phase: str = TRAIN
    phase_since: float | None = None
    cpu_time_s: float | None = None  # of the worker, cumulative
    collective: int | None = None  # collectives begun, counted alike on all ranks of the sample
    collective_at: float | None = None  # when the latest of them was begun
    waiting: bool | None = None  # whether that collective has not ended

    stopped: bool = False  # state T
    silent: bool = False  # asked which collectives it has begun, it does not answer: its interpreter does not run
    runnable: bool | None = None  # some thread of the worker runs or waits for a CPU (state R)
    in_io: bool | None = None  # some thread waits for a disk, a network file system or a driver (state D)
    uses_gpu: bool = False  # then a collective may wait for a long computation
    gpu_utilisation: float | None = None  # 0 to 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """All ranks that the caller watches, at one moment; a rank that has ended is left out."""

    at: float
    ranks: tuple[RankSample, ...]
