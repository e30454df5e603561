"""Models in channels_last, whose fused optimizers go through memory as it lies; and what a run restores of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unicron_elastic import Run
from unicron_elastic.state.exact import check_same

pytestmark = pytest.mark.usefixtures("no_launcher")


class Images:
    """A convolutional model in channels_last."""

    def __init__(self, *, reproducible: bool = False) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 17, 3), nn.BatchNorm2d(17), nn.Conv2d(17, 5, 3))
        self.model = model.to(memory_format=torch.channels_last)
        # A fused step goes through the memory of a parameter and its state side by side, as they lie there.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.run = Run(model=self.model, optimizer=self.optimizer, reproducible=reproducible)

    def loss(self, step: int, index: int) -> torch.Tensor:
        x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(10 * step + index))
        return self.model(x.contiguous(memory_format=torch.channels_last)).square().mean()

    def train(self, total: int) -> dict[str, Any]:
        for step in self.run.steps(total, 2):
            for index in step:
                step.backward(self.loss(step.number, index))
            self.optimizer.step()
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


@pytest.mark.parametrize("reproducible", [False, True])
def test_a_fused_step_finds_gradients_that_lie_in_memory_as_their_parameters(reproducible: bool) -> None:
    ours, plain = Images(reproducible=reproducible), Images()
    ours.train(3)
    for step in range(3):
        plain.optimizer.zero_grad()
        for index in range(2):
            (plain.loss(step, index) / 2).backward()
        plain.optimizer.step()
    for mine, theirs in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_the_state_of_a_channels_last_model_lies_in_memory_as_its_parameters(tmp_path: Path) -> None:
    one, other = Images(), Images()
    one.train(3)
    one.run.save(tmp_path, 3)
    one.run.wait_saved()
    assert other.run.restore(tmp_path) == 3
    check_same(other.train(6), one.train(6), "")


def test_a_state_of_another_type_is_refused_by_name(tmp_path: Path) -> None:
    run = Run(model=nn.Linear(2, 2))
    run.save(tmp_path, 1)
    run.wait_saved()
    with pytest.raises(ValueError, match=r"^model\.weight was received as float32 and is bfloat16 after load_state"):
        Run(model=nn.Linear(2, 2).bfloat16()).restore(tmp_path)
