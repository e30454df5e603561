"""DDP in torchft's wrapper: each rank is a replica of its own, and those that take part share out the micro-batches."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch
from common import Job
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo


def train(job: Job) -> None:
    """Train from the state of a replica that has one."""
    count = job.micro_batches
    model = job.model()
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=job.timeout),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": adam.state_dict()},
        min_replica_size=1,
        timeout=2 * job.timeout,
        replica_id=f"replica_{os.environ['REPLICA_GROUP_ID']}",
    )
    parallel = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, adam)
    while (done := manager.current_step()) < job.steps:
        optimizer.zero_grad()
        world, place = manager.num_participants(), manager.participating_rank()
        # A replica that is being healed has no place: its gradients count for nothing, but the reduction needs it.
        mine = range(1) if place is None else range(place, count, world)
        for index in mine:
            with contextlib.nullcontext() if index == mine[-1] else parallel.no_sync():
                loss = job.loss(parallel, done + 1, index, is_logged=place is not None) * (world / count)
                loss.backward()
        optimizer.step()
        if manager.current_step() > done:  # else it was not committed, and is computed again
            job.done(manager.current_step(), manager._quorum_id, world)


def main() -> None:
    """Train as one replica."""
    train(Job())


if __name__ == "__main__":
    main()
