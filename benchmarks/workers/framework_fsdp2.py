"""A script with torch's FSDP2, and nothing else."""

from __future__ import annotations

import torch
import torch.distributed as dist
from framework_log import StepTimes, parse_arguments
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main() -> None:
    """Train."""
    times = StepTimes(parse_arguments().log_dir)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)])
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        optimizer.zero_grad()
        model(torch.randn(8, 32)).square().mean().backward()
        optimizer.step()
        times.step()


if __name__ == "__main__":
    main()
