"""How a GPU is at one moment: load, memory, temperature, what slows it down, what it waits to repair, who uses it.

Source: NVIDIA's "NVML API Reference Guide". Nothing is judged here; what the driver does not tell is None or left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from unicron_elastic.health.gpu.session import RESET_REQUIRED, Gpu, GpuGone, NvmlSession

_Answer = TypeVar("_Answer")

_GPU_SENSOR = 0  # NVML_TEMPERATURE_GPU

# Reasons for which clocks are lower than they could be (nvmlClocksEventReasons). A power cap, an idle GPU or a
# chosen clock are normal and left out.
_THROTTLES = (
    (0x40, "its hardware slows it down because it is too hot"),
    (0x20, "its driver slows it down because it is too hot"),
    (0x80, "an external power brake slows it down"),
)
_ANY_HARDWARE_SLOWDOWN = 0x08

_PROCESS_LISTS = (
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetMPSComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryHolder:
    """A process that holds memory of a GPU. `used_bytes` is None where the driver does not tell."""

    gpu: Gpu
    pid: int
    used_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """One GPU at one moment. `throttling` and `pending` are clauses, each for itself."""

    gpu: Gpu
    utilisation_percent: int | None = None  # of the time, in which some kernel ran
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_c: int | None = None
    throttling: tuple[str, ...] = ()
    pending: tuple[str, ...] = ()  # repairs of memory that wait for a reset, or have failed
    holders: tuple[MemoryHolder, ...] = ()
    gone: str = ""  # why it answers nothing; then all else is unknown

    @property
    def index(self) -> int:
        """NVML's."""
        return self.gpu.index

    @property
    def name(self) -> str:
        """The model, such as "NVIDIA H100 80GB HBM3"."""
        return self.gpu.model


def read_state(session: NvmlSession, gpu: Gpu) -> GpuState:
    """Asks the driver. An answer of a shape that is not known counts as none."""
    try:
        return _read(session, gpu)
    except GpuGone as gone:
        reset = gone.code == RESET_REQUIRED
        return GpuState(gpu=gpu, gone="it has to be reset" if reset else f"it does not answer (NVML error {gone.code})")


def _read(session: NvmlSession, gpu: Gpu) -> GpuState:
    memory: Any = session.ask(gpu, "nvmlDeviceGetMemoryInfo")
    rates: Any = session.ask(gpu, "nvmlDeviceGetUtilizationRates")
    celsius: Any = session.ask(gpu, "nvmlDeviceGetTemperature", _GPU_SENSOR)
    return GpuState(
        gpu=gpu,
        utilisation_percent=_known(lambda: int(rates.gpu)),
        memory_used_bytes=_known(lambda: int(memory.used)),
        memory_total_bytes=_known(lambda: int(memory.total)),
        temperature_c=_known(lambda: int(celsius)),
        throttling=tuple(_known(lambda: throttle_words(session, gpu)) or ()),
        pending=_known(lambda: _pending(session, gpu)) or (),
        holders=tuple(_known(lambda: memory_holders(session, gpu)) or ()),
    )


def _known(read: Callable[[], _Answer]) -> _Answer | None:
    """What `read` makes of an answer; None if there was none, or it has another shape."""
    try:
        return read()
    except (AttributeError, TypeError, ValueError, OverflowError):
        return None


def _pending(session: NvmlSession, gpu: Gpu) -> tuple[str, ...]:
    found = []
    if rows := session.ask(gpu, "nvmlDeviceGetRemappedRows"):
        _, _, is_pending, has_failed = rows
        found += ["a row of bad memory could not be replaced"] if has_failed else []
        found += ["a row of bad memory waits to be replaced"] if is_pending else []
    if session.ask(gpu, "nvmlDeviceGetRetiredPagesPendingStatus"):
        found.append("a page of bad memory waits to be retired")
    return tuple(found)


def throttle_words(session: NvmlSession, gpu: Gpu) -> list[str]:
    """What slows the GPU down now, as clauses; nothing if it runs as it should. Raises GpuGone."""
    reasons = session.ask(gpu, "nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:  # its name before R535
        reasons = session.ask(gpu, "nvmlDeviceGetCurrentClocksThrottleReasons") or 0
    words = [text for bit, text in _THROTTLES if reasons & bit]
    if not words and reasons & _ANY_HARDWARE_SLOWDOWN:
        words = ["its hardware slows it down"]
    return words


def memory_holders(session: NvmlSession, gpu: Gpu) -> list[MemoryHolder]:
    """The driver lists a process under each kind of work it does: it counts once, with the most it is said to hold.

    None for a GPU that is gone.
    """
    used: dict[int, int | None] = {}
    for function in _PROCESS_LISTS:
        try:
            processes: list[Any] = session.ask(gpu, function) or []
        except GpuGone:
            return []
        for process in processes:
            known = used.get(process.pid)
            most = process.usedGpuMemory if known is None else max(known, process.usedGpuMemory or 0)
            used[process.pid] = most
    return [MemoryHolder(gpu=gpu, pid=pid, used_bytes=used[pid]) for pid in sorted(used)]
