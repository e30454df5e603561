"""What a step of ``run.steps()`` takes beside one of DDP, while nothing is wrong: in turns, in the same job.

    python benchmarks/undisturbed.py                     # on this host: what a step computes counts
    python benchmarks/undisturbed.py --mbit 1000         # as root: two hosts with a link of so many Mbit/s each

Both train the same model with the same optimizer on the same process group, in turns of some steps; each turn's median
is compared with that of the turn beside it. Hosts are namespaces, one rank each, and the link is a token bucket.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from _exit_when_told import exit_when_told
from _report import describe_machine

sys.path.append(str(Path(__file__).parents[1] / "tests" / "cluster"))
import hosts

WORKER = Path(__file__).parent / "workers" / "steps_of_both.py"
PORT = 29513
BURST_S = 0.004  # of a full link: what a token bucket lets through at once


def main() -> None:
    """Run the job, and print one line."""
    exit_when_told()
    parser = argparse.ArgumentParser(description="A step of tier 2 beside one of DDP.")
    parser.add_argument("--ranks", type=int, default=2, help="on this host; with --mbit hosts (default: %(default)s)")
    parser.add_argument("--mbit", type=float, default=0.0, help="of each host's link, per second (default: one host)")
    parser.add_argument("--width", type=int, default=1024, help="of a layer (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=24, help="(default: %(default)s)")
    parser.add_argument("--samples", type=int, default=64, help="of a micro-batch (default: %(default)s)")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a rank (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="of a turn (default: %(default)s)")
    parser.add_argument("--reproducible", action="store_true")
    parser.add_argument(
        "--other-order", action="store_true", help="the model uses its layers from the last to the first"
    )
    parser.add_argument("--deadline", type=float, default=900.0, help="seconds (default: %(default)s)")
    args = parser.parse_args()
    print(describe_machine())
    with tempfile.TemporaryDirectory(prefix="unicron-undisturbed-") as folder:
        out = Path(folder) / "took.json"
        (_on_hosts if args.mbit else _here)(args, _worker(args, out), Path(folder))
        print(_line(args, json.loads(out.read_text())))


def _worker(args: argparse.Namespace, out: Path) -> list[str]:
    names = ("width", "layers", "samples", "accumulate", "turns", "steps")
    given = [f"--{name}={getattr(args, name)}" for name in names]
    flags = [f"--{name}" for name in ("reproducible", "other-order") if getattr(args, name.replace("-", "_"))]
    return [str(WORKER), f"--out={out}", *given, *flags]


def _program() -> str:
    return str(Path(sys.executable).parent / "unicron-run")


def _here(args: argparse.Namespace, worker: list[str], _folder: Path) -> None:
    argv = [_program(), "--standalone", f"--nproc-per-node={args.ranks}", *worker]
    subprocess.run(argv, check=True, timeout=args.deadline)


def _on_hosts(args: argparse.Namespace, worker: list[str], folder: Path) -> None:
    """Raises RuntimeError if hosts cannot be made here."""
    if why := hosts.why_no_hosts():
        raise RuntimeError(why)
    with hosts.Network(folder) as network:
        nodes = network.add(*(f"host{number}" for number in range(args.ranks)))
        for node in nodes:
            bits = args.mbit * 1e6
            bucket = ["rate", f"{bits:.0f}bit", "burst", f"{max(32_000, bits / 8 * BURST_S):.0f}", "latency", "400ms"]
            hosts.run_tool("tc", "-netns", node.namespace, "qdisc", "replace", "dev", "eth0", "root", "tbf", *bucket)
        meeting = [f"--nnodes={args.ranks}", "--nproc-per-node=1", f"--master-addr={nodes[0].address}"]
        started = [
            node.start(
                [_program(), *meeting, f"--master-port={PORT}", f"--node-rank={number}", *worker],
                env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0"},
            )
            for number, node in enumerate(nodes)
        ]
        for process in started:
            if process.wait(args.deadline):
                raise RuntimeError(f"a launcher ended with {process.returncode}")


def _line(args: argparse.Namespace, took: dict[str, list[list[float]]]) -> str:
    medians = {who: [statistics.median(turn) for turn in turns] for who, turns in took.items()}
    ratios = [ours / theirs for ours, theirs in zip(medians["ours"], medians["ddp"], strict=True)]
    ours, theirs = (statistics.median(medians[who]) * 1e3 for who in ("ours", "ddp"))
    link = f"{args.ranks} hosts, {args.mbit:g} Mbit/s" if args.mbit else f"{args.ranks} ranks"
    millions = args.layers * (args.width**2 + args.width) / 1e6
    what = f"{link}, {millions:.1f} million parameters, {args.accumulate} micro-batches a rank"
    spread = f"{statistics.median(ratios):.3f} of it [{min(ratios):.3f} to {max(ratios):.3f}]"
    turns = f"{len(ratios)} turns of {args.steps} steps"
    return f"{what}: run.steps() {ours:.1f} ms, DDP {theirs:.1f} ms; {spread}, {turns}"


if __name__ == "__main__":
    main()
