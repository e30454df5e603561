"""Workers that exist and do not run: stopped, waiting in the kernel without end, ended and not gone.

Source: proc_pid_stat(5) and proc_pid_status(5). Only the first thread of each is looked at, for the others would cost
more than all other probes together; it is the one that runs the training loop.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from unicron_elastic.base.fault import Status
from unicron_elastic.base.finding import Finding, Level, finding
from unicron_elastic.health.host.files import number, read
from unicron_elastic.worker.process.process_stat import read_stat


@dataclass(slots=True)
class _Kept:
    """A state and since when it lasts; `switches` proves that nothing ran in between."""

    started: int
    state: str
    switches: int | None
    since: float


class ProcessProbe:
    """Watches the processes that `workers()` names: pid to what people know it by, such as "rank 3".

    A state is told once it has lasted: `stopped_s` for those of SIGSTOP or a debugger, for profilers stop a process for
    an instant, and for the dead that nobody collects; `waiting_s` for the uninterruptible sleep of disks and drivers.
    """

    def __init__(
        self,
        workers: Callable[[], Mapping[int, str]],
        *,
        stopped_s: float = 10.0,
        waiting_s: float = 60.0,
        proc: str = "/proc",
    ) -> None:
        self._workers = workers
        self._limits = {"T": stopped_s, "t": stopped_s, "Z": stopped_s, "D": waiting_s}
        self._proc = proc
        self._kept: dict[int, _Kept] = {}

    def check(self, now: float) -> list[Finding]:
        """Workers that have not run for too long at `now` (monotonic seconds)."""
        workers = dict(self._workers())
        self._kept = {pid: kept for pid, kept in self._kept.items() if pid in workers}
        return [found for pid, label in workers.items() for found in self._check(pid, label, now)]

    def _check(self, pid: int, label: str, now: float) -> Iterator[Finding]:
        stat = read_stat(f"{self._proc}/{pid}/stat")
        if stat is None or stat.state not in self._limits:
            self._kept.pop(pid, None)
            return
        state, started = stat.state, stat.started_at
        switches = self._switches(pid) if state == "D" else None
        kept = self._kept.get(pid)
        if kept is None or (kept.started, kept.state, kept.switches) != (started, state, switches):
            kept = self._kept[pid] = _Kept(started, state, switches, now)
        lasted = now - kept.since
        if lasted >= self._limits[state]:
            yield self._tell(pid, label, state, lasted, now)

    def _switches(self, pid: int) -> int | None:
        """How often its first thread gave up the processor: one that grows belongs to a process that does run."""
        return number(read(f"{self._proc}/{pid}/status"), "voluntary_ctxt_switches")

    def _tell(self, pid: int, label: str, state: str, lasted: float, now: float) -> Finding:
        subject = f"{label} (pid {pid})"
        for_long = f"for {lasted:.0f} s"
        if state == "T":
            reason = f"{subject} has been stopped {for_long}, as by SIGSTOP; SIGCONT lets it go on."
            return finding("process.stopped", Level.CRITICAL, Status.TASK_HANG, subject, reason, at=now)
        if state == "t":
            reason = f"{subject} has been held by a debugger {for_long}."
            return finding("process.stopped", Level.WARN, Status.TASK_HANG, subject, reason, at=now)
        if state == "D":
            where = self._where(pid)
            reason = f"{subject} has waited in the kernel{where} {for_long} without a pause: no signal ends that."
            return finding("process.waiting", Level.WARN, Status.TASK_HANG, subject, reason, at=now)
        return self._dead(pid, subject, for_long, now)

    def _dead(self, pid: int, subject: str, for_long: str, now: float) -> Finding:
        """Ended, but its entry is left: nobody has collected it, or threads of it cannot end."""
        stats = [read_stat(f"{folder}/stat") for folder in self._threads(pid)]
        stuck = sum(stat is not None and stat.state == "D" for stat in stats)
        if stuck:
            threads = f"{stuck} of its threads wait" if stuck > 1 else "one of its threads waits"
            reason = f"{subject} has ended, but {threads} in the kernel {for_long}: what it holds stays held."
            return finding("process.dead", Level.CRITICAL, Status.TASK_HANG, subject, reason, at=now)
        reason = f"{subject} has ended, and nobody has collected it {for_long}."
        return finding("process.dead", Level.WARN, Status.EXITED_ABNORMALLY, subject, reason, at=now)

    def _threads(self, pid: int) -> list[str]:
        folder = f"{self._proc}/{pid}/task"
        try:
            return [f"{folder}/{name}" for name in os.listdir(folder)]
        except OSError:
            return []

    def _where(self, pid: int) -> str:
        """The kernel's function, where it may be told: it names the driver or the file system."""
        function = (read(f"{self._proc}/{pid}/wchan") or "").strip()
        return f" ({function})" if function not in ("", "0") else ""
