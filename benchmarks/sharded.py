"""What the loss of a rank of a sharded model costs: FSDP2 in replicas that go on, beside torch's HSDP with checkpoints.

    python benchmarks/sharded.py --rounds 5

Two replicas of two ranks each on this machine, over gloo. In each round both train without a fault, and then with one:
a rank ends by SIGKILL in the middle of a backward pass, half way. HSDP runs under torchrun and saves by
torch.distributed.checkpoint every 10 steps. All times are the workers' own.
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
from typing import Any

from _exit_when_told import exit_when_told
from _launchers import TORCHRUN, UNICRON, Launcher
from _report import Spread, describe_machine

WORKER = Path(__file__).parent / "workers" / "sharded_steps.py"
WAYS = {"hsdp": TORCHRUN, "replicas": UNICRON}
WARM_UP = 5  # steps that do not count
DEADLINE_S = 300.0


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
    undisturbed = _job(args, way, launcher)
    steps = [each["took_s"] for each in undisturbed if each["what"] == "step" and each["step"] >= WARM_UP]
    kill_step = args.steps // 2
    disturbed = _job(args, way, launcher, "--kill-rank=3", f"--kill-step={kill_step}")
    killed = next(each for each in disturbed if each["what"] == "killed")
    after = [each for each in disturbed if each["what"] == "step" and each["at"] > killed["at"]]
    others = [each["at"] for each in after if each["rank"] == 0 and each["step"] >= kill_step]
    again = [each["at"] for each in after if each["rank"] == 3 and each["step"] >= kill_step]
    return {
        "undisturbed step": 1e3 * statistics.median(steps),
        "kill to the end of the step": 1e3 * (min(others) - killed["at"]),
        "kill to the first step of the rank's successor": 1e3 * (min(again) - killed["at"]),
    }


def _job(args: argparse.Namespace, way: str, launcher: Launcher, *more: str) -> list[dict[str, Any]]:
    """Return what all processes of a job have written down."""
    with tempfile.TemporaryDirectory(prefix="unicron-sharded-") as folder:
        sizes = [f"--{name}={getattr(args, name)}" for name in ("steps", "width", "layers")]
        command = [str(launcher.path), "--standalone", "--nproc-per-node=4", "--max-restarts=3"]
        command += [str(WORKER), way, f"--written={folder}", *sizes, *more]
        environ = {**os.environ, **launcher.environment, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        if done.returncode:
            raise SystemExit(f"{way} ended with {done.returncode}:\n{done.stderr[-4000:]}")
        found: list[dict[str, Any]] = []
        for path in Path(folder).glob("*.jsonl"):
            rank = int(path.name.partition("-")[0])
            found += ({**json.loads(line), "rank": rank} for line in path.read_text().splitlines())
        return sorted(found, key=lambda each: each["at"])


def _table(found: dict[str, list[dict[str, float]]]) -> str:
    lines = ["| ms, median [least - greatest] | replicas, unicron-run | HSDP, torchrun | ratio |", "|---|---|---|---|"]
    for name in found["hsdp"][0]:
        ours, theirs = ([each[name] for each in found[way]] for way in ("replicas", "hsdp"))
        ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
        lines.append(f"| {name} | {_shown(ours)} | {_shown(theirs)} | {_shown(ratios, 3)} |")
    return "\n".join(lines)


def _shown(values: list[float], digits: int = 0) -> str:
    spread = Spread.of(values)
    assert spread is not None
    return f"{spread.median:.{digits}f} [{spread.minimum:.{digits}f} - {spread.maximum:.{digits}f}]"


if __name__ == "__main__":
    main()
