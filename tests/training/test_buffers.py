"""Buffers of a model in a run: what is saved of them, and what they are after a step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from unicron_elastic import Run

MICRO_BATCHES = 2


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def batch(step: int, index: int) -> torch.Tensor:
    """(4, 3), of step and index alone."""
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + index))


class Training:
    """A small model with batch norm that a run trains."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.run = Run(model=self.model, optimizer=self.optimizer)

    def train(self, total: int, folder: Path | None = None) -> None:
        """Saves after each step."""
        for step in self.run.steps(total, MICRO_BATCHES):
            for index in step:
                step.backward(self.model(batch(step.number, index)).square().mean())
            self.optimizer.step()
            if folder is not None:
                self.run.save(folder, step.number + 1)
        self.run.wait_saved()


def test_batch_norm_is_saved_as_it_is_after_the_step(tmp_path: Path) -> None:
    one, other = Training(), Training()
    one.train(3, tmp_path)
    assert other.run.restore(tmp_path) == 3
    for (name, mine), theirs in zip(one.model.state_dict().items(), other.model.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name
    assert int(other.model[1].num_batches_tracked) == 3 * MICRO_BATCHES
    one.train(5)
    other.train(5)
    for (name, mine), theirs in zip(one.model.state_dict().items(), other.model.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name


def test_what_is_given_within_a_step_is_what_it_began_with() -> None:
    training = Training()
    training.train(1)
    before = {name: value.clone() for name, value in training.model.state_dict().items()}
    for step in training.run.steps(2, MICRO_BATCHES):
        for index in step:
            step.backward(training.model(batch(step.number, index)).square().mean())
            given = training.run.state_dict()["state"]["model"]
            for name, value in before.items():
                assert torch.equal(given[name], value), name
        training.optimizer.step()


def test_what_the_script_does_after_the_last_step_counts() -> None:
    training = Training()
    training.train(1)
    training.model[1].running_mean.fill_(7.0)
    assert training.run.state_dict()["state"]["model"]["1.running_mean"].tolist() == [7.0] * 3
