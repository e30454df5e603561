"""Train a small byte-level model on Python's standard library, on as many nodes as the plan gives this job.

A step has ``--micro-batches``, which the ranks of all nodes share. Each of them computes real gradients of a model that
is small enough for a laptop, and then waits for ``--device-ms``: so long an accelerator would take, and so several
simulated hosts of one machine are as fast as several real ones. Nothing else is simulated.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unicron_elastic

CONTEXT, WIDTH, BATCH = 32, 32, 8
SLICE = 2.0  # ms; sleeping in slices, a rank that is told to stop does so soon
FLOPS_PER_TOKEN = 6  # times parameters: forward, and twice that backward


def corpus() -> Tensor:
    """Return the text, one byte per element."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def model_of_bytes() -> nn.Module:
    """Return a model that guesses a byte from the ``CONTEXT`` before it."""
    layers = [nn.Embedding(256, WIDTH), nn.Flatten(), nn.Linear(CONTEXT * WIDTH, 128), nn.GELU(), nn.Linear(128, 256)]
    return nn.Sequential(*layers)


def loss_of(model: nn.Module, text: Tensor, step: int, index: int) -> Tensor:
    """Return the loss of one micro-batch, which is the same whoever computes it."""
    generator = torch.Generator().manual_seed(hash((step, index)))
    starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=generator)
    cut = text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
    return F.cross_entropy(model(cut[:, :-1]), cut[:, -1])


def wait_as_a_device(milliseconds: float) -> None:
    """Take as long as an accelerator would."""
    end = time.monotonic() + milliseconds / 1000.0
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, SLICE / 1000.0))


def main() -> None:
    """Train to the last step."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--micro-batches", type=int, default=12, help="of a step, over all ranks")
    parser.add_argument("--device-ms", type=float, default=40.0, help="that an accelerator takes for one of them")
    parser.add_argument("--times", type=Path, help="folder in which each process writes when it has made which step")
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)
    text, model = corpus(), model_of_bytes()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run = unicron_elastic.Run(model=model, optimizer=optimizer)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    unicron_elastic.flops_per_step(FLOPS_PER_TOKEN * parameters * BATCH * args.micro_batches)
    made = None if args.times is None else (args.times / f"{os.environ.get('RANK', '0')}-{os.getpid()}.steps").open("a")

    for step in run.steps(total=args.steps, micro_batches=args.micro_batches):
        loss = torch.zeros(())
        for index in step:
            loss = loss_of(model, text, step.number, index)
            step.backward(loss)
            wait_as_a_device(args.device_ms)
        optimizer.step()
        optimizer.zero_grad()
        if made is not None:
            print(time.time(), step.number, file=made, flush=True)
        if step.number % 20 == 0 and run.rank == 0:
            print(f"step {step.number:4}  loss {loss.item():.3f}  {run.world_size} ranks", flush=True)


if __name__ == "__main__":
    main()
