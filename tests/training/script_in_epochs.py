"""A script that trains over the epochs of a DataLoader, for tests of where it goes on, and the data that it reads."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from unicron_elastic.training.run import Run

SAMPLES, BATCH = 24, 4
EPOCH = SAMPLES // BATCH


class Noisy(Dataset[Tensor]):
    """`Noisy` are numbers that are changed as they are read."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> Tensor:
        return torch.tensor([number + 0.5 * random.random(), torch.rand(()) + float(np.random.rand())])


class Stream(IterableDataset[Tensor]):
    """`Stream` is the same for who can only iterate."""

    def __iter__(self) -> Iterator[Tensor]:
        return (Noisy()[number] for number in range(SAMPLES))


class Still(Dataset[Tensor]):
    """`Still` draws nothing, as what kept workers draw is not kept."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> Tensor:
        return torch.tensor([float(number), 1.0])


class Script:
    """`Script` trains over epochs of a loader, as a process of its own would, and notes what it trains on."""

    def __init__(
        self, loader: Callable[[], DataLoader[Tensor]], *, snapshot_behind: bool = False, accumulates: int = 1
    ) -> None:
        self._loader_of = loader
        self._is_behind = snapshot_behind
        self._accumulates = accumulates
        self.kept: dict[int, Any] = {}

    def train(self, start: int, until: int, *, skips: bool = True, from_beginning: bool = False) -> list[list[float]]:
        """Trains from a state that was kept, or from the beginning, to a step; skips its epoch's or all before it."""
        model, optimizer, run, loader = self._begun(start)
        seen = []
        first = 0 if from_beginning else start - start % EPOCH if skips else start
        for step, batch in self._numbered(loader, first):
            if step == until:
                break
            if skips and step < start:
                continue
            if not self._is_behind:
                self._keep(run, step)
            seen.append([*batch.flatten().tolist(), torch.rand(()).item(), random.random()])
            model(batch).sum().backward()
            if (step + 1) % self._accumulates == 0:
                optimizer.step()
                optimizer.zero_grad()
                if self._is_behind:
                    self._keep(run, step + 1)
        vars(run).clear()  # its process would end: nothing of it watches the loaders of the next one
        return seen

    def _begun(self, start: int) -> tuple[nn.Linear, torch.optim.SGD, Run, DataLoader[Tensor]]:
        """Return what the script trains with and on, as it is when a state is taken over, or in the beginning."""
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.0001)
        run = Run(model=model, optimizer=optimizer)
        loader = self._loader_of()
        if start:
            run.load_state_dict(self.kept[start])
        return model, optimizer, run, loader

    def _keep(self, run: Run, step: int) -> None:
        run.snapshot(step)
        if step not in self.kept:
            self.kept[step] = run.state_dict()

    @staticmethod
    def _numbered(loader: DataLoader[Tensor], step: int) -> Iterator[tuple[int, Tensor]]:
        while True:
            for batch in loader:
                yield step, batch
                step += 1


def shuffled(**more: Any) -> DataLoader[Tensor]:
    return DataLoader(Noisy(), BATCH, shuffle=True, **more)


def numbers(seen: list[list[float]]) -> list[list[int]]:
    """Of the samples, which are changed by less than one."""
    return [[int(each) for each in batch[: 2 * BATCH : 2]] for batch in seen]
