"""The script that the benchmarks launch: a small DDP model that logs the moment of every finished optimizer step.

Each process writes its own file into ``--log-dir``, named ``steps.<rank>.<restart count>.<pid>``: the line ``start
<ns>``, then ``<step> <ns>`` for every step, in CLOCK_MONOTONIC nanoseconds, which all processes of a machine share. It
ends after ``--steps`` steps, or at the step named in the file ``stop_at`` of that folder, which may appear at any time.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path


def open_log(folder: Path) -> int:
    """Create this process's log, note the start in it, and return its descriptor."""
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    path = folder / f"steps.{os.environ['RANK']}.{restarts}.{os.getpid()}"
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(log, b"start %d\n" % time.monotonic_ns())
    return log


def train(log: int, stop_at: Path, steps: int, width: int) -> None:
    """Step until ``steps``, or until the step named in ``stop_at``."""
    # Imported after the log was opened, so that the log tells what the imports cost.
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parallel = DistributedDataParallel(model)
    batch = torch.randn(32, width)
    step, last = 0, steps
    while step < last:
        optimizer.zero_grad()
        parallel(batch).square().mean().backward()
        optimizer.step()
        step += 1
        os.write(log, b"%d %d\n" % (step, time.monotonic_ns()))
        if last == steps and stop_at.exists():
            last = min(steps, int(stop_at.read_text()))


def main() -> None:
    """Train, or with ``--sleep`` only sleep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--log-dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--sleep", type=float, metavar="SECONDS", help="do nothing for this long instead of training")
    parser.add_argument("--deadline", type=int, default=120, metavar="SECONDS", help="die after this long, whatever")
    args = parser.parse_args()
    # torchrun's workers outlive a killed launcher; without this, an aborted benchmark would leave them running.
    signal.alarm(args.deadline)
    log = open_log(args.log_dir)
    if args.sleep is not None:
        time.sleep(args.sleep)
        return
    import torch.distributed as dist

    # Imported before the group exists, and not first by DDP or the optimizer: its functions keep the group of that
    # moment as a default, for ever, and torch 2.13 with gloo then aborts in one exit of six, after all work is done.
    import torch.distributed.nn  # noqa: F401

    dist.init_process_group("gloo")
    train(log, args.log_dir / "stop_at", args.steps, args.width)
    # The DDP object is gone since train returned. If it outlived the group, it would join the group's threads while it
    # holds the interpreter lock that they wait for, and hang.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
