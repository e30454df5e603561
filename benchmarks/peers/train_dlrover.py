"""The same with DLRover's Flash Checkpoint: every step into shared memory, every tenth to storage as well."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from common import Job
from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer
from torch.nn.parallel import DistributedDataParallel


def train(job: Job) -> None:
    """Train from the newest checkpoint."""
    rank, world, count = dist.get_rank(), dist.get_world_size(), job.micro_batches
    model = job.model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    checkpointer = DdpCheckpointer(str(job.folder / "flash"))
    done = 0
    if state := checkpointer.load_checkpoint():
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]
    parallel = DistributedDataParallel(model)
    for step in range(done + 1, job.steps + 1):
        optimizer.zero_grad()
        for index in range(rank, count, world):
            is_last = index + world >= count
            with contextlib.nullcontext() if is_last else parallel.no_sync():
                loss = job.loss(parallel, step, index) * (world / count)
                loss.backward()
        optimizer.step()
        job.done(step, 0, world)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        storage = StorageType.MEMORY if step % job.checkpoint_every else StorageType.DISK
        checkpointer.save_checkpoint(step, state, storage_type=storage)


def main() -> None:
    """Join the launcher's world and train."""
    job = Job()
    dist.init_process_group("gloo", timeout=job.timeout)
    train(job)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
