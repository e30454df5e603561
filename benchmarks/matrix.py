"""What unicron-run makes of every fault that `unicron chaos` can inject, at every phase of a step, as a Markdown table.

    python benchmarks/matrix.py                                # everything; about eleven minutes
    python benchmarks/matrix.py --kinds hang skip --phases backward optimizer --markdown matrix.md

Each case is one launch of a job of two ranks, with one restart and a patience of one second with hangs. The moment of
the fault is that at which the worker's announcement of it is read.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from _exit_when_told import exit_when_told
from _launchers import UNICRON, Launch, Launcher, LauncherEndedError, TimedOutError, incidents
from _report import describe_machine, short
from _steps import read_logs, stop_soon
from detection import TELLS, WORKER, stand_in

EXITS = ("kill", "segv", "abort", "exit", "exception")
HANGS = ("hang", "sleep", "hang-gil")
WITHOUT_PHASE = ("slow", "skip", "leak", "disk", "xid", "ecc")
KINDS = (*EXITS, *HANGS, *WITHOUT_PHASE)
OF_NODE = ("disk", "xid", "ecc")  # no rank is to blame
PHASES = ("forward", "backward", "before-reduce", "during-reduce", "after-reduce", "optimizer")
STEP = {**dict.fromkeys(EXITS, 60), **dict.fromkeys(HANGS, 300), "slow": 900, "skip": 300}
STEP |= dict.fromkeys(("leak", "disk", "xid", "ecc"), 60)
SETTINGS = {"slow": ",factor=1.5", "leak": ",mb_per_step=20,limit_mb=4000", "disk": ",folder={folder}"}
LEAK_LIMIT_MB = 1500  # of the control group in which that job runs
DISK_MB = 64
DEADLINE_S = {"leak": 30.0, "disk": 20.0}  # it takes time to leak, and a folder is looked at every 15 s
OPTIONS = ("--max-restarts=1", "--unicron-hang-patience=1", "--unicron-console=plain")
TOLD = re.compile(rf"{TELLS.pattern}|Health critical: ")
ANNOUNCED = re.compile(r"unicron chaos: rank \d+ ")
LAUNCH_S = 45.0
END_S = 6.0  # for the job's end, once the fault has had its time
HEAD = (
    "fault",
    "phase",
    "status in the ledger",
    "right rank",
    "done",
    "noticed, ms",
    "first step, ms",
    "end of the job",
)


@dataclass
class Case:
    """One launch and what came of it."""

    kind: str
    phase: str
    rank: int
    fault_ns: int | None = None
    records: list[dict[str, Any]] = field(default_factory=list)
    told: list[tuple[int, str]] = field(default_factory=list)  # degradations are no incidents, only lines
    end: str = ""
    folder: str = ""  # that the fault fills
    last_lines: list[str] = field(default_factory=list)

    @property
    def plan(self) -> str:
        """For --unicron-chaos."""
        phase = f",phase={self.phase}" if self.phase else ""
        settings = SETTINGS.get(self.kind, "").format(folder=self.folder)
        return f"{self.kind}:rank={self.rank},step={STEP[self.kind]}{phase}{settings}"

    def cells(self) -> list[str]:
        """One line of the table."""
        first = self.records[0] if self.records else None
        if first is None:
            words = self.told[0][1].partition("] ")[2][9:] if self.told else ""
            right = (
                "-" if not words or self.kind in OF_NODE else "yes" if words.startswith(f"rank {self.rank} ") else "NO"
            )
            said = "no incident; a line" if words else "no incident"
            at = self._since_fault_ms(self.told[0][0] / 1e9) if self.told else "-"
            return [self.kind, self.phase or "-", said, right, "nothing", at, "-", self.end]
        more = f"; {len(self.records) - 1} more" if len(self.records) > 1 else ""
        right = "yes" if first["rank"] == self.rank else f"NO: {first['rank']}"
        return [
            self.kind,
            self.phase or "-",
            f"{first['status']}, SEV{first['severity']}{more}",
            "-" if first["rank"] is None or self.kind in OF_NODE else right,
            first["action"] or "undecided",
            self._since_fault_ms(first["noticed_at"]),
            self._since_fault_ms(first["first_step_at"]),
            self.end,
        ]

    def _since_fault_ms(self, at: float | None) -> str:
        if at is None or self.fault_ns is None:
            return "-"
        since_ms = at * 1e3 - self.fault_ns / 1e6
        return short(since_ms) if since_ms >= 1.0 else "< 1"  # the announcement may be read later than the incident is


def main() -> None:
    """Run all cases, print the table, and write files if they are wanted."""
    args = parse_arguments()
    # Without this, a termination would skip the clean-up of the launch in progress.
    exit_when_told()
    machine = describe_machine()
    print(machine, file=sys.stderr)
    done = []
    for case in cases(args.kinds, args.phases):
        run(case, args.deadline)
        done.append(case)
        print("  ".join(case.cells()), file=sys.stderr, flush=True)
        if args.json:
            data = {"machine": {**machine, "load_average_after": os.getloadavg()}, "options": vars(args)}
            args.json.write_text(json.dumps({**data, "cases": [asdict(each) for each in done]}, indent=1, default=str))
    text = table(done)
    if args.markdown:
        args.markdown.write_text(text + "\n")
    print(text)


def cases(kinds: Sequence[str], phases: Sequence[str]) -> Iterator[Case]:
    """Every kind at every phase; ranks take turns."""
    number = 0
    for kind in kinds:
        for phase in ("",) if kind in WITHOUT_PHASE else phases:
            yield Case(kind, phase, rank=number % 2)
            number += 1


def run(case: Case, deadline_s: float) -> None:
    """Launch, wait for the fault and for what comes of it, and let the job end."""
    with surroundings(case) as (launcher, prefix):
        _run(case, launcher, prefix, max(deadline_s, DEADLINE_S.get(case.kind, 0.0)))


def _run(case: Case, launcher: Launcher, prefix: Sequence[str], deadline_s: float) -> None:
    options = (*OPTIONS, f"--unicron-chaos={case.plan}")
    time_s = LAUNCH_S + deadline_s
    with Launch(launcher, 2, ["--step-ms=5"], time_s, worker=WORKER, options=options, prefix=prefix) as launch:
        try:
            case.fault_ns = _wait_for_fault(launch)
            _wait_for_outcome(case, launch, deadline_s)
            old = frozenset(log.pid for log in read_logs(launch.steps_folder) if log.restart_count == 0)
            recovered = bool(case.records) and case.records[-1]["first_step_at"] is not None
            launch.deadline = min(launch.deadline, time.monotonic() + END_S)
            if launch.process.poll() is None:
                stop_soon(launch, old if recovered else frozenset())
            case.end = f"exit code {launch.wait_ended()}"
            was_early = bool(case.records)
            case.records = incidents(launch.logs_folder, launch.started_ns)
            if case.records and not was_early:
                case.end += ", incident only after the benchmark had waited"
        except (LauncherEndedError, TimedOutError) as error:
            case.end = str(error)
        case.last_lines = list(launch.last_lines)


@contextmanager
def surroundings(case: Case) -> Iterator[tuple[Launcher, Sequence[str]]]:
    """What a fault needs to be one: the launcher, and the words that start it.

    Needs root for a leak that meets a limit and for a disk that is small.
    """
    with ExitStack() as undo:
        launcher = undo.enter_context(stand_in(UNICRON, case.kind))
        prefix: Sequence[str] = ()
        if case.kind == "leak":
            prefix = ("sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(_memory_group(undo)))
        if case.kind == "disk":
            case.folder = _small_disk(undo)
        yield launcher, prefix


def _memory_group(undo: ExitStack) -> Path:
    """A control group of its own with a limit, of version 2 or 1."""
    root = Path("/sys/fs/cgroup")
    is_new = (root / "cgroup.controllers").exists()
    group = (root if is_new else root / "memory") / f"unicron-benchmark-{os.getpid()}"
    group.mkdir()
    undo.callback(_remove, group)
    (group / ("memory.max" if is_new else "memory.limit_in_bytes")).write_text(f"{LEAK_LIMIT_MB}M")
    return group


def _remove(group: Path) -> None:
    """Once the last process of the launch is gone."""
    end = time.monotonic() + 5.0
    while True:
        try:
            group.rmdir()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def _small_disk(undo: ExitStack) -> str:
    """A file system of its own, in which the launch has its folders."""
    folder = tempfile.mkdtemp(prefix="unicron-disk-")
    undo.callback(os.rmdir, folder)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", folder], check=True)
    undo.callback(subprocess.run, ["umount", "--lazy", folder], check=True)
    before, tempfile.tempdir = tempfile.tempdir, folder
    undo.callback(setattr, tempfile, "tempdir", before)
    return folder


def _wait_for_fault(launch: Launch) -> int:
    while True:
        for at, line in launch.lines:
            if ANNOUNCED.search(line):
                return at
        launch.wait_alive("fault")


def _wait_for_outcome(case: Case, launch: Launch, deadline_s: float) -> None:
    """Wait for the first step after an incident, for a line about slowness, for the end, or for the deadline."""
    deadline = time.monotonic() + deadline_s
    since_ns = case.fault_ns or 0
    while time.monotonic() < deadline and launch.process.poll() is None:
        case.records = incidents(launch.logs_folder, launch.started_ns)
        case.told = [(at, line) for at, line in launch.lines if at >= since_ns and TOLD.search(line)]
        if any(record["first_step_at"] is not None for record in case.records):
            return
        if case.kind in WITHOUT_PHASE and case.told and case.kind not in ("xid", "ecc", "leak"):
            return
        if case.kind in ("xid", "ecc") and case.records:
            return
        time.sleep(0.02)
    case.records = incidents(launch.logs_folder, launch.started_ns)


def table(done: Sequence[Case]) -> str:
    """In Markdown."""
    rows = [HEAD, ["---"] * len(HEAD), *(case.cells() for case in done)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Every fault at every phase, under unicron-run.")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="(default: all)")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES), help="(default: all)")
    parser.add_argument("--deadline", type=float, default=12.0, help="seconds for an outcome (default: %(default)s)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all records there")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
