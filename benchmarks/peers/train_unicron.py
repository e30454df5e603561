"""The same as a run of unicron-elastic (tier 2): survivors keep their processes and their state."""

from __future__ import annotations

import torch
from common import Job

import unicron_elastic


def train(job: Job) -> None:
    """Train from the state of a member that has one."""
    generation = 0

    def regrouped() -> None:
        nonlocal generation
        generation += 1

    model = job.model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    run = unicron_elastic.Run(model=model, optimizer=optimizer, on_regroup=regrouped)
    for step in run.steps(total=job.steps, micro_batches=job.micro_batches):
        for index in step:
            step.backward(job.loss(model, step.number + 1, index))
        optimizer.step()
        job.done(step.number + 1, generation, run.world_size)


def main() -> None:
    """Train as one rank."""
    train(Job())


if __name__ == "__main__":
    main()
