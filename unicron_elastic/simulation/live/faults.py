"""A fault with all that chance says of it, and what a node's machine asks of the cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import Protocol

from unicron_elastic.faults import Failure, Severity, Status
from unicron_elastic.recovery.node import SUSPECT_S
from unicron_elastic.simulation.history.events import KINDS, Method
from unicron_elastic.simulation.model.accounting import IncidentEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """A fault, and what was drawn with it.

    ``cure``: the severity whose action ends it. ``local_rank``: whom it strikes. ``step_part``: which part of the step
    was done, 0 to 1. ``repair_s``: as in the history.
    """

    status: Status
    entry: IncidentEntry
    cure: Severity
    local_rank: int
    step_part: float
    repair_s: float | None = None
    status_severity: Severity

    @property
    def method(self) -> Method:
        """Return the method by which it is noticed."""
        return KINDS[self.status].method

    @property
    def away_s(self) -> float | None:
        """For how long its node is away if it has to go; None: it does not come back, as far as the history says.

        A node that was only suspected comes back after its quarantine.
        """
        is_broken = KINDS[self.status].severity is Severity.SEV1
        return self.repair_s if self.repair_s is not None or is_broken else SUSPECT_S

    def worse(self) -> Strike:
        """The same once more, when it is known that the node is at fault."""
        return replace(self, status_severity=Severity.SEV1)


class Surroundings(Protocol):
    """What a node's machine needs of the cluster."""

    def why_stay(self) -> str:
        """Why the job cannot go on without this node, as a sentence; "": it can."""

    def isolate(self, strike: Strike) -> None:
        """The node leaves the job and the cluster."""


# How a fault of each kind shows in a worker: the words by which the live system's tables know it.


_BACKEND = "torch.distributed.DistBackendError"
_ACCELERATOR = "torch.AcceleratorError"


class Shows(Enum):
    """What the live system is told of."""

    EXIT = "exit"  # a worker ends
    EXCEPTION = "exception"  # a worker raises
    BROKEN_WORLD = "broken world"  # collectives fail, and nobody is gone
    HANG = "hang"  # a worker makes no step
    SILENCE = "silence"  # a node is gone


_EXCEPTIONS: Mapping[Status, tuple[str, str]] = MappingProxyType(
    {
        Status.ILLEGAL_MEMORY_ACCESS: (_ACCELERATOR, "CUDA error: an illegal memory access was encountered"),
        Status.CUDA_ERROR: (_ACCELERATOR, "CUDA error: unspecified launch failure"),
        Status.OTHER_SOFTWARE_ERROR: ("ValueError", "a batch has no samples"),
        Status.ECC_ERROR: (_ACCELERATOR, "CUDA error: uncorrectable ECC error encountered"),
        Status.INVALID_DMA_MAPPING: (_ACCELERATOR, "CUDA error: mapping of buffer object failed"),
        Status.NVLINK_ERROR: (_ACCELERATOR, "CUDA error: uncorrectable NVLink error detected during the execution"),
        Status.GPU_DRIVER_ERROR: (_ACCELERATOR, "CUDA error: unknown error: GPU is lost"),
        Status.OUT_OF_GPU_MEMORY: ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB."),
        Status.STORAGE_ERROR: ("OSError", "[Errno 28] No space left on device"),
    }
)
_BREAKS: Mapping[Status, tuple[str, str]] = MappingProxyType(
    {
        Status.COLLECTIVE_TIMEOUT: (_BACKEND, "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)"),
        Status.LINK_FLAPPING: (_BACKEND, "NET/IB : mlx5_0:1 Got async event : port error"),
        Status.CONNECTION_REFUSED_OR_RESET: ("RuntimeError", "Connection reset by peer"),
        Status.OTHER_NETWORK_ERROR: (_BACKEND, "NET/IB: completion with error on mlx5_0"),
    }
)
_EXITS: Mapping[Status, tuple[int, str]] = MappingProxyType(
    {
        Status.EXITED_ABNORMALLY: (1, ""),
        Status.KILLED_BY_SIGNAL: (-9, ""),
        Status.OUT_OF_HOST_MEMORY: (-9, "out of memory"),
        Status.STOPPED_BY_REQUEST: (-15, ""),
    }
)


def shows(status: Status) -> Shows:
    """How a fault of that kind shows."""
    if status in _EXCEPTIONS:
        return Shows.EXCEPTION
    if status in _BREAKS:
        return Shows.BROKEN_WORLD
    if status in _EXITS:
        return Shows.EXIT
    return Shows.SILENCE if status is Status.LOST_CONNECTION else Shows.HANG


def failure_of(status: Status, *, at: float, local_rank: int, pid: int, step: int) -> Failure:
    """What a worker of that local rank tells, or leaves, when a fault of that kind strikes it."""
    told = _EXCEPTIONS.get(status) or _BREAKS.get(status)
    code, why_killed = _EXITS.get(status, (None, ""))
    return Failure(
        at=at,
        rank=local_rank,
        local_rank=local_rank,
        pid=pid,
        exit_code=code,
        exception_type=told[0] if told else None,
        message=told[1] if told else None,
        location="train.py:88 in step" if told else None,
        step=step,
        why_killed=why_killed,
    )
