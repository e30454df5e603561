"""What the loss of a rank costs with a framework in place, beside the framework's own checkpoints under torchrun.

    python benchmarks/trainers.py --rounds 5
    python benchmarks/trainers.py --only lightning --rounds 1

transformers' Trainer, Lightning and Accelerate train the same model on two ranks over gloo. A rank ends by SIGKILL in
the middle of a backward pass, half way between two checkpoints, 60 steps or more after the warm process has learned
what the workers import; "undisturbed" are the steps between. Under torchrun the framework saves every 10 steps, and
resumes from what it has saved. All times are the workers' own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from _exit_when_told import exit_when_told
from _launchers import TORCHRUN, UNICRON, Launcher
from _report import describe_machine
from _written_jobs import Lines, have_reached, losses_ms, shown, undisturbed_ms, written

WORKER = Path(__file__).parent / "workers" / "trainer_steps.py"
WAYS = {"plain": TORCHRUN, "in-place": UNICRON}
FRAMEWORKS = ("transformers", "lightning", "accelerate")
RANKS = 2
LEARNED = "The next start finds "
STRIKE = "strike"  # the name of the file that the worker waits for
FIRST = 25  # steps, of which those behind the warm-up are the first
MEASURES = (
    "first steps",
    "undisturbed step",
    "kill to the end of the step",
    "kill to the first step of the rank's successor",
)


def main() -> None:
    """Run the rounds, and print the table."""
    exit_when_told()
    parser = argparse.ArgumentParser(description="The loss of a rank with a framework.")
    parser.add_argument("--only", choices=FRAMEWORKS, nargs="*", default=FRAMEWORKS, help="(default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="that are undisturbed (default: %(default)s)")
    parser.add_argument("--width", type=int, default=256, help="of a layer (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="(default: %(default)s)")
    args = parser.parse_args()
    print(describe_machine())
    found: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    for number in range(args.rounds):
        for framework in args.only:
            for way, launcher in list(WAYS.items())[:: 1 if number % 2 else -1]:
                measured = _round(args, framework, way, launcher)
                found.setdefault((framework, way), []).append(measured)
                print(number, framework, way, [round(each, 1) for each in measured], file=sys.stderr, flush=True)
    print(_table(args.only, found))


def _round(args: argparse.Namespace, framework: str, way: str, launcher: Launcher) -> tuple[float, ...]:
    """Return the measures, in milliseconds."""
    job = [framework, way, f"--width={args.width}", f"--layers={args.layers}", f"--kill-rank={RANKS - 1}"]
    lines = written(launcher, RANKS, WORKER, job, _struck(args.steps, launcher))
    killed = next(each["step"] for each in lines if each["what"] == "killed")
    return undisturbed_ms(lines, end=FIRST), undisturbed_ms(lines, first=killed - args.steps), *losses_ms(lines)


def _struck(steps: int, launcher: Launcher) -> Callable[[Path, Lines], bool]:
    """Return what tells a rank to end so many steps after imports are learned, and whether all are past that."""
    begun: list[int] = []  # the step in which they were

    def is_over(folder: Path, lines: Lines) -> bool:
        made = max((each["step"] for each in lines), default=0)
        is_ready = launcher is not UNICRON or LEARNED in (folder / "said").read_text(errors="replace")
        if is_ready and made >= FIRST:
            begun.append(made)
        if begun and made >= begun[0] + steps:
            (folder / STRIKE).touch()
        return have_reached(lines, RANKS)

    return is_over


def _table(frameworks: list[str], found: dict[tuple[str, str], list[tuple[float, ...]]]) -> str:
    lines = ["| | ms, median [least - greatest] | in place, unicron-run | its own, torchrun | ratio |"]
    lines.append("|---|---|---|---|---|")
    for framework in frameworks:
        for place, name in enumerate(MEASURES):
            ours, theirs = ([each[place] for each in found[framework, way]] for way in ("in-place", "plain"))
            ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
            lines.append(f"| {framework} | {name} | {shown(ours)} | {shown(theirs)} | {shown(ratios, 3)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
