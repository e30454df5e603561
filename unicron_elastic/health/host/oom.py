"""Whether the kernel killed a process for lack of memory: what turns "signal 9" into a reason.

Sources: the kernel's "Control Group v2", memory.events (`oom_kill` counts processes of the cgroup and of those below
it, killed by any kind of OOM killer), its "Memory Resource Controller" of version 1, memory.oom_control (`oom_kill` of
that cgroup alone), and `oom_kill` of /proc/vmstat, which counts the whole machine. The kernel counts before it sends
SIGKILL (mm/oom_kill.c, `__oom_kill_process`), so who has seen a worker end sees the count too. No counter names the
process.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from unicron_elastic.base.fault import Status
from unicron_elastic.base.finding import Finding, Level, ProbeNotes, finding
from unicron_elastic.health.host.files import number, read
from unicron_elastic.health.host.memory_cgroup import MemoryCgroup, find_memory_cgroup

_LOOKS_KEPT = 64
_MOST_FOLDERS = 256
# How long a kill stays a finding: long enough for people to see what it belongs to.
_TOLD_FOR_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OomKills:
    """Processes that the kernel killed for lack of memory.

    `in_own_cgroup`: True if they belonged to the cgroup of this process or one below it, where workers are; False if it
    is known that they did not; None if that cannot be told. `subject` is where they were counted, `reason` one
    sentence, which claims no more than that.
    """

    count: int
    in_own_cgroup: bool | None
    subject: str
    reason: str


@dataclass(frozen=True, slots=True)
class _Counter:
    """`is_own`: of this process's cgroup. `is_complete`: of all cgroups below it as well."""

    subject: str
    read: Callable[[], dict[str, int]]  # by file; a file may come and go with its cgroup
    is_own: bool = False
    is_complete: bool = False


@dataclass(frozen=True, slots=True)
class _Growth:
    number: int
    at: float
    counts: dict[int, int]  # by the counter's position


class OomWatch:
    """Counts OOM kills from the moment it is made. Never raises; safe from any thread."""

    def __init__(
        self,
        *,
        proc: str = "/proc",
        cgroups: str = "/sys/fs/cgroup",
        clock: Callable[[], float] = time.monotonic,
        notes: ProbeNotes | None = None,
    ) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._counters = tuple(_counters(proc, cgroups))  # the nearest first
        self._seen: dict[int, dict[str, int]] = {}
        self._grown: deque[_Growth] = deque(maxlen=_LOOKS_KEPT)
        self._looks = 0
        self._asked = 0
        self._look()
        self._own = next((self._counters[index] for index in self._seen if self._counters[index].is_own), None)
        notes = notes or ProbeNotes()
        if not self._seen:
            notes.once("Neither /proc/vmstat nor a cgroup counts OOM kills here: they are not seen.")
        elif self._own is None:
            notes.once("No cgroup of this process counts OOM kills: they are seen for the whole machine only.")

    def kills_since_last(self) -> OomKills | None:
        """Looks now, and tells what was killed since this was last called, or since the watch was made."""
        with self._lock:
            self._look()
            since, self._asked = self._asked, self._looks
            return self._explain([growth for growth in self._grown if growth.number > since])

    def kills_since(self, at: float) -> OomKills | None:
        """Looks now, and tells what was killed since the last look before `at` (monotonic seconds).

        For a worker that died of SIGKILL, give the time of its death less a second: while `check` looks regularly,
        kills from long before do not mix in. Asking uses nothing up: workers that died together get the same answer.
        """
        with self._lock:
            self._look()
            return self._explain([growth for growth in self._grown if growth.at >= at])

    def check(self, now: float) -> list[Finding]:
        """A warning for as long as the last kill is less than a minute old."""
        kills = self.kills_since(now - _TOLD_FOR_S)
        if kills is None:
            return []
        return [finding("memory.oom-kill", Level.WARN, Status.OUT_OF_HOST_MEMORY, kills.subject, kills.reason, at=now)]

    def _look(self) -> None:
        """Notes by how much each counter grew since the last look."""
        self._looks += 1
        grown: dict[int, int] = {}
        for index, counter in enumerate(self._counters):
            values = counter.read()
            before = self._seen.get(index)
            if before is not None:
                # A cgroup that was not there at the last look is new, and has counted from zero.
                growth = sum(max(0, value - before.get(path, 0)) for path, value in values.items())
                grown |= {index: growth} if growth else {}
            if values:
                self._seen[index] = values
        if grown:
            self._grown.append(_Growth(self._looks, self._clock(), grown))

    def _explain(self, growths: list[_Growth]) -> OomKills | None:
        totals: dict[int, int] = {}
        for growth in growths:
            for index, count in growth.counts.items():
                totals[index] = totals.get(index, 0) + count
        if not totals:
            return None
        nearest = min(totals)
        counter, count = self._counters[nearest], totals[nearest]
        own = self._own
        if counter.is_own:
            in_own, rest = True, ""
        elif own is not None and own.is_complete:
            in_own, rest = False, f", {'but not' if count == 1 else 'none of them'} one of {own.subject}"
        else:
            in_own, rest = None, "; whether it was one of this job cannot be told from the count"
        processes = f"{count} process" + ("" if count == 1 else "es")
        reason = f"The kernel killed {processes} of {counter.subject} for lack of memory{rest}."
        return OomKills(count=count, in_own_cgroup=in_own, subject=counter.subject, reason=reason)


def _counters(proc: str, cgroups: str) -> Iterator[_Counter]:
    """Everything that may count, the nearest first."""
    cgroup = find_memory_cgroup(proc, cgroups)
    if cgroup is not None:
        yield from _v1(cgroup) if cgroup.version == 1 else _v2(cgroup)
    yield _Counter("this machine", _reader(f"{proc}/vmstat"))


def _v1(cgroup: MemoryCgroup) -> Iterator[_Counter]:
    """Cgroups above are left out: they count none of the processes here. Below the top may be all of the machine."""
    folder = cgroup.folders[0]
    is_top = folder == cgroup.root
    subject = f"cgroup {cgroup.name(folder)}"
    yield _Counter(subject, lambda: _read_v1(folder, is_top), is_own=True, is_complete=not is_top)


def _v2(cgroup: MemoryCgroup) -> Iterator[_Counter]:
    """The nearest cgroup that has the memory controller is the one that this process is charged to."""
    is_own = True
    for folder in cgroup.folders:
        read_one = _reader(f"{folder}/memory.events")
        if read_one():
            yield _Counter(f"cgroup {cgroup.name(folder)}", read_one, is_own=is_own, is_complete=is_own)
            is_own = False


def _reader(path: str) -> Callable[[], dict[str, int]]:
    def read_one() -> dict[str, int]:
        count = number(read(path), "oom_kill")
        return {} if count is None else {path: count}

    return read_one


def _read_v1(folder: str, is_alone: bool) -> dict[str, int]:
    folders = [folder]
    if not is_alone:
        for parent in folders:  # grows while it is walked
            folders.extend(_children(parent))
            if len(folders) > _MOST_FOLDERS:
                break
    found: dict[str, int] = {}
    for each in folders:
        found |= _reader(f"{each}/memory.oom_control")()
    return found


def _children(folder: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
