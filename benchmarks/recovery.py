"""Compare what a job loses when a rank dies in the middle of a step, under torchrun, torchft, NVIDIA's tools and us.

    python benchmarks/recovery.py                                        # torchrun and unicron-run, about 15 minutes
    python benchmarks/recovery.py --torchft-python ft/bin/python --nvrx-python nvrx/bin/python --json result.json
    python benchmarks/recovery.py --peers torchrun,unicron-run --rounds 3 --pairs 0

Four ranks on this machine with gloo train the small GPT of examples/gpt.py, 16 micro-batches a step by gradient
accumulation, with Adam. In each round every competitor's job loses the same rank, by SIGKILL, in the same step and
after the same part of it, drawn from the seed. All times are the workers' own, from one log of events of each job.
Then the undisturbed step: plain DDP under torchrun and tier 2 under unicron-run in turn. The competitor
unicron-reproducible is tier 2 with ``reproducible=True``. docs/benchmark-recovery.md
says how the other competitors' virtual environments are made. Whoever cannot take part is reported as "not run".
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from _exit_when_told import exit_when_told
from _recovery_competitors import Competitor, competitors, plain_ddp
from _recovery_job import adopt_orphans, sweep
from _recovery_report import progress, table, write_json
from _recovery_scenario import Setting, recovery, undisturbed
from _report import describe_machine
from _scenarios import Run

NAMES = ["torchrun", "torchft", "torchft-default", "nvrx-inprocess", "unicron-run", "unicron-reproducible"]
ALIASES = {"nvrx": "nvrx-inprocess", "unicron": "unicron-run"}
USUAL = ["torchrun", "torchft", "nvrx-inprocess", "unicron-run"]


def main() -> None:
    """Measure, print the table, and write the JSON file if one is wanted."""
    args = parse_arguments()
    # Without these, a termination would skip the clean-up of the job in progress.
    exit_when_told()
    adopt_orphans()
    sweep()
    machine = describe_machine()
    print(machine, file=sys.stderr)
    taking_part, absent = select(args)
    runs = []
    for run in measure(args, taking_part):
        runs.append(run)
        print(progress(run), file=sys.stderr, flush=True)
        if args.json:
            write_json(args.json, runs, vars(args), machine, absent)  # after every run: an abort leaves its data
    print(table(runs, absent))


def select(args: argparse.Namespace) -> tuple[list[Competitor], dict[str, str]]:
    """Those who take part, and of the others that were asked for, why not."""
    taking_part, absent = [], {}
    for competitor in competitors(args.torchft_python, args.nvrx_python):
        if competitor.name in args.peers:
            problem = competitor.problem()
            if problem is None:
                taking_part.append(competitor)
            else:
                absent[competitor.name] = problem
                print(f"{competitor.name}: not run: {problem}", file=sys.stderr, flush=True)
    return taking_part, absent


def measure(args: argparse.Namespace, taking_part: Sequence[Competitor]) -> Iterator[Run]:
    """All kills, then all undisturbed runs, each in an order that alternates between the competitors."""
    setting = Setting(args.ranks, args.micro_batches, args.batch_size, args.checkpoint_every, args.deadline_s)
    for repetition in range(args.rounds):
        for competitor in _alternate(taking_part, repetition):
            yield recovery(competitor, setting, repetition, args.seed)
    ours = [competitor for competitor in taking_part if competitor.name.startswith("unicron")]
    for repetition in range(args.pairs if ours else 0):
        for competitor in _alternate([plain_ddp(), *ours], repetition):
            yield undisturbed(competitor, setting, repetition, args.steps)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = ",".join(NAMES)
    parser.add_argument(
        "--peers", type=_peers, default=USUAL, metavar="NAMES", help=f"of {known} (default: {','.join(USUAL)})"
    )
    parser.add_argument("--rounds", type=_count, default=10, help="kills for each competitor (default: %(default)s)")
    parser.add_argument("--pairs", type=_count, default=10, help="undisturbed runs of each (default: %(default)s)")
    parser.add_argument("--steps", type=_steps, default=60, help="steps of each of those (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--micro-batches", type=int, default=16, help="of a step, together (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=6, help="sequences in each (default: %(default)s)")
    parser.add_argument("--checkpoint-every", type=int, default=10, metavar="STEPS", help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of who is killed and when (default: %(default)s)")
    parser.add_argument("--deadline-s", type=float, default=90.0, help="of one job (default: %(default)s)")
    parser.add_argument("--torchft-python", type=_path, metavar="PATH", help="Python of a virtualenv with torchft")
    parser.add_argument("--nvrx-python", type=_path, metavar="PATH", help="Python of one with nvidia-resiliency-ext")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all records there")
    args = parser.parse_args(arguments)
    if args.ranks < 2:
        parser.error(f"--ranks is {args.ranks}; one rank dies, so there must be at least 2")
    if args.micro_batches < args.ranks:
        parser.error(f"--micro-batches is {args.micro_batches}; each of the {args.ranks} ranks needs one at least")
    return args


def _peers(text: str) -> list[str]:
    names = [ALIASES.get(name, name) for name in text.split(",")]
    for name in names:
        if name not in NAMES:
            raise argparse.ArgumentTypeError(f"there is no competitor {name!r}; there are {', '.join(NAMES)}")
    return names


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of runs, 0 or more")
    return int(text)


def _steps(text: str) -> int:
    if not text.isdigit() or int(text) < 6:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of steps of at least 6, of which a third only warms"
        )
    return int(text)


def _path(text: str) -> Path:
    return Path(text).absolute()  # not resolved: a virtual environment's Python is a link to another folder


def _alternate(taking_part: Sequence[Competitor], repetition: int) -> list[Competitor]:
    """Those taking part in turn, each time beginning with another one."""
    first = repetition % len(taking_part) if taking_part else 0
    return [*taking_part[first:], *taking_part[:first]]


if __name__ == "__main__":
    main()
