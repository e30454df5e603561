"""For the scripts of `frameworks.py`: says when the script began and when each step ended, as `ddp_steps.py` does."""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

PAUSE_S = 0.02  # a step: the machine is not to be busy with this job alone


def parse_arguments() -> argparse.Namespace:
    """Read the command line; the process dies after ``--deadline``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--log-dir", type=Path, required=True)
    parser.add_argument("--deadline", type=int, default=300, metavar="SECONDS")
    args = parser.parse_args()
    signal.alarm(args.deadline)  # torchrun's workers outlive a killed launcher
    return args


class StepTimes:
    """The file of this process."""

    def __init__(self, folder: Path) -> None:
        """Create it, and note the start."""
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        path = folder / f"steps.{os.environ['RANK']}.{restarts}.{os.getpid()}"
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._steps = 0
        os.write(self._fd, b"start %d\n" % time.monotonic_ns())

    def step(self) -> None:
        """Note that one has ended."""
        self._steps += 1
        os.write(self._fd, b"%d %d\n" % (self._steps, time.monotonic_ns()))
        time.sleep(PAUSE_S)
