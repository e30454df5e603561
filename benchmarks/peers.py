"""Do the same faults to the same training under torchrun, torchft, ft_launcher, dlrover-run and unicron-run.

    python benchmarks/peers.py --cache peers-cache --json peers.json            # everything; about two hours
    python benchmarks/peers.py --cache peers-cache --faults kill --rounds 1     # a look; about three minutes
    python benchmarks/peers.py --cache peers-cache --json peers.json --render --page docs/benchmark-peers.md

Each peer is installed once into a virtual environment of its own under ``--cache``; unicron-run is the one beside the
Python that runs this. In each round every peer's job meets the same fault in the same step and after the same part of
it, drawn from the seed, one job after another. ``--json`` names a file that grows: what is in it is kept, and runs that
it has are not made again. docs/benchmark-peers.md says what is measured, and how to read it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from math import inf
from pathlib import Path

from _exit_when_told import exit_when_told
from _peers_cases import Setting, strike
from _peers_installed import install, python_of, versions
from _peers_launch import FAULTS, Bound, peers
from _peers_page import page, progress
from _recovery_job import adopt_orphans, sweep
from _report import describe_machine
from _scenarios import Run


def main() -> None:
    """Install, measure, write the records and the page."""
    args = parse_arguments()
    exit_when_told()
    adopt_orphans()
    sweep()
    data = json.loads(args.json.read_text()) if args.json and args.json.exists() else {"runs": []}
    if not args.render:
        absent = install(args.cache)
        data |= {"machine": describe_machine(), "versions": versions(args.cache), "absent": absent}
        data["limit_s"] = args.limit_s
        data["note"] = args.note or data.get("note", "")
        done = [Run(**run) for run in data["runs"]]
        for run in measure(args, absent, done):
            done = [*(each for each in done if key(each) != key(run)), run]
            data["runs"] = [asdict(each) for each in done]
            print(progress(run), file=sys.stderr, flush=True)
            if args.json:
                args.json.write_text(json.dumps(data, indent=1) + "\n")
    text = page(data)
    if args.page:
        args.page.write_text(text)
    print(text)


def measure(args: argparse.Namespace, absent: dict[str, str], done: Sequence[Run]) -> Iterator[Run]:
    """Every peer in turn in every round, each round beginning with another one; what is done already is left out."""
    setting = Setting(limit_s=args.limit_s, seed=args.seed)
    made = {key(run) for run in done if not is_disturbed(run, done, args.again_above)}
    taking_part = [peer for peer in peers() if peer.tool not in absent and peer.name in args.peers]
    end = time.monotonic() + 60 * args.minutes
    for repetition in range(args.rounds):
        for fault in args.faults:
            first = repetition % max(1, len(taking_part))
            for peer in [*taking_part[first:], *taking_part[:first]]:
                if fault in peer.faults and (fault, peer.name, repetition) not in made and time.monotonic() < end:
                    python = Path(sys.executable) if peer.tool == "unicron" else python_of(args.cache, peer.tool)
                    yield strike(Bound(peer, python.parent, fault == "node"), fault, repetition, setting)


def key(run: Run) -> tuple[str, str, int]:
    """What a run is known by."""
    return run.scenario, run.launcher, run.repetition


def is_disturbed(run: Run, done: Sequence[Run], ratio: float) -> bool:
    """Whether the steps before the fault, not what came after it, say that other programs were at work."""
    steps = [each.values["step_ms"] for each in done if each.launcher == run.launcher and "step_ms" in each.values]
    return bool(steps) and ratio < inf and run.values.get("step_ms", inf) > ratio * min(steps)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    names = [peer.name for peer in peers()]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cache", type=_path, required=True, metavar="DIR", help="of the virtual environments; 1.2 GiB"
    )
    parser.add_argument("--peers", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {names}")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS), help="(default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--limit-s", type=float, default=60.0, help="after a fault, for a step (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=inf, help="begin no more runs after so long (default: no end)")
    parser.add_argument(
        "--again-above",
        type=float,
        default=inf,
        metavar="RATIO",
        help="make runs of --json again whose steps before the fault were longer than that peer's shortest by this "
        "ratio, for other programs were at work (default: never)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of who is struck and when (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep all records there")
    parser.add_argument("--note", default="", metavar="TEXT", help="about the machine, for the page")
    parser.add_argument("--render", action="store_true", help="run nothing, only write the page from --json")
    parser.add_argument("--page", type=Path, metavar="FILE", help="also write the page there")
    args = parser.parse_args(arguments)
    if args.rounds < 1:
        parser.error(f"--rounds must be 1 or more, not {args.rounds}")
    if args.render and not (args.json and args.json.exists()):
        parser.error("--render writes the page from records: name a file that exists with --json")
    return args


def _path(text: str) -> Path:
    return Path(text).absolute()  # not resolved: a virtual environment's Python is a link to another folder


if __name__ == "__main__":
    main()
