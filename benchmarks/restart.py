"""Compare torchrun and unicron-run: how long a job stands still when a rank dies, and what the launcher costs.

    python benchmarks/restart.py                        # everything; about half an hour
    python benchmarks/restart.py --quick                # a few runs of each
    python benchmarks/restart.py --only torchrun -n 3 --json result.json

Both launchers are the console scripts beside this Python, on one machine, with gloo. Launches alternate between the
launchers, so that a change in the machine's load meets them all. torchrun takes part twice: with
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which is the fair comparison, and, in fewer runs, with its defaults, under which
its restarts reuse the dead attempt's addresses on gloo.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from _exit_when_told import exit_when_told
from _launchers import LAUNCHERS, TORCHRUN_DEFAULT, Launcher
from _report import describe_machine, table, write_json
from _scenarios import Run, idle, restart, step_time

DEADLINE_S = 60.0  # of one launch from beginning to end
DEFAULT_SETTING_RUNS = 3  # of torchrun with its defaults: enough to show what happens
IDLE_WINDOW_S = 10.0


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
        if args.json:
            write_json(args.json, runs, vars(args), machine)  # after every run: an aborted benchmark leaves its data
    sys.stderr.flush()
    print(table(runs))


def measure(args: argparse.Namespace) -> Iterator[Run]:
    """Make all launches, in an order that alternates between the launchers."""
    launchers = [launcher for launcher in LAUNCHERS if args.only in (None, launcher.program)]
    fair = [launcher for launcher in launchers if launcher is not TORCHRUN_DEFAULT]
    for ranks in args.ranks:
        if "restart" in args.scenarios:
            for repetition in range(args.n):
                taking_part = launchers if repetition < DEFAULT_SETTING_RUNS else fair
                for launcher in _alternate(taking_part, repetition):
                    yield restart(launcher, ranks, repetition, args.seed, DEADLINE_S)
        if "step-time" in args.scenarios:
            yield from _repeat(fair, args.pairs, partial(_step_time, ranks, args.steps))
    if "idle" in args.scenarios:
        yield from _repeat(fair, args.idle_runs, partial(_idle, args.ranks[0]))


def progress(run: Run) -> str:
    """One line about a finished run."""
    values = "  ".join(f"{name} {value:.1f}" for name, value in run.values.items())
    used = f"  restarts_used {run.notes['restarts_used']}" if "restarts_used" in run.notes else ""
    problem = f"  FAILED: {run.problem}" if run.problem else ""
    return f"{run.scenario} #{run.repetition}  {run.launcher}  {run.ranks} ranks  {values}{used}{problem}"


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    programs = sorted({launcher.program for launcher in LAUNCHERS})
    scenarios = ["restart", "step-time", "idle"]
    parser = argparse.ArgumentParser(description="Compare torchrun and unicron-run on this machine.")
    parser.add_argument("--only", choices=programs, help="measure this launcher alone")
    parser.add_argument(
        "-n", type=int, default=10, help="kills per launcher and number of ranks (default: %(default)s)"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="(default: 2 4)")
    parser.add_argument("--scenarios", nargs="+", choices=scenarios, default=scenarios, help="(default: all)")
    parser.add_argument("--pairs", type=int, default=5, help="launches for the step time (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=400, help="steps of each of those (default: %(default)s)")
    parser.add_argument("--idle-runs", type=int, default=2, help="launches for the idle cost (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of who is killed and when (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all records there")
    parser.add_argument("--quick", action="store_true", help="3 kills, 2 ranks, 2 pairs, 1 idle launch")
    args = parser.parse_args(arguments)
    if args.quick:
        parser.set_defaults(n=3, ranks=[2], pairs=2, idle_runs=1)
        args = parser.parse_args(arguments)  # so that what was given along with --quick still counts
    for launcher in LAUNCHERS:
        if args.only in (None, launcher.program) and not launcher.path.exists():
            parser.error(f"{launcher.path} does not exist")
    return args


def _step_time(ranks: int, steps: int, launcher: Launcher, repetition: int) -> Run:
    return step_time(launcher, ranks, repetition, steps, DEADLINE_S)


def _idle(ranks: int, launcher: Launcher, repetition: int) -> Run:
    return idle(launcher, ranks, repetition, IDLE_WINDOW_S, DEADLINE_S)


def _repeat(launchers: Sequence[Launcher], times: int, once: Callable[[Launcher, int], Run]) -> Iterator[Run]:
    for repetition in range(times):
        for launcher in _alternate(launchers, repetition):
            yield once(launcher, repetition)


def _alternate(launchers: Sequence[Launcher], repetition: int) -> list[Launcher]:
    """The launchers in turn, each time beginning with another one."""
    first = repetition % len(launchers)
    return [*launchers[first:], *launchers[:first]]


if __name__ == "__main__":
    main()
