"""DDP with checkpoints inside NVIDIA's in-process restart: what the benchmark of recovery starts once for each rank.

The wrapped function makes everything anew from the newest checkpoint, as the documentation of ``inprocess.Wrapper``
asks; the process, and what it has imported, stay. A dead process does not come back: the others go on without it.
With ``--serve`` this process holds only the store, so that rank 0 may be killed like any other.

There is no ``from __future__ import annotations`` here: the wrapper looks for its class among the annotations of the
function it wraps, and does not understand one that is a string.
"""

import argparse
import contextlib
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

from recovery_common import EventLog, make_model, parse_arguments


def train(arguments: argparse.Namespace, log: EventLog, generation: int) -> None:
    """Train from the newest checkpoint until the process is ended, a peer dies, or ``--steps`` are done."""
    import torch
    import torch.distributed as dist
    from checkpoint import load_checkpoint, save_checkpoint
    from torch.nn.parallel import DistributedDataParallel

    rank, world, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), arguments.micro_batches
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.PrefixStore(f"job/{generation}", dist.TCPStore(host, port, is_master=False, wait_for_workers=False))
    timeout = timedelta(seconds=arguments.timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    model, batches = make_model(arguments)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    checkpoint: Path = arguments.folder / "checkpoint.pt"
    done = load_checkpoint(checkpoint, model=model, optimizer=optimizer)
    parallel = DistributedDataParallel(model)
    for step in range(done + 1, arguments.steps + 1):
        optimizer.zero_grad()
        for index in range(rank, count, world):
            last = index + world >= count
            with contextlib.nullcontext() if last else parallel.no_sync():
                loss = batches.loss(parallel, step, index) * (world / count)  # DDP takes the mean over the ranks
                try:
                    loss.backward()
                finally:  # as in recovery_torchrun.py
                    log.micro_batch(step, index, generation, world)
        optimizer.step()
        log.step(step, generation, world)
        if rank == 0 and arguments.checkpoint_every and step % arguments.checkpoint_every == 0:
            save_checkpoint(checkpoint, step, model=model, optimizer=optimizer)


def wrapped(arguments: argparse.Namespace, log: EventLog) -> None:
    """Call ``train`` in the wrapper, with every waiting time as short as it may be."""
    from nvidia_resiliency_ext import inprocess

    interval = timedelta(milliseconds=arguments.interval_ms)

    @inprocess.Wrapper(  # type: ignore[untyped-decorator, unused-ignore]
        store_kwargs={"timeout": timedelta(seconds=60)},
        monitor_thread_interval=interval,
        monitor_process_interval=interval,
        progress_watchdog_interval=interval,
        heartbeat_interval=interval,
        heartbeat_timeout=timedelta(seconds=2),
        last_call_wait=interval,
        soft_timeout=timedelta(seconds=10),
        hard_timeout=timedelta(seconds=15),
        termination_grace_time=timedelta(seconds=1),
    )
    def call(call_wrapper: inprocess.CallWrapper | None = None) -> None:
        assert call_wrapper is not None
        train(arguments, log, call_wrapper.iteration)

    call()


def serve() -> None:
    """Hold the store until this process is ended."""
    import torch.distributed as dist

    store: Any = dist.TCPStore("localhost", int(os.environ["MASTER_PORT"]), is_master=True, wait_for_workers=False)
    print(f"store on port {store.port}", flush=True)
    while True:
        signal.pause()


def main() -> None:
    """Train, or hold the store."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", action="store_true", help="only hold the store")
    parser.add_argument("--interval-ms", type=int, default=100, help="of everything that the wrapper does by polling")
    parser.add_argument("--timeout-s", type=float, default=2.0, help="of collectives")
    arguments = parse_arguments(parser)
    if arguments.serve:
        serve()
    log = EventLog(arguments.folder, int(os.environ["RANK"]))
    import torch.distributed.nn  # noqa: F401  (before any group exists, for the reason that ddp_steps.py gives)

    wrapped(arguments, log)


if __name__ == "__main__":
    main()
