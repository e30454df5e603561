"""One open NVML, and the way every question to it takes.

Source: NVIDIA's "NVML API Reference Guide" (docs.nvidia.com/deploy/nvml-api). A driver may lack a function, and a GPU
may not support one; then that question is dropped and the others go on. Errors that say that the GPU itself is gone
leave as `GpuGone`, whichever call they came from.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from unicron_elastic.base.finding import ProbeNotes

# nvmlReturn_t, by number, so that an older pynvml without a name for one still knows it.
NOT_SUPPORTED = 3
NO_PERMISSION = 4
DRIVER_NOT_LOADED = 9
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
VERSION_MISMATCH = 18
UNKNOWN = 999

# Answers that will be the same tomorrow: invalid argument, not supported, no permission, no ECC in a virtual GPU,
# argument version mismatch, deprecated.
_NEVER = frozenset({2, NOT_SUPPORTED, NO_PERMISSION, 22, 25, 26})

# nvmlValueType_t to the member of nvmlValue_t that holds the value.
_VALUE_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


class GpuGone(Exception):
    """NVML said that this GPU is lost, or that it needs a reset before anything else."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class NvmlUnavailable(Exception):
    """NVML cannot be opened. `is_fault`: not because there is no driver, but because it is broken."""

    def __init__(self, reason: str, *, is_fault: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_fault = is_fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU of the node.

    `index` is NVML's, which is the order on the PCI bus. `pci` is the bus address as Linux writes it. `label` is what
    people read. `handle` is None when NVML could not even find the device, with `code` saying why.
    """

    index: int
    uuid: str
    pci: str
    model: str
    label: str
    handle: Any
    code: int = 0


class NvmlSession:
    """An initialised NVML. All methods are safe from any thread and none raises but `GpuGone`."""

    def __init__(self, library: ModuleType, notes: ProbeNotes, visible: str | None = None) -> None:
        """Takes an opened `pynvml` and lists the GPUs; `visible` is the job's CUDA_VISIBLE_DEVICES."""
        self._library = library
        self._notes = notes
        self._dropped: set[Hashable] = set()
        self._complaints: dict[int, str] = {}
        self._lock = threading.Lock()
        self._uses = 1
        self.gpus = self._list(visible)

    def acquire(self) -> bool:
        """Counts one more user; False if the library has been given back already."""
        with self._lock:
            if self._uses == 0:
                return False
            self._uses += 1
            return True

    def release(self) -> None:
        """The last user to leave gives the library back."""
        with self._lock:
            self._uses -= 1
            is_last = self._uses == 0
        if is_last:
            self._ask("nvmlShutdown")

    def ask(self, gpu: Gpu, function: str, *arguments: Any) -> Any | None:
        """The answer of `function` for `gpu`, or None if there is none (now, or ever: then it is not asked again).

        Raises GpuGone if the GPU is lost or needs a reset.
        """
        if gpu.handle is None:
            raise GpuGone(gpu.code)
        return self._ask(function, gpu.handle, *arguments, key=(function, gpu.index, arguments), gpu=gpu)

    def ask_any(self, function: str, *arguments: Any) -> Any | None:
        """Like `ask`, for what is not about one GPU."""
        return self._ask(function, *arguments, key=(function, arguments))

    def fill(self, gpu: Gpu, function: str, structure: str) -> Any | None:
        """Like `ask`, for functions that fill a structure of pynvml's, which is returned."""
        make = self.constant(structure)
        if make is None or gpu.handle is None:
            return None
        filled = make()
        answer = self._ask(function, gpu.handle, ctypes.byref(filled), key=(function, gpu.index), gpu=gpu)
        return None if answer is None else filled

    def call(self, function: str, *arguments: Any) -> Any:
        """Calls `function` and lets NVML's own exceptions pass; for the one caller that tells them apart."""
        return getattr(self._library, function)(*arguments)

    def constant(self, name: str) -> Any | None:
        """A constant of `pynvml`, or None if this version of it does not know the name."""
        return getattr(self._library, name, None)

    def field_values(self, gpu: Gpu, fields: Iterable[tuple[int, int]]) -> dict[tuple[int, int], int]:
        """The values of several (field, scope) pairs in one call; those that the GPU lacks are left out, for good."""
        wanted = tuple(field for field in fields if (gpu.index, field) not in self._dropped)
        values = self.ask(gpu, "nvmlDeviceGetFieldValues", wanted) if wanted else None
        found: dict[tuple[int, int], int] = {}
        for field, value in zip(wanted, values if values is not None else (), strict=False):
            if value.nvmlReturn == 0 and value.valueType < len(_VALUE_MEMBERS):
                found[field] = int(getattr(value.value, _VALUE_MEMBERS[value.valueType]))
            elif value.nvmlReturn in (GPU_IS_LOST, RESET_REQUIRED):
                raise GpuGone(value.nvmlReturn)
            elif value.nvmlReturn in _NEVER:
                self._dropped.add((gpu.index, field))
        return found

    def can_ask(self, function: str) -> bool:
        """False once a call has shown that the driver, or pynvml, lacks `function`."""
        return function not in self._dropped

    def take_complaint(self, gpu: Gpu) -> str | None:
        """What the driver complained of about `gpu` since the last time this was asked, if it did."""
        return self._complaints.pop(gpu.index, None)

    def gpu_of(self, handle: Any) -> Gpu | None:
        """The GPU that an event's device handle stands for."""
        address = _address(handle)
        return next((gpu for gpu in self.gpus if gpu.handle is not None and _address(gpu.handle) == address), None)

    def _ask(self, function: str, *arguments: Any, key: Hashable | None = None, gpu: Gpu | None = None) -> Any | None:
        if function in self._dropped or (key is not None and key in self._dropped):
            return None
        try:
            return getattr(self._library, function)(*arguments)
        except Exception as error:  # pynvml raises its own, ctypes' and, between its versions, others
            self._sort_out(error, function, key, gpu)
            return None

    def _sort_out(self, error: Exception, function: str, key: Hashable | None, gpu: Gpu | None) -> None:
        """Decides what an error means: the GPU is gone, the question is useless, or it went wrong this time."""
        code = getattr(error, "value", None)
        if gpu is not None and code in (GPU_IS_LOST, RESET_REQUIRED):
            raise GpuGone(code) from error
        if code == FUNCTION_NOT_FOUND or code is None:
            self._dropped.add(function)
            self._notes.once(f"NVML's {function} is not available here ({error}): what it tells is not watched.")
        elif code in _NEVER:
            if key is not None:
                self._dropped.add(key)
            if code == NO_PERMISSION:
                self._notes.once(f"NVML's {function} needs more rights than this process has: it is not asked again.")
        elif code == UNKNOWN and gpu is not None:
            self._complaints[gpu.index] = f"{function} failed with {error}"

    def _list(self, visible: str | None) -> tuple[Gpu, ...]:
        count = self.ask_any("nvmlDeviceGetCount") or 0
        handles = [self._handle(index) for index in range(count)]
        uuids = [self._text(handle, "nvmlDeviceGetUUID") for handle, _ in handles]
        ordinals = cuda_ordinals(uuids, visible)
        gpus = []
        for index, (handle, code) in enumerate(handles):
            if code == NO_PERMISSION:  # a container that was given some GPUs of the node: not ours to judge
                continue
            pci = self._pci(handle)
            gpus.append(
                Gpu(
                    index=index,
                    uuid=uuids[index],
                    pci=pci,
                    model=self._text(handle, "nvmlDeviceGetName"),
                    label=_label(index, pci, ordinals.get(index) if visible is not None else None),
                    handle=handle,
                    code=code,
                )
            )
        return tuple(sorted(gpus, key=lambda gpu: (gpu.pci == "", gpu.pci, gpu.index)))

    def _handle(self, index: int) -> tuple[Any, int]:
        try:
            return self._library.nvmlDeviceGetHandleByIndex(index), 0
        except Exception as error:  # as in `_ask`
            return None, getattr(error, "value", UNKNOWN)

    def _text(self, handle: Any, function: str) -> str:
        answer = None if handle is None else self._ask(function, handle)
        return answer.decode(errors="replace") if isinstance(answer, bytes) else str(answer or "")

    def _pci(self, handle: Any) -> str:
        info = None if handle is None else self._ask("nvmlDeviceGetPciInfo", handle)
        if info is None:
            return ""
        bus = info.busId.decode(errors="replace") if isinstance(info.busId, bytes) else str(info.busId)
        # NVML writes the domain with eight digits, Linux with four, and both write the same number.
        domain, _, rest = bus.partition(":")
        return f"{domain[-4:]}:{rest}".lower() if rest else bus.lower()


def open_session(
    notes: ProbeNotes, visible: str | None = None, load: Callable[[], ModuleType] | None = None
) -> NvmlSession:
    """Opens NVML through `pynvml`, which chooses the library; raises NvmlUnavailable with the reason.

    `load` imports pynvml; it is a parameter because the package may be missing or broken.
    """
    try:
        library = (load or _import)()
    except Exception as error:
        raise NvmlUnavailable(f"pynvml cannot be imported ({error})", is_fault=False) from error
    try:
        library.nvmlInit()
    except Exception as error:  # pynvml's own, or what its loader meets
        code = getattr(error, "value", None)
        is_absent = code in (None, DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, FUNCTION_NOT_FOUND, NO_PERMISSION)
        raise NvmlUnavailable(str(error), is_fault=not is_absent) from error
    session = NvmlSession(library, notes, visible)
    if not session.gpus:
        session.release()
        raise NvmlUnavailable("the driver knows no GPU", is_fault=False)
    return session


def _import() -> ModuleType:
    import pynvml

    module: ModuleType = pynvml
    return module


def cuda_ordinals(uuids: Sequence[str], visible: str | None) -> dict[int, int]:
    """Which GPU (by NVML's index) is which `cuda:N` of the job, from CUDA_VISIBLE_DEVICES; unset, all are, in order.

    As in NVIDIA's "CUDA C++ Programming Guide", appendix "CUDA Environment Variables": the list ends at its first
    invalid entry, and a UUID may be shortened while it stays unique. Numbers are taken to follow the PCI bus.
    """
    if visible is None:
        return {index: index for index in range(len(uuids))}
    ordinals: dict[int, int] = {}
    for entry in visible.split(","):
        index = _resolve(entry.strip(), uuids)
        if index is None or index in ordinals:
            break
        ordinals[index] = len(ordinals)
    return ordinals


def _resolve(entry: str, uuids: Sequence[str]) -> int | None:
    if entry.isascii() and entry.isdigit():
        return int(entry) if int(entry) < len(uuids) else None
    fitting = [index for index, uuid in enumerate(uuids) if entry.startswith("GPU-") and uuid.startswith(entry)]
    return fitting[0] if len(fitting) == 1 else None


def _label(index: int, pci: str, ordinal: int | None) -> str:
    details = ", ".join(part for part in ("" if ordinal is None else f"cuda:{ordinal}", pci) if part)
    return f"GPU {index} ({details})" if details else f"GPU {index}"


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


def process_visible_devices() -> str | None:
    """CUDA_VISIBLE_DEVICES of this process, which its workers inherit."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")
