"""The same with heartbeats for NVIDIA's rank monitor, as its example has them: time-outs come from observed ones."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from common import Job, load_checkpoint, save_checkpoint
from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient
from torch.nn.parallel import DistributedDataParallel


def train(job: Job, monitor: RankMonitorClient) -> None:
    """Train from the newest checkpoint."""
    rank, world, count = dist.get_rank(), dist.get_world_size(), job.micro_batches
    model = job.model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    done = load_checkpoint(job.checkpoint, model=model, optimizer=optimizer)
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
        if rank == 0 and step % job.checkpoint_every == 0:
            save_checkpoint(job.checkpoint, step, model=model, optimizer=optimizer)
        monitor.send_heartbeat()
        if step == done + job.checkpoint_every:
            monitor.calculate_and_set_hb_timeouts(skip_if_not_ready=True)


def main() -> None:
    """Join the launcher's world and train."""
    job = Job()
    dist.init_process_group("gloo", timeout=job.timeout)
    monitor = RankMonitorClient()
    monitor.init_workload_monitoring()
    train(job, monitor)
    monitor.shutdown_workload_monitoring()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
