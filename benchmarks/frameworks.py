"""Compare torchrun and unicron-run under scripts with Trainer, Lightning, Accelerate, DeepSpeed and FSDP2.

    python benchmarks/frameworks.py                          # all that are installed; about 20 minutes
    python benchmarks/frameworks.py --only fsdp2 -n 3 --json result.json

The scripts are the ones in ``workers/framework_*.py``: they know nothing of unicron-elastic. Each launch has 2 ranks on
gloo, one of which is killed once the job trains and what it imports is learned (torchrun: at the same number of steps,
as it learns nothing). Then the job is told to end, and launched again: unicron-run has held its warm process for that.
Launches alternate between the launchers.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from _exit_when_told import exit_when_told
from _launchers import TORCHRUN, Launch, Launcher, LauncherEndedError, TimedOutError
from _report import Spread, describe_machine
from _scenarios import Run
from _steps import read_logs, wait_for_step

UNICRON = Launcher("unicron-run", "unicron-run", {"UNICRON_WARM_FOR_NEXT": "60"})
FRAMEWORKS = {
    "trainer": "transformers",
    "lightning": "lightning",
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "fsdp2": "torch",
}
PRELOADED = ("fsdp2",)  # the warm process has all of it before: there is nothing to learn
RANKS = 2
STEPS_BEFORE = 50
DEADLINE_S = 240.0
LEARNED = "The next start finds "
USED = "The workers start from a warm process that is held since "
MEASURES = {
    "next_step_ms": "kill to next step",
    "first_step_ms": "launch to first step",
    "again_ms": "next launch to first step",
}


def main() -> None:
    """Measure, print the table, and write the JSON file if one is wanted."""
    args = parse_arguments()
    exit_when_told()
    machine = describe_machine()
    print(machine, file=sys.stderr)
    runs = []
    for run in measure(args):
        runs.append(run)
        print(run.scenario, run.launcher, run.values or run.problem, os.getloadavg()[0], file=sys.stderr, flush=True)
        if args.json:
            data = {"machine": machine, "load_after": os.getloadavg(), "runs": [vars(each) for each in runs]}
            args.json.write_text(json.dumps(data, indent=1, default=str) + "\n")
    print(table(runs))


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Compare torchrun and unicron-run under scripts of frameworks.")
    parser.add_argument("--only", choices=FRAMEWORKS, nargs="*", help="these frameworks (default: all installed)")
    parser.add_argument("-n", type=int, default=5, help="launches per framework and launcher (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write all records into this file")
    return parser.parse_args()


def measure(args: argparse.Namespace) -> Iterator[Run]:
    """Make all launches, in an order that alternates between the launchers."""
    wanted = args.only or [name for name, module in FRAMEWORKS.items() if find_spec(module) is not None]
    for repetition in range(args.n):
        for framework in wanted:
            launchers = (UNICRON, TORCHRUN) if repetition % 2 == 0 else (TORCHRUN, UNICRON)
            for launcher in launchers:
                yield one(framework, launcher, repetition)


def one(framework: str, launcher: Launcher, repetition: int) -> Run:
    """Launch, kill a rank of a job that trains, wait until all ranks step again, and launch the same once more."""
    run = Run(framework, launcher.name, RANKS, repetition)
    worker = Path(__file__).parent / "workers" / f"framework_{framework}.py"
    with Launch(launcher, RANKS, [], DEADLINE_S, worker=worker) as launch:
        try:
            logs = wait_for_step(launch, RANKS, 1)
            run.values["first_step_ms"] = (max(log.step_ns()[0] for log in logs) - launch.started_ns) / 1e6
            logs = wait_for_step(launch, RANKS, STEPS_BEFORE)
            if launcher is UNICRON and framework not in PRELOADED:
                _wait_until_learned(launch, run)
            killed_ns = time.monotonic_ns()
            os.kill(logs[repetition % RANKS].pid, signal.SIGKILL)
            logs = wait_for_step(launch, RANKS, 1, frozenset(log.pid for log in logs))
            run.values["next_step_ms"] = (max(log.step_ns()[0] for log in logs) - killed_ns) / 1e6
            _launch_again(launch, run, worker)
        except (LauncherEndedError, TimedOutError) as error:
            run.problem = str(error)
            run.notes["last_lines"] = list(launch.last_lines)
    return run


def _launch_again(launch: Launch, run: Run, worker: Path) -> None:
    launch.process.terminate()
    launch.wait_ended()
    known = frozenset(log.pid for log in read_logs(launch.steps_folder))
    with Launch(launch.launcher, RANKS, [], DEADLINE_S, worker=worker, again=launch) as again:
        logs = wait_for_step(again, RANKS, 1, known)
        run.values["again_ms"] = (max(log.step_ns()[0] for log in logs) - again.started_ns) / 1e6
        if launch.launcher is UNICRON and not any(USED in line for _, line in again.lines):
            run.problem = f"the warm process was not used: {list(again.last_lines)}"


def _wait_until_learned(launch: Launch, run: Run) -> None:
    """A job that is killed before that starts from what the warm process had at its beginning."""
    began = time.monotonic()
    while not (said := [line for _, line in launch.lines if LEARNED in line]):
        launch.wait_alive("word of what was learned")
    run.notes["learned"] = said[0].partition("] ")[2]
    run.values["learned_ms"] = (time.monotonic() - began) * 1e3


def table(runs: list[Run]) -> str:
    """Return the medians with their spread, in Markdown."""
    lines = ["| | | unicron-run, s | torchrun, s | ratio |", "|---|---|---|---|---|"]
    for framework in dict.fromkeys(run.scenario for run in runs):
        for measure, what in MEASURES.items():
            spreads = [_spread(runs, framework, launcher.name, measure) for launcher in (UNICRON, TORCHRUN)]
            ours, theirs = spreads
            ratio = f"1/{theirs.median / ours.median:.1f}" if ours and theirs else "-"
            cells = [
                f"{each.median:.2f} [{each.minimum:.2f} - {each.maximum:.2f}]" if each else "-" for each in spreads
            ]
            lines.append(f"| {framework} | {what} | {cells[0]} | {cells[1]} | {ratio} |")
    return "\n".join(lines)


def _spread(runs: list[Run], framework: str, launcher: str, measure: str) -> Spread | None:
    chosen = [run for run in runs if (run.scenario, run.launcher) == (framework, launcher) and measure in run.values]
    return Spread.of([run.values[measure] / 1e3 for run in chosen])


if __name__ == "__main__":
    main()
