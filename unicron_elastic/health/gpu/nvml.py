"""GPUs of this node, watched through NVML: events at once, slowly changing state when asked, memory before a restart.

The library is NVIDIA's own, found as `pynvml` finds it (libnvidia-ml.so.1 on the loader's path). Nothing is opened
before `start` or the first `check`. NVML reports pids of its own pid namespace: in a container it may name others, or
none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from types import ModuleType

from unicron_elastic.base.fault import Status
from unicron_elastic.base.finding import Finding, Level, OnFinding, ProbeNotes, finding
from unicron_elastic.health.gpu.checks import GpuHistory, check_gpu, compare_links
from unicron_elastic.health.gpu.events import EventThread
from unicron_elastic.health.gpu.session import Gpu, NvmlSession, NvmlUnavailable, open_session, process_visible_devices
from unicron_elastic.health.gpu.state import GpuState, MemoryHolder, memory_holders, read_state


class GpuProbe:
    """Watches all GPUs of the node. No method raises; all are safe from any thread."""

    def __init__(
        self,
        on_finding: OnFinding = lambda _: None,
        *,
        say: Callable[[str], None] | None = None,
        visible_devices: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        load: Callable[[], ModuleType] | None = None,
    ) -> None:
        """`on_finding` is called from a thread of the probe for each event; `say` once for each thing not seen.

        `visible_devices` (CUDA_VISIBLE_DEVICES, unless given that of this process) only decides how GPUs are named.
        `load` imports pynvml.
        """
        self._notes = ProbeNotes(say)
        self._visible = process_visible_devices() if visible_devices is None else visible_devices
        self._load = load
        self._opening = threading.Lock()
        self._checking = threading.Lock()
        self._session: NvmlSession | None = None
        self._failure: NvmlUnavailable | None = None
        self._is_closed = False
        self._histories: dict[int, GpuHistory] = {}
        self._events = EventThread(self._use, on_finding, self._notes, clock=clock)
        self._has_started = False

    def start(self) -> None:
        """Begins to wait for events, in a thread that also opens NVML; returns at once."""
        if not self._has_started:
            self._has_started = True
            self._events.start()

    def wait_until_listening(self, timeout_s: float) -> bool:
        """Whether events are waited for within `timeout_s`; false also where there are none to wait for."""
        return self._events.wait_until_listening(timeout_s)

    def stop(self, wait_s: float = 0.0) -> bool:
        """Ends the thread and gives NVML back. Waits at most `wait_s`, and what lasts longer ends by itself.

        Returns whether all has ended.
        """
        self._is_closed = True
        has_ended = self._events.stop(wait_s)
        if not self._opening.acquire(timeout=max(wait_s, 0.001)):
            return False  # NVML is still being opened, and is given back as soon as that ends
        try:
            self._give_back()
        finally:
            self._opening.release()
        return has_ended

    def gpus(self) -> tuple[Gpu, ...]:
        """All GPUs in the order of the PCI bus; none where NVML cannot be opened. May take seconds the first time."""
        session = self._use()
        if session is None:
            return ()
        try:
            return session.gpus
        finally:
            session.release()

    def check(self, now: float) -> list[Finding]:
        """What is wrong with any GPU at `now` (monotonic seconds). Blocks for as long as the driver does."""
        session = self._use()
        if session is None:
            return self._explain_failure(now)
        try:
            with self._checking:
                return self._check(session, now)
        finally:
            session.release()

    def memory_held_by(self, pids: Collection[int]) -> dict[int, int]:
        """Bytes of GPU memory, over all GPUs, that each of `pids` holds; those that hold none are left out."""
        held: dict[int, int] = {}
        for holder in self.holders():
            if holder.pid in pids:
                held[holder.pid] = held.get(holder.pid, 0) + (holder.used_bytes or 0)
        return held

    def holders(self) -> list[MemoryHolder]:
        """All processes that hold memory of a GPU, by GPU and pid."""
        session = self._use()
        if session is None:
            return []
        try:
            return [holder for gpu in session.gpus for holder in memory_holders(session, gpu)]
        finally:
            session.release()

    def state(self) -> list[GpuState]:
        """How each GPU is at this moment, in the order of the PCI bus. Blocks for as long as the driver does."""
        session = self._use()
        if session is None:
            return []
        try:
            return [read_state(session, gpu) for gpu in session.gpus]
        finally:
            session.release()

    @property
    def is_open(self) -> bool:
        """Whether NVML is open and knows GPUs; never waits, and opens nothing."""
        return self._session is not None

    def _check(self, session: NvmlSession, now: float) -> list[Finding]:
        found: list[Finding] = []
        for gpu in session.gpus:
            history = self._histories.setdefault(gpu.index, GpuHistory())
            try:
                found.extend(check_gpu(session, gpu, history, now))
            except Exception as error:  # an answer of a shape that no version of NVML has had yet
                self._notes.once(f"{gpu.label} could not be checked: {error!r}.")
        found.extend(compare_links(session.gpus, self._histories, now))
        return found

    def _use(self) -> NvmlSession | None:
        """The session, opened if need be, counted as used; the caller releases it. None if there is none."""
        with self._opening:
            if self._session is None and self._failure is None and not self._is_closed:
                self._open()
            if self._is_closed:
                self._give_back()
            session = self._session
            return session if session is not None and session.acquire() else None

    def _open(self) -> None:
        try:
            self._session = open_session(self._notes, self._visible, self._load)
        except NvmlUnavailable as failure:
            self._failure = failure
            if not failure.is_fault:
                self._notes.once(f"GPUs are not watched: {failure.reason}.")

    def _give_back(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.release()

    def _explain_failure(self, now: float) -> list[Finding]:
        failure = self._failure
        if failure is None or not failure.is_fault:
            return []
        reason = f"NVIDIA's driver cannot be used: {failure.reason.rstrip('.')}."
        return [finding("gpu.driver", Level.CRITICAL, Status.GPU_DRIVER_ERROR, "NVIDIA's driver", reason, at=now)]
