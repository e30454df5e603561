"""The same model trained by DDP and by ``run.steps()``, in turns within one job: each rank logs how long steps took."""

from __future__ import annotations

import argparse
import json
import os
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from unicron_elastic import Run

WARM_UP = 2  # steps of a turn that do not count: the other one's group and memory are warm


def main() -> None:
    """Train in turns, and write the seconds of each step, by turn."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--reproducible", action="store_true")
    parser.add_argument("--other-order", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    models = [_model(args) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in models]
    run = Run(model=models[0], optimizer=optimizers[0], reproducible=args.reproducible)
    ddp: DistributedDataParallel | None = None
    took: dict[str, list[list[float]]] = {"ours": [], "ddp": []}
    x = torch.randn(args.samples, args.width)
    for turn in range(args.turns):
        took["ours"].append(_ours(run, models[0], optimizers[0], x, args=args, turn=turn))
        if ddp is None:  # on the group that the run has made
            ddp = DistributedDataParallel(models[1])
        took["ddp"].append(_ddp(ddp, optimizers[1], x, args))
    if run.rank == 0:
        args.out.write_text(json.dumps(took))


def _model(args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    return Layers(args.width, args.layers, is_other_order=args.other_order)


class Layers(nn.Module):
    """`Layers` are equal ones; ``is_other_order``: the model has them in another order than it uses them."""

    def __init__(self, width: int, count: int, *, is_other_order: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.is_other_order = is_other_order

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers) if self.is_other_order else self.layers:
            x = layer(x).tanh()
        return x


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def _ours(
    run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, *, args: argparse.Namespace, turn: int
) -> list[float]:
    took = []
    micro_batches = int(os.environ["WORLD_SIZE"]) * args.accumulate
    began = time.perf_counter()
    for step in run.steps((turn + 1) * (args.steps + WARM_UP), micro_batches):
        for _ in step:
            step.backward(_loss(model, x))
        optimizer.step()
        took.append(time.perf_counter() - began)
        began = time.perf_counter()
    return took[WARM_UP:]


def _ddp(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer, x: Tensor, args: argparse.Namespace
) -> list[float]:
    took = []
    dist.barrier()
    for _ in range(args.steps + WARM_UP):
        began = time.perf_counter()
        for number in range(args.accumulate):
            with nullcontext() if number == args.accumulate - 1 else model.no_sync():
                (_loss(model, x) / args.accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()
        took.append(time.perf_counter() - began)
    return took[WARM_UP:]


if __name__ == "__main__":
    main()
