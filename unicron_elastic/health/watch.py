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
from unicron_elastic.health.gpu.nvml import GpuProbe
from unicron_elastic.health.host.clock import ClockProbe
from unicron_elastic.health.host.command import CommandProbe
from unicron_elastic.health.host.disk import DiskProbe
from unicron_elastic.health.host.memory import MemoryProbe
from unicron_elastic.health.host.network import LinkProbe, PortProbe
from unicron_elastic.health.host.oom import OomWatch
from unicron_elastic.health.host.processes import ProcessProbe

# What was told of: so that people hear of each change once, and of its end. Pure.


_EVENT_QUIET_S = 60.0
_EVENTS_KEPT = 1000


@dataclass(slots=True)
class _Entry:
    source: str
    latest: Finding
    told: Finding  # the worst of what was told
    absences: int = 0


class FindingLedger:
    """The findings that hold now, by probe and subject.

    One is over when its source did not find it at `calm_checks` checks in a row: what comes and goes around a limit is
    told once, not every few seconds.
    """

    def __init__(self, *, calm_checks: int = 2) -> None:
        self._calm_checks = calm_checks
        self._entries: dict[tuple[str, str], _Entry] = {}
        self._events: dict[tuple[str, str, str], float] = {}

    def current(self) -> list[Finding]:
        """All that holds, the worst first."""
        latest = (entry.latest for entry in self._entries.values())
        return sorted(latest, key=lambda found: (-found.level, found.probe, found.subject))

    def update(self, source: str, found: Iterable[Finding], now: float) -> list[Finding]:
        """Takes all that a check of `source` found at `now`; returns what is to be told, ends as findings at OK."""
        worst: dict[tuple[str, str], Finding] = {}
        for each in found:
            if each.level is not Level.OK:
                key = (each.probe, each.subject)
                worst[key] = max(worst.get(key, each), each, key=_badness)
        told = [each for key, each in worst.items() if self._take(source, key, each)]
        for key, entry in list(self._entries.items()):
            if entry.source == source and key not in worst:
                entry.absences += 1
                if entry.absences >= self._calm_checks:
                    del self._entries[key]
                    told.append(_end(entry.latest, now))
        return told

    def event(self, found: Finding) -> bool:
        """Whether to tell of something that happened: not if the same was told within the last minute, or still holds.

        A check that finds the same afterwards has nothing new to tell either.
        """
        entry = self._entries.get((found.probe, found.subject))
        if self._was_event(found) or (entry is not None and entry.latest.reason == found.reason):
            return False
        if len(self._events) >= _EVENTS_KEPT:
            self._events.clear()
        self._events[found.probe, found.subject, found.reason] = found.at
        return True

    def _was_event(self, found: Finding) -> bool:
        at = self._events.get((found.probe, found.subject, found.reason))
        return at is not None and found.at - at < _EVENT_QUIET_S

    def _take(self, source: str, key: tuple[str, str], found: Finding) -> bool:
        entry = self._entries.get(key)
        if entry is None:
            self._entries[key] = _Entry(source, found, found)
            return not self._was_event(found)
        entry.latest = found
        entry.absences = 0
        if _badness(found) <= _badness(entry.told):
            return False
        entry.told = found
        return True


def _badness(found: Finding) -> tuple[int, int]:
    """Order findings by level, and then by severity, of which 1 is the worst."""
    return found.level, -(found.severity or 0)


def _end(found: Finding, now: float) -> Finding:
    return Finding(
        probe=found.probe,
        level=Level.OK,
        status=None,
        severity=None,
        subject=found.subject,
        reason=f"No longer so: {found.reason}",
        at=now,
    )


# A thread that makes some checks, again and again.


Tell = Callable[[str, list[Finding], float], None]


@dataclass(frozen=True, slots=True)
class _Doing:
    check: str
    since: float


class Lane:
    """Makes all of `checks` every `interval_s`, the first time at once, in a daemon thread of its own.

    What may keep its caller waiting gets a lane to itself, so that nothing else waits with it. A check that raises
    says so once, and counts as not made.
    """

    def __init__(
        self,
        name: str,
        interval_s: float,
        checks: Mapping[str, Check],
        tell: Tell,
        *,
        notes: ProbeNotes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._interval_s = interval_s
        self._checks = dict(checks)
        self._tell = tell
        self._notes = notes
        self._clock = clock
        self._doing: _Doing | None = None
        self._must_stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"unicron-health-{name}", daemon=True)

    def start(self) -> None:
        """Begins; returns at once."""
        self._thread.start()

    def check_soon(self) -> None:
        """Makes the next round now instead of after the interval; safe from any thread."""
        self._wake.set()

    def busy_s(self, now: float) -> float:
        """For how long the present check has lasted; 0 between checks."""
        doing = self._doing
        return 0.0 if doing is None else max(0.0, now - doing.since)

    def ask_to_stop(self) -> None:
        """No check begins after this."""
        self._must_stop.set()
        self._wake.set()

    def join(self, wait_s: float) -> bool:
        """Whether the thread has ended within `wait_s`."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(max(0.0, wait_s))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._must_stop.is_set():
            self._wake.clear()
            for source, check in self._checks.items():
                if self._must_stop.is_set():
                    return
                self._make(source, check)
            if not self._must_stop.is_set():
                self._wake.wait(self._interval_s)

    def _make(self, source: str, check: Check) -> None:
        now = self._clock()
        self._doing = _Doing(source, now)
        try:
            found = check(now)
        except Exception as error:  # a file of a shape that no kernel has had yet must not end all other checks
            self._notes.once(f"The check of {source} failed: {error!r}.")
            return
        finally:
            self._doing = None
        if not self._must_stop.is_set():
            self._tell(source, found, self._clock())


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
