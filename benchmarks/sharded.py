"""What the loss of a rank of a sharded model costs: FSDP2 in replicas that go on, beside torch's HSDP with checkpoints.

    python benchmarks/sharded.py --rounds 5

Two replicas of two ranks each on this machine, over gloo. In each round both train without a fault, and then with one:
a rank ends by SIGKILL in the middle of a backward pass, half way. HSDP runs under torchrun and saves by
torch.distributed.checkpoint every 10 steps. All times are the workers' own.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from _exit_when_told import exit_when_told
from _launchers import TORCHRUN, UNICRON, Launcher
from _report import describe_machine
from _written_jobs import losses_ms, shown, undisturbed_ms, written

WORKER = Path(__file__).parent / "workers" / "sharded_steps.py"
WAYS = {"hsdp": TORCHRUN, "replicas": UNICRON}
RANKS = 4


def main() -> None:
    """Run the rounds, and print the table."""
    exit_when_told()
    parser = argparse.ArgumentParser(description="The loss of a rank of a sharded model.")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="of a job (default: %(default)s)")
    parser.add_argument("--width", type=int, default=256, help="of a layer (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="(default: %(default)s)")
    args = parser.parse_args()
    print(describe_machine())
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for number in range(args.rounds):
        for way, launcher in list(WAYS.items())[:: 1 if number % 2 else -1]:
            found[way].append(_round(args, way, launcher))
            print(number, way, {name: round(each, 1) for name, each in found[way][-1].items()}, file=sys.stderr)
    print(_table(found))


def _round(args: argparse.Namespace, way: str, launcher: Launcher) -> dict[str, float]:
    """Return what was measured, in milliseconds."""
    job = [way, *(f"--{name}={getattr(args, name)}" for name in ("steps", "width", "layers"))]
    undisturbed = written(launcher, RANKS, WORKER, job)
    kill_step = args.steps // 2
    disturbed = written(launcher, RANKS, WORKER, [*job, f"--kill-rank={RANKS - 1}", f"--kill-step={kill_step}"])
    others, again = losses_ms(disturbed)
    return {
        "undisturbed step": undisturbed_ms(undisturbed),
        "kill to the end of the step": others,
        "kill to the first step of the rank's successor": again,
    }


def _table(found: dict[str, list[dict[str, float]]]) -> str:
    lines = ["| ms, median [least - greatest] | replicas, unicron-run | HSDP, torchrun | ratio |", "|---|---|---|---|"]
    for name in found["hsdp"][0]:
        ours, theirs = ([each[name] for each in found[way]] for way in ("replicas", "hsdp"))
        ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
        lines.append(f"| {name} | {shown(ours)} | {shown(theirs)} | {shown(ratios, 3)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
