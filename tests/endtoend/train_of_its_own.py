"""Trains in DistributedDataParallel as a script does that draws from everything, and kills itself at chosen points.

    train_of_its_own.py REPLICATED STEPS EVERY RANK:POINT:STEP ...

REPLICATED is of the run, "yes" or "default". The strikes come in their order, one in each generation of the workers.
POINT is an edge of a step: ``top``, before the step's snapshot, ``forward``, ``backward``, ``optimizer``, ``behind``,
when the optimizer is through, and ``copy``, within the copy of the snapshot. What each rank computes is told bit by
bit. A rank that dies where the other can come to its next snapshot waits for that one.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import unicron_elastic
from unicron_elastic.state.snapshot import file as snapshot_file

FOLDER = Path(os.environ["PROBE"])
DEADLINE_S = 30.0
BATCH = 4
RESTARTS = int(os.environ["TORCHELASTIC_RESTART_COUNT"])


class Strike:
    """`Strike` is what this rank does in this generation, if anything."""

    def __init__(self, strikes: list[str], rank: int) -> None:
        struck, self.point, step = (strikes[RESTARTS : RESTARTS + 1] or ["-1:none:-1"])[0].split(":")
        self.step, self.is_mine, self.is_other = int(step), int(struck) == rank, int(struck) not in (-1, rank)

    def at(self, point: str, step: int) -> None:
        """Dies here, if it is to; where the other rank can make a snapshot meanwhile, when it has."""
        if self.is_mine and (point, step) == (self.point, self.step):
            if point in ("top", "optimizer", "behind"):
                self._await_other()
            os.kill(os.getpid(), signal.SIGKILL)

    def in_copy(self, run: unicron_elastic.Run, step: int) -> None:
        """Has the thread that copies die within the snapshot of this step."""
        if self.is_mine and (self.point, self.step) == ("copy", step):
            run._snapshots.wait()
            move = snapshot_file._move

            def dying(*arguments: Any) -> None:
                move(*arguments)
                self._await_other()
                os.kill(os.getpid(), signal.SIGKILL)

            snapshot_file._move = dying

    def kept(self, run: unicron_elastic.Run, step: int) -> None:
        """Tells the rank that dies that this one has its snapshot of a step."""
        if self.is_other and step >= self.step:
            run._snapshots.wait()
            self._mark.touch()

    @property
    def _mark(self) -> Path:
        return FOLDER / f"kept-{RESTARTS}"

    def _await_other(self) -> None:
        until = time.monotonic() + DEADLINE_S
        while not self._mark.exists():
            assert time.monotonic() < until, "the other rank has made no snapshot"
            time.sleep(0.005)


class Samples(Dataset[Tensor]):
    """`Samples` are changed by numbers of all generators that a script has, each time that one is read."""

    def __len__(self) -> int:
        return 6 * BATCH

    def __getitem__(self, number: int) -> Tensor:
        changed = torch.full((8,), float(number)) + torch.randn(8) + random.gauss(0, 1) + random.random()
        return changed * torch.from_numpy(np.random.rand(8)).float() + float(np.random.randn())


def main() -> None:
    """Trains."""
    replicated, steps, every, *strikes = sys.argv[1:]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    strike = Strike(strikes, rank)
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1))
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    run = unicron_elastic.Run(model=wrapped, optimizer=optimizer, replicated=True if replicated == "yes" else None)
    done = run.restore()
    loader = DataLoader(Samples(), BATCH, shuffle=True)
    epochs = itertools.chain.from_iterable(itertools.repeat(loader))
    for step, drawn in zip(range(done // len(loader) * len(loader), int(steps)), epochs, strict=False):
        if step < done:
            continue
        strike.at("top", step)
        strike.in_copy(run, step)
        if run.snapshot(step, every=int(every)):
            strike.kept(run, step)
        changed = drawn + torch.randn(()) + random.random() + float(np.random.rand())
        strike.at("forward", step)
        loss = wrapped(changed).pow(2).mean()
        statistics = model[1].running_var.sum()
        optimizer.zero_grad()
        loss.backward()
        strike.at("backward", step)
        model.eval()
        with torch.no_grad():
            held_out = F.mse_loss(model(torch.ones(2, 8)), torch.ones(2, 1))
        model.train()
        strike.at("optimizer", step)
        optimizer.step()
        strike.at("behind", step)
        made = " ".join(each.item().hex() for each in (loss, statistics, held_out))
        os.write(1, f"STEP {step} rank {rank} made {made}\n".encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
