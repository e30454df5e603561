"""Whether memory is running out: on the machine, and in the cgroups this process is part of.

Sources: proc_meminfo(5) (MemAvailable), the kernel's "PSI - Pressure Stall Information" ("full": the share of time in
which nobody could run because all waited for memory), "Control Group v2" and, for version 1, "Memory Resource
Controller". Memory that only caches files counts as free: a job that reads data fills it up to the limit, and it is
given back when somebody needs it.
"""

from __future__ import annotations

from collections.abc import Iterator

from unicron_elastic.base.fault import Status
from unicron_elastic.base.finding import Finding, Level, ProbeNotes, finding
from unicron_elastic.health.host.files import in_gib, number, read, read_number
from unicron_elastic.health.host.memory_cgroup import MemoryCgroup, find_memory_cgroup

_MACHINE = "this machine"
_KIB = 1024
# The files of each version: used, limit, and the words for cached files in memory.stat.
_FILES = {
    1: ("memory.usage_in_bytes", "memory.limit_in_bytes", ("total_inactive_file", "total_active_file")),
    2: ("memory.current", "memory.max", ("inactive_file", "active_file")),
}


class MemoryProbe:
    """Warns when less than the share `least_available` of the machine's memory is left, when the share `most_used` of a
    cgroup's limit is used, and when all tasks waited for memory for more than `most_stalled` of the last ten seconds.
    """

    def __init__(
        self,
        *,
        least_available: float = 0.05,
        most_used: float = 0.95,
        most_stalled: float = 0.10,
        proc: str = "/proc",
        cgroups: str = "/sys/fs/cgroup",
        notes: ProbeNotes | None = None,
    ) -> None:
        self._least_available = least_available
        self._most_used = most_used
        self._most_stalled = most_stalled
        self._proc = proc
        self._cgroup = find_memory_cgroup(proc, cgroups)
        self._notes = notes or ProbeNotes()
        if self._cgroup is None:
            self._notes.once("No memory cgroup can be seen: only the machine's memory is watched.")

    def check(self, now: float) -> list[Finding]:
        """What is short of memory at `now` (monotonic seconds)."""
        found = [*self._machine(now), *self._stalls(f"{self._proc}/pressure/memory", _MACHINE, now)]
        cgroup = self._cgroup
        if cgroup is not None:
            found.extend(one for folder in cgroup.folders for one in self._limit(cgroup, folder, now))
            if cgroup.version == 2 and cgroup.folders[0] != cgroup.root:
                own = cgroup.folders[0]
                found.extend(self._stalls(f"{own}/memory.pressure", f"cgroup {cgroup.name(own)}", now))
        return found

    def _machine(self, now: float) -> Iterator[Finding]:
        text = read(f"{self._proc}/meminfo")
        total, available = number(text, "MemTotal"), number(text, "MemAvailable")
        if not total or available is None:
            self._notes.once(f"{self._proc}/meminfo cannot be read: how much memory is left is not watched.")
        elif available < self._least_available * total:
            left, all_of_it = in_gib(available * _KIB), in_gib(total * _KIB)
            reason = f"Only {left} of this machine's {all_of_it} of memory are left."
            yield _warning("memory.available", _MACHINE, reason, now)

    def _limit(self, cgroup: MemoryCgroup, folder: str, now: float) -> Iterator[Finding]:
        used_file, limit_file, cached_words = _FILES[cgroup.version]
        limit = read_number(f"{folder}/{limit_file}")  # "max", and at the top no file at all: there is no limit
        used = read_number(f"{folder}/{used_file}") if limit else None
        if not limit or used is None or used < self._most_used * limit:
            return
        statistics = read(f"{folder}/memory.stat")
        used -= sum(number(statistics, word) or 0 for word in cached_words)
        if used >= self._most_used * limit:
            subject = f"cgroup {cgroup.name(folder)}"
            reason = f"{in_gib(used)} of the {in_gib(limit)} of memory that {subject} may have are used."
            yield _warning("memory.limit", subject, reason, now)

    def _stalls(self, path: str, subject: str, now: float) -> Iterator[Finding]:
        share = _full_share(read(path))
        if share is None:
            self._notes.once(f"{path} cannot be read: whether {subject} waits for memory is not watched.")
        elif share > self._most_stalled:
            reason = f"For {share:.0%} of the last ten seconds everything in {subject} waited for memory."
            yield _warning("memory.pressure", subject, reason, now)


def _full_share(text: str | None) -> float | None:
    """Read "full avg10=12.34 avg60=..." as a share of 1."""
    for line in (text or "").splitlines():
        if line.startswith("full avg10="):
            try:
                return float(line.split()[1].partition("=")[2]) / 100
            except ValueError:
                return None
    return None


def _warning(probe: str, subject: str, reason: str, now: float) -> Finding:
    return finding(probe, Level.WARN, Status.OUT_OF_HOST_MEMORY, subject, reason, at=now)
