"""Trains with Accelerate and says what each step comes to: in one process with nothing of ours, or on ranks in place.

train_accelerate.py [--plain] [--kill RANK:STEP] [--wait STEP]
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

RANKS, ACCUMULATED, EPOCHS, SAMPLES = 2, 2, 3, 110


class Noted(TensorDataset):
    """`Noted` tells which samples were read for a micro-batch."""

    def __getitem__(self, index: int) -> Any:
        return (*super().__getitem__(index), torch.tensor(index))


def parts() -> tuple[Any, ...]:
    """Return what is prepared; batches are drawn by a generator of the loader's own."""
    torch.manual_seed(0)
    drawn = torch.Generator().manual_seed(5)
    data = Noted(torch.randn(SAMPLES, 16, generator=drawn), torch.randint(5, (SAMPLES,), generator=drawn))
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(7))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    return model, optimizer, loader, scheduler


def say(step: int, loss: float, optimizer: Any, model: nn.Module) -> None:
    """Print what a step came to."""
    norm = sum(float(each.detach().double().norm()) for each in model.parameters())
    rate = optimizer.param_groups[0]["lr"]
    os.write(1, f"step {step} loss {loss:.9f} rate {rate:.9f} norm {norm:.9f}\n".encode())


def train_plainly() -> None:
    """Train in one process, with as many batches in a step as all ranks have."""
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader, scheduler = parts()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = 0
    for _ in range(EPOCHS):
        batches = list(loader)
        for begin in range(0, len(batches), RANKS * ACCUMULATED):
            of_step = batches[begin : begin + RANKS * ACCUMULATED]
            losses = [nn.functional.cross_entropy(model(x), y) / len(of_step) for x, y, _ in of_step]
            torch.stack(losses).sum().backward()
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            for _ in range(RANKS):  # as accelerate's own scheduler does in so many processes
                scheduler.step()
            optimizer.zero_grad()
            steps += 1
            say(steps, float(torch.stack(losses).detach().sum()), optimizer, model)


def train_in_place(asked: argparse.Namespace) -> None:
    """Train on ranks."""
    from unicron_elastic import Run
    from unicron_elastic.accelerate import InPlaceAccelerator

    accelerator = InPlaceAccelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    model, optimizer, loader, scheduler = accelerator.prepare(*parts())
    batches = accelerator.batches(loader)
    run = Run.of(accelerator)
    for epoch in range(EPOCHS):
        for step in batches.steps(epoch):
            for index in step:
                strike(asked.kill, step.number)
                wait(asked.wait, step.number, run)
                x, y, samples = batches(step.number, index)
                os.write(1, f"read {step.number} {index} {samples.tolist()}\n".encode())
                step.backward(nn.functional.cross_entropy(model(x), y))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if accelerator.is_main_process:
                say(step.number + 1, step.loss, optimizer, model)
    accelerator.end_training()


def strike(asked: str, step: int) -> None:
    """Kill this process, once, if it is the rank and the step that was asked for."""
    done = Path(os.environ["PROBE"], "struck")
    if asked == f"{os.environ['RANK']}:{step}" and not done.exists():
        done.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def wait(asked: int, step: int, run: Any) -> None:
    """Wait in a step until both ranks are there again, if that was asked for."""
    if step == asked and "UNICRON_TAKES_PLACE" not in os.environ:
        from train_in_place import await_moment

        link = run._engine._membership._link
        await_moment(lambda: link._world.number >= 3 and len(link._world.members) == RANKS, "the replacement")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--kill", default="")
    parser.add_argument("--wait", type=int, default=-1)
    torch.set_num_threads(1)
    options = parser.parse_args()
    train_plainly() if options.plain else train_in_place(options)
