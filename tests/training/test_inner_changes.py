"""Who changes what is registered within the loop over micro-batches is told so, before a rank is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from unicron_elastic import Run

pytestmark = pytest.mark.usefixtures("no_launcher")
SAID = "is registered, and the script changes it within 'for index in step'"


def train(change: Callable[[dict[str, Any], Any], object], *, is_within: bool, steps: int = 4) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    seen: dict[str, Any] = {"samples": 0, "sum": torch.zeros(2), "by": {"class": [0, 0]}}
    run = Run(model=model, optimizer=optimizer, scheduler=scheduler, seen=seen)
    for step in run.steps(steps, 2):
        for _ in step:
            if is_within:
                change(seen, scheduler)
            step.backward(model(torch.ones(3, 2)).sum())
        optimizer.step()
        if not is_within:
            change(seen, scheduler)


def count(seen: dict[str, Any], _: Any) -> None:
    seen["samples"] += 3


def add(seen: dict[str, Any], _: Any) -> None:
    seen["sum"] += 1


def nested(seen: dict[str, Any], _: Any) -> None:
    seen["by"]["class"][1] += 1


def schedule(_: dict[str, Any], scheduler: Any) -> None:
    scheduler.step()


class Momentum(nn.Module):
    """`Momentum` moves an average of its layer towards it in each forward pass, as MoCo's does, by ``how``."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.average = nn.Linear(2, 1), nn.Linear(2, 1).requires_grad_(requires_grad=False)
        self._how = how

    def move(self) -> None:
        for own, average in zip(self.layer.parameters(), self.average.parameters(), strict=True):
            if self._how == "data":
                average.data = average.data * 0.9 + own.data * 0.1
            elif self._how == "in place":
                with torch.no_grad():
                    average.mul_(0.9).add_(own, alpha=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) - self.average(x)


@pytest.mark.parametrize(
    ("how", "is_within", "told"),
    [("data", True, 1), ("in place", True, 1), ("not at all", True, 0), ("data", False, 0), ("in place", False, 0)],
)
def test_parameters_that_a_forward_pass_changes_are_told_of(
    how: str, is_within: bool, told: int, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Momentum(how)
    optimizer = torch.optim.SGD(model.layer.parameters(), 0.1)
    for step in Run(model=model, optimizer=optimizer).steps(4, 2):
        for _ in step:
            if is_within:
                model.move()
            step.backward(model(torch.ones(3, 2)).sum())
        optimizer.step()
        if not is_within:
            model.move()
    assert capsys.readouterr().err.count(f"unicron: model (its parameters) {SAID}") == told


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(
    ("change", "name"), [(count, "seen"), (add, "seen"), (nested, "seen"), (schedule, "scheduler")]
)
def test_it_is_told_once(change: Any, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    train(change, is_within=True)
    said = capsys.readouterr().err
    assert said.count(SAID) == 1
    assert f"unicron: {name} is registered" in said


@pytest.mark.parametrize("change", [count, add, nested, schedule])
def test_between_two_steps_it_may_change(change: Any, capsys: pytest.CaptureFixture[str]) -> None:
    train(change, is_within=False)
    assert SAID not in capsys.readouterr().err


def test_what_cannot_be_looked_at_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    def spoil(seen: dict[str, Any], _: Any) -> None:
        seen["samples"] = object()

    train(spoil, is_within=True)
    assert SAID not in capsys.readouterr().err
