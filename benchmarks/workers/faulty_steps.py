"""The script that the benchmarks of detection launch: a small DDP model whose steps last as long as wanted.

The logs are those of ``ddp_steps``. Most of a step is a wait before the backward pass, in the place of a device's work.
With ``--fault``, one rank of the first generation breaks itself in one step, in that place, and has written the moment
(CLOCK_MONOTONIC nanoseconds) to the file ``fault`` of the folder just before. Any launcher can launch it.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import time
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from statistics import median

from ddp_steps import open_log

UNPADDED_STEPS = 10  # forward and backward alone, to learn what they take
RECENT_STEPS = 50  # whose median is what a slow rank takes a multiple of


class Fault:
    """What one rank does to itself in one step, or from it on."""

    def __init__(self, kind: str, step: int, folder: Path) -> None:
        self._kind = kind
        self._step = step
        self._file = os.open(folder / "fault", os.O_WRONLY | os.O_CREAT)
        self._extra_s = 0.0

    def skips(self, step: int) -> bool:
        """Whether ``step`` is to leave out its reduction of gradients."""
        return self._kind == "skip" and step == self._step

    def extra_s(self, step: int, moments: list[int]) -> float:
        """Strikes if ``step`` is its step; returns by how much longer this step is to last."""
        if step == self._step:
            if self._kind.startswith("slow"):
                usual_ns = median(end - start for start, end in pairwise(moments[-RECENT_STEPS:]))
                self._extra_s = (float(self._kind.removeprefix("slow")) - 1.0) * usual_ns / 1e9
            # A single write: more work would show in the CPU time of this rank, by which slow ranks may be known.
            os.write(self._file, b"%d\n" % time.monotonic_ns())
            strike(self._kind)
        return self._extra_s


def strike(kind: str) -> None:
    """Does what is done once."""
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "exception":
        raise RuntimeError("raised by the benchmark")
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "sleep":
        while True:
            time.sleep(1000)
    elif kind == "xid":
        with open(Path(os.environ["FAKE_NVML"]) / "events", "w") as events:
            events.write("0 8 79\n")  # GPU 0, nvmlEventTypeXidCriticalError, "fallen off the bus"
    elif kind == "gil":
        while True:
            ctypes.PyDLL(None).sleep(1000)  # unlike CDLL, it keeps Python's lock during a call


def wait(seconds: float, busy: bool) -> None:
    """Let time pass, on a CPU or not."""
    end = time.monotonic() + seconds
    if seconds > 0 and not busy:
        time.sleep(seconds)
    while busy and time.monotonic() < end:
        pass


def train(log: int, args: argparse.Namespace, fault: Fault | None) -> None:
    """Step until ``--steps``, or until the step named in the file ``stop_at``."""
    # Imported after the log was opened, so that the log tells what the imports cost.
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    width = args.width
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parallel = DistributedDataParallel(model)
    batch = torch.randn(32, width)
    moments = []
    for _ in range(UNPADDED_STEPS):
        moments.append(time.monotonic_ns())
        optimizer.zero_grad()
        parallel(batch).square().mean().backward()
    compute_s = min(end - start for start, end in pairwise(moments)) / 1e9  # the rest is others' work on this machine
    stop_at = args.log_dir / "stop_at"
    moments = []
    step, last = 0, args.steps
    while step < last:
        optimizer.zero_grad()
        with parallel.no_sync() if fault is not None and fault.skips(step + 1) else nullcontext():
            loss = parallel(batch).square().mean()
        extra_s = 0.0 if fault is None else fault.extra_s(step + 1, moments)
        wait(args.step_ms / 1e3 - compute_s + extra_s, args.busy)
        loss.backward()
        optimizer.step()
        step += 1
        moments.append(time.monotonic_ns())
        os.write(log, b"%d %d\n" % (step, moments[-1]))
        if last == args.steps and stop_at.exists():
            last = min(last, int(stop_at.read_text()))


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--log-dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--busy", action="store_true", help="spend the wait of each step on a CPU")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--fault", metavar="KIND", help="kill, exception, stop, sleep, gil, skip, xid, slow1.5")
    parser.add_argument("--fault-rank", type=int, default=0)
    parser.add_argument("--fault-step", type=int, default=100)
    parser.add_argument("--deadline", type=int, default=120, metavar="SECONDS", help="die after this long, whatever")
    args = parser.parse_args()
    # torchrun's workers outlive a killed launcher; without this, an aborted benchmark would leave them running.
    signal.alarm(args.deadline)
    log = open_log(args.log_dir)
    import torch.distributed as dist

    # Imported before the group exists, for the reason that ddp_steps.py gives.
    import torch.distributed.nn  # noqa: F401

    dist.init_process_group("gloo")
    is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    strikes = args.fault is not None and is_first and dist.get_rank() == args.fault_rank
    train(log, args, Fault(args.fault, args.fault_step, args.log_dir) if strikes else None)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
