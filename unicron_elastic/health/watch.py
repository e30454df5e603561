"""The health of one node: all probes, the threads that run them, and who is told.

Checks that only read files of the kernel share a thread. Whatever may be kept waiting (the GPU driver, each folder,
each command of the site) has one to itself, and the first of them watches whether those come back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType

from unicron_elastic.base.fault import Status
from unicron_elastic.base.finding import Check, Finding, Level, OnFinding, ProbeNotes, finding
from unicron_elastic.health.finding_ledger import FindingLedger
from unicron_elastic.health.gpu.nvml import GpuProbe
from unicron_elastic.health.host.clock import ClockProbe
from unicron_elastic.health.host.command import CommandProbe
from unicron_elastic.health.host.disk import DiskProbe
from unicron_elastic.health.host.memory import MemoryProbe
from unicron_elastic.health.host.network import LinkProbe
from unicron_elastic.health.host.oom import OomWatch
from unicron_elastic.health.host.port_probe import PortProbe
from unicron_elastic.health.host.processes import ProcessProbe
from unicron_elastic.health.lane import Lane

# After this long without an answer a folder, or the driver, is said to hang. A driver that loads takes tens of seconds.
_FOLDER_HANGS_S = 30.0
_DRIVER_HANGS_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """Seconds from the end of one check to the next."""

    host_s: float = 5.0
    gpu_s: float = 10.0
    folder_s: float = 15.0
    command_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Roots:
    """Where the kernel tells of itself."""

    proc: str = "/proc"
    cgroups: str = "/sys/fs/cgroup"
    net: str = "/sys/class/net"
    infiniband: str = "/sys/class/infiniband"


@dataclass(frozen=True, slots=True)
class _Slow:
    """A lane that may hang, and what to say then; `probe` is empty for one that has a time-out of its own."""

    lane: Lane
    probe: str = ""
    subject: str = ""
    limit_s: float = 0.0
    level: Level = Level.WARN
    status: Status = Status.STORAGE_ERROR


class NodeHealth:
    """Watches this node from `start` to `stop`. No method raises; all are safe from any thread.

    `gpus` is the probe of its GPUs, also for questions about who holds their memory. `oom` tells, the moment a worker
    has died of SIGKILL, whether the kernel killed for lack of memory.
    """

    def __init__(
        self,
        on_finding: OnFinding,
        *,
        say: Callable[[str], None] | None = None,
        folders: Iterable[str] = (),
        workers: Callable[[], Mapping[int, str]] = dict,
        commands: Iterable[CommandProbe] = (),
        interfaces: Collection[str] | None = None,
        visible_devices: str | None = None,
        intervals: Intervals | None = None,
        roots: Roots | None = None,
        clock: Callable[[], float] = time.monotonic,
        load_nvml: Callable[[], ModuleType] | None = None,
    ) -> None:
        """`on_finding` is called in threads of this object, never in two at once: when a finding is new, when it gets
        worse, and at level OK when it is over. `say` hears once of each thing that cannot be seen.

        `folders` are those that the job writes to; `workers()` names its processes, pid to "rank 3"; `interfaces`
        chooses the network interfaces, by default those of hardware; the rest is as in `GpuProbe`.
        """
        self._on_finding = on_finding
        self._clock = clock
        self._notes = notes = ProbeNotes(say)
        self._intervals = intervals = intervals or Intervals()
        roots = roots or Roots()
        self._ledger = FindingLedger()
        self._telling = threading.RLock()  # `on_finding` may ask for `findings`
        self._commands = tuple(commands)
        self._has_started = False
        self._is_stopped = False
        self.gpus = GpuProbe(self._on_event, say=notes.once, visible_devices=visible_devices, load=load_nvml)
        self.oom = OomWatch(proc=roots.proc, cgroups=roots.cgroups, clock=clock, notes=notes)
        self._gpu_lane = self._lane("gpu", intervals.gpu_s, {"GPUs": self.gpus.check})
        driver = _Slow(
            self._gpu_lane, "gpu.hang", "NVIDIA's driver", _DRIVER_HANGS_S, Level.WARN, Status.GPU_DRIVER_ERROR
        )
        self._slow = (driver, *map(self._watch_folder, dict.fromkeys(folders)), *map(self._run_command, self._commands))
        checks: dict[str, Check] = {
            "memory": MemoryProbe(proc=roots.proc, cgroups=roots.cgroups, notes=notes).check,
            "OOM kills": self.oom.check,
            "network links": LinkProbe(only=interfaces, net=roots.net, notes=notes).check,
            "RDMA ports": PortProbe(infiniband=roots.infiniband).check,
            "the clock": ClockProbe().check,
            "workers": ProcessProbe(workers, proc=roots.proc).check,
            "answers": self._hangs,
        }
        self._host_lane = self._lane("host", intervals.host_s, checks)

    def start(self) -> None:
        """Begins to watch; returns at once. It can be started once."""
        if self._has_started or self._is_stopped:
            return
        self._has_started = True
        self.gpus.start()
        for lane in self._lanes():
            lane.start()

    def stop(self, wait_s: float = 0.0) -> bool:
        """Ends all threads and kills commands that run; nothing is told after. Whether all ended within `wait_s`.

        What a driver or a file system keeps longer is a daemon and ends with the process.
        """
        deadline = self._clock() + wait_s
        with self._telling:
            self._is_stopped = True
        for lane in self._lanes():
            lane.ask_to_stop()
        for command in self._commands:
            command.close()
        have_ended = [lane.join(deadline - self._clock()) for lane in self._lanes()]
        return self.gpus.stop(max(0.0, deadline - self._clock())) and all(have_ended)

    def check_soon(self) -> None:
        """Looks at host and GPUs now rather than at the next interval, as after a fault."""
        self._host_lane.check_soon()
        self._gpu_lane.check_soon()

    def findings(self) -> list[Finding]:
        """All that is wrong now, the worst first. Events such as XIDs do not last and are told only."""
        with self._telling:
            return self._ledger.current()

    def _lanes(self) -> list[Lane]:
        return [self._host_lane, *(slow.lane for slow in self._slow)]

    def _lane(self, name: str, interval_s: float, checks: Mapping[str, Check]) -> Lane:
        return Lane(name, interval_s, checks, self._tell, notes=self._notes, clock=self._clock)

    def _watch_folder(self, folder: str) -> _Slow:
        probe = DiskProbe(folder, notes=self._notes)
        lane = self._lane("folder", self._intervals.folder_s, {probe.folder: probe.check})
        return _Slow(lane, "disk.hang", probe.folder, _FOLDER_HANGS_S, Level.CRITICAL, Status.STORAGE_ERROR)

    def _run_command(self, command: CommandProbe) -> _Slow:
        return _Slow(self._lane("command", self._intervals.command_s, {command.name: command.check}))

    def _hangs(self, now: float) -> list[Finding]:
        found = []
        for slow in self._slow:
            busy_s = slow.lane.busy_s(now)
            if slow.probe and busy_s >= slow.limit_s:
                reason = f"{slow.subject} has not answered for {busy_s:.0f} s."
                found.append(finding(slow.probe, slow.level, slow.status, slow.subject, reason, at=now))
        return found

    def _tell(self, source: str, found: list[Finding], now: float) -> None:
        with self._telling:
            for each in self._ledger.update(source, found, now):
                self._hand_on(each)

    def _on_event(self, found: Finding) -> None:
        """Take an event from the thread that waits for the driver's. It may show in the GPUs' state as well."""
        with self._telling:
            is_new = self._ledger.event(found)
            if is_new:
                self._hand_on(found)
        if is_new:
            self._gpu_lane.check_soon()

    def _hand_on(self, found: Finding) -> None:
        if self._is_stopped:
            return
        try:
            self._on_finding(found)
        except Exception as error:  # whoever listens may fail, the next finding still has to be heard
            self._notes.once(f"A finding could not be handed on: {error!r}.")
