"""A small training that writes down each step: what `jobs.Training` starts as the worker of every host.

Every rank computes its share of one global batch, which depends on the step alone. So the loss of a step is the same
whatever the number of ranks, and whether or not it is done for the second time.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

BATCH = 12  # examples; 1 to 4 ranks have equal shares of it
CHECKPOINT_STEPS = 5
PAUSE_S = 0.02  # in a step, so that the log of a scenario stays small


def make_model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The same model each time, in float64, in which sums in another order are still nearly equal."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.5)


def loss_of(model: torch.nn.Module, step: int, rank: int, size: int) -> torch.Tensor:
    """The mean loss of a rank's share of the batch of a step."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, 8, generator=generator, dtype=torch.float64)
    targets = inputs.sin().sum(1, keepdim=True) + torch.randn(BATCH, 1, generator=generator, dtype=torch.float64)
    return torch.nn.functional.mse_loss(model(inputs[rank::size]), targets[rank::size])


def undisturbed_losses() -> Iterator[float]:
    """The losses of steps 1, 2, ... of a run with one rank that nothing happens to."""
    model, optimizer = make_model()
    for step in itertools.count(1):
        loss = loss_of(model, step, 0, 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


class Log:
    """The lines of this process, each written at once: a process that is killed leaves no half of one."""

    def __init__(self, folder: Path) -> None:
        self._fd = os.open(
            folder / f"{socket.gethostname()}.{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND
        )
        self._always: dict[str, Any] = {}

    def begin(self, **always: Any) -> None:
        """What every line of it has."""
        self._always = always

    def write(self, **fields: Any) -> None:
        """Adds a line with the present time, in seconds since the epoch: all hosts have the same clock."""
        os.write(self._fd, json.dumps({"at": time.time(), **self._always, **fields}).encode() + b"\n")


def save(folder: Path, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Writes the checkpoint in place of the one before it, in one go."""
    unfinished = folder / f"checkpoint.{socket.gethostname()}.{os.getpid()}"
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, unfinished)
    unfinished.replace(folder / "checkpoint")


def load(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Takes over the checkpoint, if there is one, and returns its step."""
    try:
        found = torch.load(folder / "checkpoint")
    except FileNotFoundError:
        return 0
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    return int(found["step"])


def generation_name() -> str:
    """A name that exactly those have who were in this process group."""
    name: list[Any] = [uuid.uuid4().hex]
    dist.broadcast_object_list(name)
    return str(name[0])


def do_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, folder: Path) -> tuple[float, bool]:
    """Trains on one batch; the loss of the whole batch, and whether all are to stop after it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    loss = loss_of(model, step, rank, size)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    told = torch.tensor([loss.item() / size, float(rank == 0 and (folder / "stop").exists())], dtype=torch.float64)
    dist.all_reduce(told)
    return told[0].item(), bool(told[1].item())


def main(folder: Path) -> None:
    """Trains from the last checkpoint until there is a file ``stop``."""
    log = Log(folder / "log")
    log.begin(host=socket.gethostname(), pid=os.getpid(), restarts=int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model, optimizer = make_model()
    step = load(folder, model, optimizer)
    log.begin(
        host=socket.gethostname(), pid=os.getpid(), restarts=int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
        generation=generation_name(), rank=rank, size=size,
    )  # fmt: skip
    log.write(loaded=step)
    parallel = DistributedDataParallel(model)
    is_over = False
    while not is_over:
        step += 1
        began = time.time()
        time.sleep(PAUSE_S)
        loss, is_over = do_step(parallel, optimizer, step, folder)
        log.write(step=step, loss=loss, began=began)
        if rank == 0 and step % CHECKPOINT_STEPS == 0:
            save(folder, step, model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
