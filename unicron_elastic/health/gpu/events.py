"""Waits for the events of all GPUs in a thread: XIDs, and ECC errors of two bits.

Source: NVIDIA's "NVML API Reference Guide", "Event Handling Methods". Without an event, `nvmlEventSetWait_v2` returns
after its time-out; it has no way to be woken, so the wait is cut into slices, and stopping takes at most one of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from unicron_elastic.base.fault import Status
from unicron_elastic.base.finding import Finding, Level, OnFinding, ProbeNotes, finding
from unicron_elastic.health.gpu.checks import gone_finding, recovery_finding
from unicron_elastic.health.gpu.session import GPU_IS_LOST, NOT_SUPPORTED, Gpu, GpuGone, NvmlSession
from unicron_elastic.health.gpu.xid import xid_finding

_XID_EVENT = 0x08
_DOUBLE_BIT_ECC_EVENT = 0x02
_WANTED = _XID_EVENT | _DOUBLE_BIT_ECC_EVENT
_TIMEOUT = 10
_XID_RECOVERY_ACTION_CHANGED = 154
_NO_INSTANCE = 0xFFFFFFFF

# How long one wait lasts: the time that stopping may take, bought with so many wake-ups a second.
_SLICE_MS = 250
# A wait that fails fails again at once: the pause doubles from the first to the last of these.
_PAUSE_S = (0.5, 30.0)


class EventThread:
    """A daemon thread that turns NVML's events into findings, given to `on_finding` in that thread."""

    def __init__(
        self,
        open_session: Callable[[], NvmlSession | None],
        on_finding: OnFinding,
        notes: ProbeNotes,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`open_session` may be slow; it returns a session that is given back here, or None."""
        self._open_session = open_session
        self._on_finding = on_finding
        self._notes = notes
        self._clock = clock
        self._must_stop = threading.Event()
        self._is_waiting = threading.Event()
        self._gone: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="unicron-nvml", daemon=True)

    def start(self) -> None:
        """Begins; returns at once."""
        self._thread.start()

    def wait_until_listening(self, timeout_s: float) -> bool:
        """Whether events are being waited for within this time."""
        return self._is_waiting.wait(timeout_s)

    def stop(self, wait_s: float = 0.0) -> bool:
        """Asks the thread to end and waits no longer than `wait_s`; whether it has ended.

        A driver that never answers keeps the thread, which is a daemon and holds up nobody.
        """
        self._must_stop.set()
        if self._thread.ident is not None:
            self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        session = self._open_session()
        if session is None:
            return
        try:
            self._listen(session)
        except Exception as error:  # whatever it is, it is not to be a traceback on the terminal of the job
            self._notes.once(f"NVML's events are not watched any more: {error!r}.")
        finally:
            session.release()

    def _listen(self, session: NvmlSession) -> None:
        """Waits with one set of events after the other: a lost GPU makes every wait of its set fail."""
        pause_s = _PAUSE_S[0]
        while not self._must_stop.is_set():
            present = [gpu for gpu in session.gpus if gpu.handle is not None and gpu.index not in self._gone]
            events = self._register(session, present)
            if events is None:
                return
            try:
                pause_s = self._wait_while_well(session, events, pause_s)
            finally:
                self._free(session, events)

    def _register(self, session: NvmlSession, gpus: Iterable[Gpu]) -> Any | None:
        """A set with the wanted events of all GPUs that have any, or None if there are none to wait for."""
        try:
            events = session.call("nvmlEventSetCreate")
        except Exception as error:
            self._notes.once(f"This driver offers no events ({error}): XIDs are not watched.")
            return None
        registered = [gpu for gpu in gpus if self._register_one(session, gpu, events)]
        if registered:
            return events
        self._free(session, events)
        return None

    def _register_one(self, session: NvmlSession, gpu: Gpu, events: Any) -> bool:
        try:
            supported = session.call("nvmlDeviceGetSupportedEventTypes", gpu.handle) & _WANTED
            if supported:
                session.call("nvmlDeviceRegisterEvents", gpu.handle, supported, events)
                return True
            reason = "it offers none"
        except Exception as error:
            code = getattr(error, "value", None)
            if code == GPU_IS_LOST:
                self._report_gone(gpu, code)
                return False
            reason = "it does not support them" if code == NOT_SUPPORTED else str(error)
        self._notes.once(f"XIDs of {gpu.label} are not watched: {reason}.")
        return False

    def _wait_while_well(self, session: NvmlSession, events: Any, pause_s: float) -> float:
        """Waits until it is to stop or the set is of no use any more; returns the next pause after an error."""
        while not self._must_stop.is_set():
            self._is_waiting.set()
            try:
                data = session.call("nvmlEventSetWait_v2", events, _SLICE_MS)
            except Exception as error:
                if getattr(error, "value", None) == _TIMEOUT:
                    continue
                if not self._find_gone(session):
                    self._notes.once(f"Waiting for NVML's events fails ({error}); it is tried again.")
                    self._must_stop.wait(pause_s)
                    return min(2 * pause_s, _PAUSE_S[1])
                return _PAUSE_S[0]
            pause_s = _PAUSE_S[0]
            for found in self._explain(session, data):
                self._report(found)
        return pause_s

    def _explain(self, session: NvmlSession, data: Any) -> list[Finding]:
        now = self._clock()
        gpu = session.gpu_of(data.device)
        subject = gpu.label if gpu is not None else "A GPU"
        if data.gpuInstanceId not in (0, _NO_INSTANCE):
            subject = f"{subject} instance {data.gpuInstanceId}"
        if data.eventType == _DOUBLE_BIT_ECC_EVENT:
            reason = f"{subject} has met an ECC error of two bits, which cannot be corrected."
            return [finding("gpu.ecc-event", Level.CRITICAL, Status.ECC_ERROR, subject, reason, at=now)]
        if data.eventType != _XID_EVENT:
            return []
        found = [xid_finding(int(data.eventData), subject, now)]
        if data.eventData == _XID_RECOVERY_ACTION_CHANGED and gpu is not None:
            found.extend(self._recovery(session, gpu, now))
        return found

    def _recovery(self, session: NvmlSession, gpu: Gpu, now: float) -> list[Finding]:
        try:
            action = recovery_finding(session, gpu, now)
        except GpuGone as gone:
            self._gone.add(gpu.index)
            return [gone_finding(gpu, gone.code, now)]
        return [] if action is None else [action]

    def _find_gone(self, session: NvmlSession) -> bool:
        """Reports GPUs that are lost; whether there are new ones."""
        before = len(self._gone)
        for gpu in session.gpus:
            if gpu.handle is None or gpu.index in self._gone:
                continue
            try:
                session.ask(gpu, "nvmlDeviceGetPerformanceState")
            except GpuGone as gone:
                self._report_gone(gpu, gone.code)
        return len(self._gone) > before

    def _report_gone(self, gpu: Gpu, code: int) -> None:
        self._gone.add(gpu.index)
        self._report(gone_finding(gpu, code, self._clock()))

    def _report(self, found: Finding) -> None:
        try:
            self._on_finding(found)
        except Exception as error:  # whoever listens may fail, the next event still has to be heard
            self._notes.once(f"A finding could not be handed on: {error!r}.")

    @staticmethod
    def _free(session: NvmlSession, events: Any) -> None:
        try:
            session.call("nvmlEventSetFree", events)
        except Exception:
            pass  # a set that cannot be freed goes with the library
