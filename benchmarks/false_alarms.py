"""Whether anything is said of hangs and slowness while nothing is wrong: ordinary training, with all of its pauses.

    python benchmarks/false_alarms.py                 # an hour
    python benchmarks/false_alarms.py --minutes 5

The job is examples/train_gpt.py on the source code of Python's library: evaluation and checkpoints, neither of them
named by the script. The machine should have nothing else to do: a job that is slow because of others *is* slow.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from _exit_when_told import exit_when_told
from _launchers import UNICRON, Launch, incidents
from _report import describe_machine
from detection import TELLS

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_gpt.py"
STEP = re.compile(r"^step (\d+)  (eval )?loss")


def main() -> None:
    """Run the job for as long as was asked, then report."""
    exit_when_told()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="(default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--evaluate-every", type=int, default=250, metavar="STEPS", help="(default: %(default)s)")
    args = parser.parse_args()
    machine = describe_machine()
    print(json.dumps(machine), file=sys.stderr)
    end = time.monotonic() + 60 * args.minutes
    arguments = ["--steps=100000000", f"--evaluate-every={args.evaluate_every}"]
    options = ("--max-restarts=0", "--unicron-console=plain", "--tee=0:1")
    with (
        TemporaryDirectory(prefix="unicron-checkpoints-") as checkpoints,
        Launch(
            UNICRON,
            args.ranks,
            [*arguments, f"--checkpoint-dir={checkpoints}"],
            60 * args.minutes + 120,
            worker=EXAMPLE,
            options=options,
        ) as launch,
    ):
        while time.monotonic() < end:
            launch.wait_alive("end of the time")
            time.sleep(0.2)
        launch.process.send_signal(signal.SIGTERM)
        stopped = time.monotonic_ns()
        launch.wait_ended()
        report(launch, stopped, machine["load_average_before"])


def report(launch: Launch, stopped: int, load_before: object) -> None:
    """What the job did, and every line that spoke of it."""
    outputs = [path.read_text().splitlines() for path in launch.logs_folder.rglob("0/stdout.log")]
    steps = [match for lines in outputs for line in lines if (match := STEP.match(line))]
    evaluations = sum(match[2] is not None for match in steps)
    said = [(at, line) for at, line in launch.lines if at < stopped and TELLS.search(line)]
    hangs = [line for _, line in said if re.search(r"\bhangs?: ", line)]
    minutes = (stopped - launch.started_ns) / 60e9
    print(f"{minutes:.1f} minutes, {steps[-1][1] if steps else 0} steps, {evaluations} evaluations")
    print(f"incidents: {sum(record['noticed_at'] * 1e9 < stopped for record in incidents(launch.logs_folder, 0))}")
    print(f"lines on hangs: {len(hangs)}; on slowness: {len(said) - len(hangs)}")
    for at, line in said:
        print(f"  after {(at - launch.started_ns) / 1e9:.0f} s: {line.strip()}")
    print(f"load average before {load_before}, after {os.getloadavg()}")


if __name__ == "__main__":
    main()
