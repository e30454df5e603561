"""The words for faults: how bad (severity), what (status), what is known (failure) and what it means (fault).

The statuses and their severities are table 1 of the Unicron paper (arXiv 2401.00134), section "error detection", plus
the ends of a process that the paper folds into "exited abnormally". Everything here is a value; nothing decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from types import MappingProxyType


class Severity(IntEnum):
    """How bad a fault is: 1 is worst, so the worst of several is their `min`. Numbered as in the paper."""

    SEV1 = 1
    SEV2 = 2
    SEV3 = 3

    @property
    def action(self) -> str:
        """What is done first at this severity, as a fragment that reads well after "so"."""
        return _ACTIONS[self]


_ACTIONS: Mapping[Severity, str] = MappingProxyType(
    {
        Severity.SEV3: "retry in place with new communicators",
        Severity.SEV2: "restart that process while the others go on",
        Severity.SEV1: "isolate the node and regroup",
    }
)


class Status(str, Enum):
    """What went wrong. The values are the paper's words in lower case and appear as such in logs and reports."""

    # The paper's table 1.
    COLLECTIVE_TIMEOUT = "collective time-out"
    LINK_FLAPPING = "link flapping"
    CONNECTION_REFUSED_OR_RESET = "connection refused or reset"
    OTHER_NETWORK_ERROR = "other network error"
    EXITED_ABNORMALLY = "exited abnormally"
    ILLEGAL_MEMORY_ACCESS = "illegal memory access"
    CUDA_ERROR = "CUDA error"
    TASK_HANG = "task hang"
    OTHER_SOFTWARE_ERROR = "other software error"
    LOST_CONNECTION = "lost connection"
    ECC_ERROR = "ECC error"
    INVALID_DMA_MAPPING = "invalid DMA mapping"
    NVLINK_ERROR = "NVLink error"
    GPU_DRIVER_ERROR = "GPU driver error"
    # Ours: frequent ends whose cure differs from "restart and hope", so people want to see them named.
    OUT_OF_GPU_MEMORY = "out of GPU memory"
    OUT_OF_HOST_MEMORY = "out of host memory"
    STORAGE_ERROR = "storage error"
    KILLED_BY_SIGNAL = "killed by signal"
    STOPPED_BY_REQUEST = "stopped by request"

    def __str__(self) -> str:
        # Formatting a str-mixed enum changed between Python 3.10 and 3.12; this makes all of them print the value.
        return str.__str__(self)


# Severities of the paper's table 1 (its severities, not its detection methods: those are detection's matter). Ours are
# SEV2 because in each of them the process is gone, or unusable, while the node is not known to be bad.
SEVERITY_OF: Mapping[Status, Severity] = MappingProxyType(
    {
        Status.COLLECTIVE_TIMEOUT: Severity.SEV3,
        Status.LINK_FLAPPING: Severity.SEV3,
        Status.CONNECTION_REFUSED_OR_RESET: Severity.SEV3,
        Status.OTHER_NETWORK_ERROR: Severity.SEV3,
        Status.EXITED_ABNORMALLY: Severity.SEV2,
        Status.ILLEGAL_MEMORY_ACCESS: Severity.SEV2,
        Status.CUDA_ERROR: Severity.SEV2,
        Status.TASK_HANG: Severity.SEV2,
        Status.OTHER_SOFTWARE_ERROR: Severity.SEV2,
        Status.LOST_CONNECTION: Severity.SEV1,
        Status.ECC_ERROR: Severity.SEV1,
        Status.INVALID_DMA_MAPPING: Severity.SEV1,
        Status.NVLINK_ERROR: Severity.SEV1,
        Status.GPU_DRIVER_ERROR: Severity.SEV1,
        Status.OUT_OF_GPU_MEMORY: Severity.SEV2,
        Status.OUT_OF_HOST_MEMORY: Severity.SEV2,
        Status.STORAGE_ERROR: Severity.SEV2,
        Status.KILLED_BY_SIGNAL: Severity.SEV2,
        Status.STOPPED_BY_REQUEST: Severity.SEV2,
    }
)


class HangKind(IntEnum):
    """How sure it is that workers which make no step, and do not work, will not go on by themselves: 3 is sure."""

    UNCLEAR = 0  # nobody waits for them in a collective: perhaps training is over, and something is uploaded
    AWAITED = 1  # others wait for them in a collective; they may themselves wait, for data
    DEADLOCKED = 2  # all ranks of the job wait in the same collective: only the network can still move
    STOPPED = 3  # by a signal


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What is known of the end, or the exception, of one worker. Give what is known and leave out the rest.

    `at` is in monotonic seconds of the host that noticed. `exit_code` is negative for a signal, as `subprocess` has it,
    and None while the process has not exited. `exception_type` is the qualified name ("torch.OutOfMemoryError"; no
    "builtins."). `stack` is the formatted traceback. `location` is the innermost frame of the user's code, such as
    "train.py:88 in step". `step` counts the optimizer steps that the worker
    had done since it started. `why_killed` is why the kernel killed it, if that is known: "out of memory".
    """

    at: float
    rank: int
    local_rank: int
    pid: int
    host: str = ""
    exit_code: int | None = None
    exception_type: str | None = None
    message: str | None = None
    stack: str | None = None
    location: str | None = None
    step: int | None = None
    why_killed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What a failure means.

    `is_consequence` says that the error is about *another* rank (it went away, did not arrive, or stopped us): such a
    fault is never the root cause while any other rank has a fault of its own. `reason` is one sentence for people.
    `blames_worker` is false where the worker is only where it was seen: all wait, and nobody is missing.
    """

    failure: Failure
    status: Status
    severity: Severity
    is_consequence: bool
    reason: str
    blames_worker: bool = True
