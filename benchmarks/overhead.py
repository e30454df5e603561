"""What a launcher's agent costs the training step, while nothing is wrong: looks, probes, log, everything it does.

    python benchmarks/overhead.py                       # about seven minutes
    python benchmarks/overhead.py --pairs 20 --width 2048

One job runs on all cores, and its steps are work, so that whatever an agent does takes time from them. The agent's
process is stopped (SIGSTOP) and continued in turn: steps made while it ran are compared with those beside them, made
while it did not, in the same workers. That ratio is as noisy as the machine, so the processor time that the launcher
used is told as well: what it takes from the steps is at least that, spread over all cores. What workers do for it in
each step, `in_band.py` measures.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise

import psutil
from _exit_when_told import exit_when_told
from _launchers import TORCHRUN, UNICRON, Launch, Launcher
from _report import confidence, describe_machine
from _steps import StepLog, wait_for_step

WARM_UP_STEPS = 60
SETTLE_S = 0.15  # after a switch: what piled up is done


def main() -> None:
    """Measure both launchers and print."""
    exit_when_told()
    parser = argparse.ArgumentParser(description="Cost of an agent per training step.")
    parser.add_argument("--pairs", type=int, default=100, help="of blocks (default: %(default)s)")
    parser.add_argument("--block", type=float, default=1.0, help="seconds of a block (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--width", type=int, default=1024, help="of the model's two layers (default: %(default)s)")
    args = parser.parse_args()
    print(describe_machine())
    for launcher in (UNICRON, TORCHRUN):
        print(line(launcher, *measure(launcher, args)), flush=True)
    print(f"load average after: {os.getloadavg()}")


def measure(launcher: Launcher, args: argparse.Namespace) -> tuple[list[float], list[float], float]:
    """(ratio of step times with and without the agent, milliseconds without it) for each pair of blocks.

    And the processor time of the launcher while it ran, in percent of one core.
    """
    time_s = 60.0 + 2 * args.pairs * (args.block + SETTLE_S)
    ratios, plain_ms, used_s, ran_s = [], [], 0.0, 0.0
    with Launch(launcher, args.ranks, [f"--width={args.width}"], time_s) as launch:
        logs = wait_for_step(launch, args.ranks, WARM_UP_STEPS)
        log, helpers = logs[0], launch.helpers({each.pid for each in logs})
        for pair in range(args.pairs):
            took_ms = {}
            for runs in (pair % 2 == 0, pair % 2 != 0):
                os.kill(launch.process.pid, signal.SIGCONT if runs else signal.SIGSTOP)
                time.sleep(SETTLE_S)
                begin, used_before_s = time.monotonic_ns(), cpu_s(helpers)
                time.sleep(args.block)
                end = time.monotonic_ns()
                took_ms[runs] = mean_ms(log, begin, end)
                if runs:
                    used_s += cpu_s(helpers) - used_before_s
                    ran_s += (end - begin) / 1e9
            plain_ms.append(took_ms[False])
            ratios.append(took_ms[True] / took_ms[False])
        os.kill(launch.process.pid, signal.SIGCONT)
    return ratios, plain_ms, 100.0 * used_s / ran_s


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    """The processor time that they have used so far, in seconds."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def mean_ms(log: StepLog, begin_ns: int, end_ns: int) -> float:
    """The mean time of the steps between two moments: a mean, since what an agent does strikes few of many steps."""
    moments = [at for at in log.step_ns() if begin_ns <= at <= end_ns]
    return statistics.mean(after - before for before, after in pairwise(moments)) / 1e6


def line(launcher: Launcher, ratios: Sequence[float], plain_ms: Sequence[float], used_percent: float) -> str:
    """What is printed of one launcher."""
    low, high = confidence(ratios)
    return (
        f"{launcher.name}: median {statistics.median(ratios):.4f} (95 % interval {low:.4f} to {high:.4f}) of "
        f"{len(ratios)} pairs; steps of {statistics.median(plain_ms):.1f} ms without the agent; "
        f"it uses {used_percent:.2f} % of a core"
    )


if __name__ == "__main__":
    main()
