"""Train a model sharded by FSDP2, as HSDP with checkpoints or in replicas that go on, and write down each step."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from written_log import RANK, Log

import unicron_elastic


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=["hsdp", "replicas"])
    parser.add_argument("--written", type=Path, required=True)
    parser.add_argument("--shard", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--save-every", type=int, default=10, help="of plain HSDP, by torch.distributed.checkpoint")
    parser.add_argument("--kill-step", type=int, default=-1)
    parser.add_argument("--kill-rank", type=int, default=-1)
    return parser.parse_args()


def build(args: argparse.Namespace, mesh: DeviceMesh) -> nn.Module:
    """Return the model, sharded over the mesh."""
    torch.manual_seed(0)
    width = args.width
    layers = [
        nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(args.layers)
    ]
    model = nn.Sequential(*layers)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def loss_of(model: nn.Module, args: argparse.Namespace, log: Log, place: tuple[int, int, int]) -> Tensor:
    """Return that of a micro-batch's part, by step, index and seat; who is to be killed ends in its backward pass."""
    step, index, seat = place
    generator = torch.Generator().manual_seed(1000 * step + 10 * index + seat)
    x = torch.randn(args.samples, args.width, generator=generator)
    out: Tensor = model[0](x)
    if (RANK, step) == (args.kill_rank, args.kill_step) and log.is_first("struck"):
        out.register_hook(lambda _: log.end(step))
    for layer in list(model)[1:]:
        out = layer(out)
    return (out - x.sin()).square().mean()


def hsdp(args: argparse.Namespace, log: Log) -> None:
    """As torch's documentation has it: a mesh of two dimensions, and checkpoints."""
    dist.init_process_group("gloo")
    replicas = dist.get_world_size() // args.shard
    mesh = init_device_mesh("cpu", (replicas, args.shard), mesh_dim_names=("replicate", "shard"))
    model = build(args, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    number, seat = mesh.get_local_rank("replicate"), mesh.get_local_rank("shard")
    own = range(args.micro_batches)[number * args.micro_batches // replicas :][: args.micro_batches // replicas]
    folder = args.written / "checkpoint"
    for step in range(_load(model, optimizer, folder), args.steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        for index in own:
            model.set_requires_all_reduce(index == own[-1])  # type: ignore[operator]
            (loss_of(model, args, log, (step, index, seat)) / len(own)).backward()
        optimizer.step()
        log.note("step", step, took_s=time.perf_counter() - began)
        if (step + 1) % args.save_every == 0:
            dcp.save(_state(model, optimizer, step + 1), checkpoint_id=folder)


def _state(model: nn.Module, optimizer: Any, step: int) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": _of(model, optimizer), "step": torch.tensor(step)}


def _of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    found: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    return found


def _load(model: nn.Module, optimizer: Any, folder: Path) -> int:
    if not (folder / ".metadata").exists():
        return 0
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    state = _state(model, optimizer, 0)
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return int(state["step"])


def replicas(args: argparse.Namespace, log: Log) -> None:
    """In replicas that go on."""
    mesh = unicron_elastic.replica_mesh(shard=args.shard)
    model = build(args, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = unicron_elastic.Run(model=model, optimizer=optimizer)
    seat = mesh.get_local_rank()
    for step in _timed(run.steps(args.steps, args.micro_batches), log):
        for index in step:
            step.backward(loss_of(model, args, log, (step.number, index, seat)))
        optimizer.step()


def _timed(steps: Iterator[Any], log: Log) -> Iterator[Any]:
    for step in steps:
        began, number = time.perf_counter(), step.number
        yield step
        log.note("step", number, took_s=time.perf_counter() - began)


def main() -> None:
    """Train."""
    torch.set_num_threads(1)
    args = parse_arguments()
    {"hsdp": hsdp, "replicas": replicas}[args.way](args, Log(args.written))


if __name__ == "__main__":
    main()
