"""How a fault of each kind shows in a worker: the words by which the live system's tables know it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from unicron_elastic.faults import Failure, Status

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
