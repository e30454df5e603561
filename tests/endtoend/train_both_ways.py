"""Trains a sharded model as HSDP, or in replicas of ``unicron_elastic``, and writes the bits of what comes out.

train_both_ways.py hsdp|replicas KIND
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import unicron_elastic

STEPS, MICRO_BATCHES, SHARD = 4, 8, 2
WAY, KIND = sys.argv[1:]
TENSOR = 2 if KIND == "tensor" else 1
KINDS: dict[str, dict[str, Any]] = {
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "stays-whole": {"reshard_after_forward": False},
}


class Block(nn.Module):
    """A `Block` whose layers do not divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        wide = 33 + (TENSOR > 1)  # tensor parallelism divides evenly alone
        self.up, self.down, self.norm = nn.Linear(16, wide), nn.Linear(wide, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        """Computed once more in the backward pass, in one kind."""
        result: Tensor = checkpoint(self.part, x, use_reentrant=False) if KIND == "checkpoint" else self.part(x)
        return result

    def part(self, x: Tensor) -> Tensor:
        """Add to it."""
        result: Tensor = self.norm(x + self.down(torch.tanh(self.up(x))))
        return result


def made(mesh: Any, tensor: Any = None) -> nn.Module:
    """The model, sharded; its layers, in one kind, by ``tensor`` as well."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    for block in model:
        if tensor is not None:
            parallelize_module(block, tensor, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh, **KINDS.get(KIND, {}))
    return fully_shard(model, mesh=mesh, **KINDS.get(KIND, {}))


def loss_of(model: nn.Module, step: int, index: int, seat: int) -> Tensor:
    """Of one part of a micro-batch."""
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1000 * step + 10 * index + seat))
    loss: Tensor = (model(x) - x.sin()).float().square().mean()
    return loss


def end_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Clip, where torch can, which has no norm over parameters of different meshes; and step."""
    if TENSOR == 1:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def replicas() -> nn.Module:
    """Ours."""
    mesh = unicron_elastic.replica_mesh(shard=SHARD, tensor=TENSOR)
    model = made(mesh["shard"], mesh["tensor"] if TENSOR > 1 else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run = unicron_elastic.Run(model=model, optimizer=optimizer)
    for step in run.steps(STEPS, MICRO_BATCHES):
        for index in step:
            step.backward(loss_of(model, step.number, index, mesh.get_local_rank("shard")))
        end_step(model, optimizer)
    return model


def hsdp() -> nn.Module:
    """torch's."""
    dist.init_process_group("gloo")
    count = dist.get_world_size() // (SHARD * TENSOR)
    mesh = init_device_mesh("cpu", (count, SHARD, TENSOR), mesh_dim_names=("replicate", "shard", "tensor"))
    model: Any = made(mesh["replicate", "shard"], mesh["tensor"] if TENSOR > 1 else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    number, seat = mesh.get_local_rank("replicate"), mesh.get_local_rank("shard")
    own = range(MICRO_BATCHES)[number * MICRO_BATCHES // count :][: MICRO_BATCHES // count]
    for step in range(STEPS):
        optimizer.zero_grad()
        for index in own:
            model.set_requires_all_reduce(index == own[-1])
            (loss_of(model, step, index, seat) / len(own)).backward()
        end_step(model, optimizer)
    return model


if __name__ == "__main__":
    torch.set_num_threads(1)
    trained: Any = {"hsdp": hsdp, "replicas": replicas}[WAY]()
    digest = hashlib.sha256()
    for parameter in trained.parameters():
        digest.update(bytes(parameter.full_tensor().detach().reshape(-1).view(torch.uint8).tolist()))
    (Path(os.environ["PROBE"]) / f"{WAY}-{os.environ['RANK']}").write_text(digest.hexdigest())
