"""Who steps over the model with an optimizer that is not registered is told that no snapshot has its state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.optim import SGD, Optimizer

from unicron_elastic.training.run import Run

pytestmark = pytest.mark.usefixtures("no_launcher")
SAID = "SGD, an optimizer that is not registered, has stepped over parameters of what is: no snapshot has its state"


class Wrapper:
    """`Wrapper` is one of the script's own, with torch's inside."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


def _stepped(model: nn.Module, of_run: dict[str, Any], optimizer: Optimizer, *, is_kept: bool = True) -> Run:
    run = Run(model=model, **of_run)
    run._unregistered.is_kept = is_kept
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return run


def test_it_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(2, 1)
    _stepped(model, {"optimizer": SGD(model.parameters(), 0.1)}, SGD(model.parameters(), 0.1))
    assert capsys.readouterr().err.count(SAID) == 1


@pytest.mark.parametrize(
    "given",
    [
        lambda optimizer: {"optimizer": optimizer},
        lambda optimizer: {"mine": Wrapper(optimizer)},
        lambda optimizer: {"mine": Wrapper(Wrapper(optimizer))},  # type: ignore[arg-type]
    ],
    ids=["registered", "wrapped", "wrapped twice"],
)
def test_of_one_whose_state_is_kept_nothing_is_said(
    given: Callable[[Optimizer], dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), 0.1)
    _stepped(model, given(optimizer), optimizer)
    assert SAID not in capsys.readouterr().err


def test_nor_of_one_of_another_model_nor_where_nothing_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    model, other, third = (nn.Linear(2, 1) for _ in range(3))
    other(torch.ones(1, 2)).sum().backward()
    _stepped(model, {}, SGD(other.parameters(), 0.1))
    _stepped(third, {}, SGD(third.parameters(), 0.1), is_kept=False)
    assert capsys.readouterr().err == ""


def test_what_a_hook_of_ddp_has_not_sent_is_told_of_once(capsys: pytest.CaptureFixture[str]) -> None:
    model: Any = nn.Linear(2, 1)
    model._comm_hooks = [(None, PowerSGDState(None, 1))]  # as DDP has it
    run = Run(model=model, optimizer=SGD(model.parameters(), 0.1))
    assert capsys.readouterr().err == ""
    for _ in range(2):
        run._unregistered.begin()
    assert capsys.readouterr().err.count("what PowerSGD has not sent yet is in no snapshot") == 1
