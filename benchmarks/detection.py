"""How long it takes until a fault is noticed, under unicron-run and under torchrun.

    python benchmarks/detection.py                          # everything; at most twelve minutes
    python benchmarks/detection.py --quick                  # each fault once
    python benchmarks/detection.py --faults stop sleep --steps-ms 5 -n 10 --json result.json

Both launchers start the same script (``workers/faulty_steps.py``), which breaks one of its ranks by itself and writes
down when, and neither restarts anything. unicron-run has noticed a fault when its ledger or, for what is no incident,
its line on stderr says so; torchrun with its first line after the fault. Launches alternate between the launchers.
torchrun does not notice hangs and slow ranks, so each of those is shown to it only once, until the deadline.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

from _detection_report import EXITS, FAULTS, table
from _exit_when_told import exit_when_told
from _launchers import TORCHRUN, UNICRON, Launch, Launcher, LauncherEndedError, TimedOutError, incidents
from _report import describe_machine
from _scenarios import Run
from _steps import StepLog, read_logs

sys.path.append(str(Path(__file__).parents[1] / "tests" / "health"))
import fake_nvml

WORKER = Path(__file__).parent / "workers" / "faulty_steps.py"
START_S = 30.0  # for a launch to come to its fault, beyond the warm-up
# Before the fault: exits need no statistics, and what is usual is known better the longer a job has run.
WARM_UP_S = {"hang": 1.5, "slow": 4.5, "exit": 0.5}
WARM_UP_STEPS = {"hang": 22, "slow": 40, "exit": 10}
TELLS = re.compile(r"\[unicron\] .*(\bhangs?: |\bholds? the job up: |\bthe job is slow: |slow, not hung: )")
GPUS = 8  # of the library that stands in for NVML
OPTIONS = {
    UNICRON.name: ("--max-restarts=0", "--unicron-hang-patience=0", "--unicron-console=plain"),
    TORCHRUN.name: ("--max-restarts=0",),
}


class Setting(NamedTuple):
    """What job it is that a fault strikes."""

    ranks: int
    step_ms: float


def main() -> None:
    """Measure, print the table, and write the JSON file if one is wanted."""
    args = parse_arguments()
    # Without this, a termination would skip the clean-up of the launch in progress.
    exit_when_told()
    machine = describe_machine()
    print(machine, file=sys.stderr)
    runs = []
    for run in measure(args):
        runs.append(run)
        print(progress(run), file=sys.stderr, flush=True)
        if args.json:  # after every run: an aborted benchmark leaves its data
            data = {"machine": {**machine, "load_average_after": os.getloadavg()}, "options": vars(args)}
            args.json.write_text(json.dumps({**data, "runs": [asdict(run) for run in runs]}, indent=1, default=str))
    sys.stderr.flush()
    print(table(runs, args.deadline))
    print(f"\nLoad average before {machine['load_average_before']}, after {os.getloadavg()}")


def measure(args: argparse.Namespace) -> Iterator[Run]:
    """Make all launches: one of each kind, then one of each kind again, so that a change in load meets all kinds."""
    end = time.monotonic() + args.minutes * 60
    settings = [Setting(args.ranks[0], step_ms) for step_ms in args.steps_ms]
    settings += [Setting(ranks, args.steps_ms[0]) for ranks in args.ranks[1:]]
    for repetition in range(args.n):
        for setting in settings:
            for fault in args.faults:
                launchers = [UNICRON]
                if fault in EXITS or (repetition == 0 and setting == settings[0]):
                    launchers.insert(repetition % 2, TORCHRUN)
                for launcher in launchers:
                    if args.only not in (None, launcher.program):
                        continue
                    if time.monotonic() > end:
                        return
                    yield once(launcher, setting, fault, repetition, args)


def once(launcher: Launcher, setting: Setting, fault: str, repetition: int, args: argparse.Namespace) -> Run:
    """One launch: wait until the fault, then until it was noticed or the deadline is over."""
    ranks, step_ms = setting
    kind = "exit" if fault in EXITS or fault == "xid" else fault[:4] if fault.startswith("slow") else "hang"
    # The same for all launchers.
    choice = random.Random(f"{args.seed} {fault} {ranks} {step_ms} {repetition}")
    rank = choice.randrange(ranks)
    steps = max(WARM_UP_STEPS[kind], round(WARM_UP_S[kind] * 1e3 / step_ms)) + choice.randrange(10)
    run = Run(f"{fault} {step_ms:g}", launcher.name, ranks, repetition, notes={"rank": rank, "fault_step": steps})
    arguments = [f"--step-ms={step_ms}", f"--fault={fault}", f"--fault-rank={rank}", f"--fault-step={steps}"]
    arguments += ["--busy"] if args.busy else []
    time_s = START_S + 2 * steps * step_ms / 1e3 + args.deadline
    options = OPTIONS[launcher.name]
    with (
        stand_in(launcher, fault) as equipped,
        Launch(equipped, ranks, arguments, time_s, worker=WORKER, options=options) as launch,
    ):
        try:
            fault_ns = wait_for_fault(launch)
            false_alarms = [line for at, line in launch.lines if at < fault_ns and TELLS.search(line)]
            run.notes["false_alarms"] = false_alarms
            found = wait_for_notice(launch, fault_ns, args.deadline)
            log = next(log for log in read_logs(launch.steps_folder) if log.rank == rank)
            _evaluate(run, log, fault_ns, found)
        except (LauncherEndedError, TimedOutError) as error:
            run.problem = str(error)
            run.notes["last_lines"] = list(launch.last_lines)
    return run


@contextmanager
def stand_in(launcher: Launcher, fault: str) -> Iterator[Launcher]:
    """The launcher as it is, or, for a fault of a GPU, with the tests' NVML library in place of a driver's."""
    if fault not in ("xid", "ecc"):
        yield launcher
        return
    with TemporaryDirectory(prefix="unicron-nvml-") as name:
        library = fake_nvml.compile_library("cc", Path(name) / "library" / "libnvidia-ml.so.1")
        (Path(name) / "fake").mkdir()
        fake = fake_nvml.FakeNvml(Path(name) / "fake")
        fake.set({"devices": GPUS})
        try:
            environment = {"FAKE_NVML": str(fake.folder), "LD_LIBRARY_PATH": str(library.parent)}
            yield replace(launcher, environment={**launcher.environment, **environment})
        finally:
            fake.close()


def wait_for_fault(launch: Launch) -> int:
    """Wait for the worker's word that it breaks itself now; return the moment."""
    path = launch.steps_folder / "fault"
    while not path.exists() or not path.stat().st_size:
        launch.wait_alive("fault")
    return int(path.read_text())


def wait_for_notice(launch: Launch, fault_ns: int, deadline_s: float) -> tuple[int, str] | None:
    """The moment at which the launcher noticed, and its words; None if the deadline came first."""
    deadline = fault_ns + int(deadline_s * 1e9)
    while time.monotonic_ns() < deadline:
        has_ended = launch.process.poll() is not None
        found = notice(launch, fault_ns)
        if found is not None or has_ended:
            return found
        time.sleep(0.02)
    return None


def notice(launch: Launch, fault_ns: int) -> tuple[int, str] | None:
    """What the launcher has said until now of a fault at ``fault_ns``."""
    if launch.launcher.name == TORCHRUN.name:
        # Its own lines have whole seconds only, and it writes the first when its poll has seen the end of a process.
        return next(((at, line) for at, line in launch.launch_lines if at >= fault_ns), None)
    for record in incidents(launch.logs_folder, fault_ns):
        return int(record["noticed_at"] * 1e9), f"{record['status']}, rank {record['rank']}: {record['reason']}"
    said = ((at, line) for at, line in launch.lines if at >= fault_ns and TELLS.search(line))
    # Hangs are incidents a moment after they are said: the record tells when it was, the line when it was written.
    return next(((at, line) for at, line in said if "hang: " not in line and "hangs: " not in line), None)


def _evaluate(run: Run, log: StepLog, fault_ns: int, found: tuple[int, str] | None) -> None:
    moments = log.step_ns()
    before = [at for at in moments if at < fault_ns]
    run.values["step_ms"] = median(end - start for start, end in pairwise(before[3:])) / 1e6
    if found is None:
        return
    at, words = found
    run.values["noticed_ms"] = (at - fault_ns) / 1e6
    run.values["noticed_steps"] = run.values["noticed_ms"] / run.values["step_ms"]
    run.values["steps_done"] = sum(fault_ns < moment <= at for moment in moments)
    run.notes["words"] = [words]
    named = re.search(r"\brank (\d+) (holds|hangs|is slow|was|raised|seems)", words)
    run.notes["named"] = ["nobody" if named is None else "right" if int(named[1]) == run.notes["rank"] else "wrong"]


def progress(run: Run) -> str:
    """One line about a finished run."""
    values = "  ".join(f"{name} {value:.1f}" for name, value in run.values.items())
    problem = f"  FAILED: {run.problem}" if run.problem else ""
    words = " ".join(map(str, run.notes.get("words", [])))  # type: ignore[arg-type]
    return f"{run.scenario} #{run.repetition}  {run.launcher}  {run.ranks} ranks  {values}{problem}  {words}"


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="How soon faults are noticed by unicron-run and torchrun.")
    parser.add_argument("-n", type=int, default=5, help="launches of each kind (default: %(default)s)")
    parser.add_argument("--only", choices=[UNICRON.program, TORCHRUN.program], help="measure this launcher alone")
    parser.add_argument("--faults", nargs="+", choices=list(FAULTS), default=list(FAULTS), help="(default: all)")
    parser.add_argument("--steps-ms", type=float, nargs="+", default=[20, 5, 100], help="(default: 20 5 100)")
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[2, 4], help="with the first, all step times; else the first of them"
    )
    parser.add_argument("--busy", action="store_true", help="steps use a CPU instead of waiting as for a device")
    parser.add_argument("--deadline", type=float, default=20.0, help="seconds to notice (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=11.0, help="begin no launch after (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of who breaks and when (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all records there")
    parser.add_argument("--quick", action="store_true", help="one launch of each kind, steps of 20 ms, 2 ranks")
    args = parser.parse_args(arguments)
    if args.quick:
        parser.set_defaults(n=1, steps_ms=[20], ranks=[2])
        args = parser.parse_args(arguments)  # so that what was given along with --quick still counts
    for launcher in (UNICRON, TORCHRUN):
        if not launcher.path.exists():
            parser.error(f"{launcher.path} does not exist")
    return args


if __name__ == "__main__":
    main()
