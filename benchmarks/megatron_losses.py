"""Megatron-Core with DP x TP x PP: what a lost rank costs under unicron-run and under torchrun with checkpoints.

    python benchmarks/megatron_losses.py --quick                              # about two minutes
    python benchmarks/megatron_losses.py --markdown megatron.md               # everything
    python benchmarks/megatron_losses.py --parts faults --splits DP4 --optimizers replicated --rounds 5
    python benchmarks/megatron_losses.py --parts groups memory

One training script on this machine with gloo, with ``unicron_elastic.megatron.attach`` under unicron-run, and with
Megatron-Core's own ``dist_checkpointing`` under torchrun, in turn. ``faults``: a rank is killed in mid-step.
``groups``: process groups are made anew in the same processes, without a fault. ``overhead``: the undisturbed step.
``memory``: what ``attach`` holds. docs/benchmark-megatron.md says all of it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from _exit_when_told import exit_when_told
from _megatron_alone import GROUPS, MEMORY, groups, memory
from _megatron_faults import CHECKPOINT_EVERY, POINTS, struck
from _megatron_jobs import SPLITS, Split, torchrun, unicron
from _megatron_overhead import overhead
from _megatron_report import faults as faults_table
from _megatron_report import groups as groups_table
from _megatron_report import memory as memory_table
from _megatron_report import overhead as overhead_table
from _megatron_report import progress
from _recovery_job import adopt_orphans, sweep
from _report import describe_machine
from _scenarios import Run

PARTS = ("faults", "groups", "overhead", "memory")
OPTIMIZERS = ("replicated", "distributed")
VICTIMS = (1, 0, 3, 2)  # in turns


def main() -> int:
    """Measure, and print Markdown; 1 if anything failed."""
    args = parse_arguments()
    # Without these, a termination would skip the clean-up of the job in progress.
    exit_when_told()
    adopt_orphans()
    sweep()
    problem = unicron().problem() or torchrun().problem()
    if problem:
        print(problem, file=sys.stderr)
        return 2
    machine = describe_machine()
    runs: list[Run] = []
    for run in measure(args):
        runs.append(run)
        print(progress(run), file=sys.stderr, flush=True)
        if args.json:
            data = {"machine": {**machine, "load_average_after": os.getloadavg()}, "options": vars(args)}
            data["runs"] = [asdict(each) for each in runs]
            args.json.write_text(json.dumps(data, indent=1, default=str) + "\n")
    tables = [table(runs) for table in (faults_table, groups_table, overhead_table, memory_table)]
    text = "\n\n".join([", ".join(f"{what}: {value}" for what, value in machine.items()), *filter(None, tables)])
    if args.markdown:
        args.markdown.write_text(text + "\n")
    print(text)
    return 0 if all(run.succeeded for run in runs) else 1


def measure(args: argparse.Namespace) -> Iterator[Run]:
    """All that was asked for, part by part."""
    splits = [
        replace(SPLITS[name], is_distributed=kind == "distributed") for kind in args.optimizers for name in args.splits
    ]
    if "faults" in args.parts:
        for number, split in enumerate(splits):
            yield from _faults(args, split, ours_first=number % 2 == 0)
    if "groups" in args.parts:
        for split in GROUPS[: args.group_sizes]:
            yield groups(split, args.times)
    if "overhead" in args.parts:
        for split in splits:
            if split.name in args.overhead_splits:
                yield from overhead(split, args.launches, args.pairs, args.block)
    if "memory" in args.parts:
        for kind in args.optimizers:
            for split in MEMORY:
                yield memory(replace(split, is_distributed=kind == "distributed"))


def _faults(args: argparse.Namespace, split: Split, *, ours_first: bool) -> Iterator[Run]:
    """One launch under either launcher, with ``--rounds`` faults of each kind (and fewer under torchrun)."""
    ours = (unicron("--checkpoint-every=0"), args.rounds)
    theirs = (torchrun(f"--checkpoint-every={CHECKPOINT_EVERY}"), args.torchrun_rounds)
    for launched, rounds in (ours, theirs) if ours_first else (theirs, ours):
        points = [point for _ in range(rounds) for point in POINTS]
        plan = [(VICTIMS[number % len(VICTIMS)], point) for number, point in enumerate(points)]
        yield from struck(launched, split, plan)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="(default: all)")
    parser.add_argument("--splits", nargs="+", choices=SPLITS, default=list(SPLITS), help="(default: all)")
    parser.add_argument(
        "--overhead-splits", nargs="+", choices=SPLITS, default=["DP4"], help="of these, for that part (default: DP4)"
    )
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=OPTIMIZERS, help="(default: both)")
    number = {"type": _number, "metavar": "N"}
    parser.add_argument("--rounds", **number, default=2, help="faults of each kind (default: %(default)s)")
    parser.add_argument("--torchrun-rounds", **number, default=1, help="and under torchrun (default: %(default)s)")
    parser.add_argument("--times", **number, default=40, help="that groups are rebuilt (default: %(default)s)")
    sizes = len(GROUPS)
    parser.add_argument("--group-sizes", **number, default=sizes, help="of 2, 4, 8 ranks the first N (default: all)")
    parser.add_argument("--launches", **number, default=1, help="for the undisturbed step (default: %(default)s)")
    parser.add_argument("--pairs", **number, default=15, help="of turns in each (default: %(default)s)")
    parser.add_argument("--block", type=float, default=2.0, metavar="S", help="of a turn (default: %(default)s s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all records there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the tables there")
    parser.add_argument("--quick", action="store_true", help="a little of everything: DP4, one fault of each kind")
    args = parser.parse_args(arguments)
    if args.quick:
        few = {"splits": ["DP4"], "optimizers": ["distributed"], "rounds": 1, "times": 10, "group_sizes": 2, "pairs": 4}
        parser.set_defaults(**few)
        args = parser.parse_args(arguments)  # so that what was given along with --quick still counts
    return args


def _number(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
