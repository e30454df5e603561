"""Plain DDP with gradient accumulation and checkpoints: what the benchmark of recovery launches under torchrun.

Written as torch's own documentation advises: ``no_sync`` for all micro-batches but the last, a checkpoint every few
steps into memory (the job's folder is in ``/dev/shm``), loaded again after a restart.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from pathlib import Path

from recovery_common import EventLog, make_model, parse_arguments


def train(arguments: argparse.Namespace, log: EventLog, generation: int) -> None:
    """Train from the newest checkpoint until the process is ended or ``--steps`` are done."""
    import torch
    import torch.distributed as dist
    from checkpoint import load_checkpoint, save_checkpoint
    from torch.nn.parallel import DistributedDataParallel

    rank, world, count = dist.get_rank(), dist.get_world_size(), arguments.micro_batches
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
                finally:  # a reduction that fails comes after the computation, which was done and is done again
                    log.micro_batch(step, index, generation, world)
        optimizer.step()
        log.step(step, generation, world)
        if rank == 0 and arguments.checkpoint_every and step % arguments.checkpoint_every == 0:
            save_checkpoint(checkpoint, step, model=model, optimizer=optimizer)


def main() -> None:
    """Join the launcher's world and train."""
    arguments = parse_arguments()
    log = EventLog(arguments.folder, int(os.environ["RANK"]))
    import torch.distributed as dist
    import torch.distributed.nn  # noqa: F401  (before the group exists, for the reason that ddp_steps.py gives)

    dist.init_process_group("gloo")
    train(arguments, log, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
