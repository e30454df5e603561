"""What a script may do to the gradients inside of a step is noticed, before an optimizer makes anything of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from unicron_elastic import Run
from unicron_elastic.engine.protocol.replica_phase import Computing
from unicron_elastic.training.optimizer_step import Step

MICRO_BATCHES = 4

both = pytest.mark.parametrize("reproducible", [False, True])


pytestmark = pytest.mark.usefixtures("no_launcher")


class Broken(torch.autograd.Function):
    """Passes its input on; the gradient of it cannot be computed."""

    @staticmethod
    def forward(_ctx: object, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(_ctx: object, _grad: Tensor) -> Tensor:  # type: ignore[override]
        raise OSError("out of paper")


class Training:
    """Two layers, of which the backward pass reaches the last one first."""

    def __init__(self, *, reproducible: bool = False, scaler: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu") if scaler else None
        self.run = Run(model=self.model, optimizer=self.optimizer, scaler=self.scaler, reproducible=reproducible)

    def step(self) -> Step:
        return next(self.run.steps(1, MICRO_BATCHES))

    def loss(self, index: int, through: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(index))
        loss: Tensor = self.model[1](through(self.model[0](x))).square().mean()
        return loss

    def compute(
        self, step: Step, *, fails: int = -1, at: int = -1, inside: Callable[[], object] = lambda: None
    ) -> None:
        """Catches what the backward pass of micro-batch ``fails`` raises; calls ``inside`` in the round of ``at``."""
        for index in step:
            if index == at:
                inside()
            try:
                step.backward(self.loss(index, Broken.apply if index == fails else lambda x: x))
            except OSError:
                pass


@both
@pytest.mark.parametrize("fails", [1, MICRO_BATCHES - 1])
def test_a_backward_that_failed_and_was_caught_is_not_forgotten(reproducible: bool, fails: int) -> None:
    training = Training(reproducible=reproducible)
    with pytest.raises(RuntimeError, match=f"backward pass of micro-batch {fails} failed and its exception was caught"):
        training.compute(training.step(), fails=fails)


@both
def test_a_backward_that_failed_is_not_tried_again(reproducible: bool) -> None:
    training = Training(reproducible=reproducible)
    step = training.step()
    index = next(iter(step))
    with pytest.raises(OSError, match="paper"):
        step.backward(training.loss(index, Broken.apply))
    with pytest.raises(RuntimeError, match="backward pass of micro-batch 0 failed"):
        step.backward(training.loss(index))


@both
def test_a_step_is_iterated_over_once(reproducible: bool) -> None:
    training = Training(reproducible=reproducible)
    step = training.step()
    training.compute(step)
    with pytest.raises(RuntimeError, match="once"):
        training.compute(step)


def _zero(training: Training) -> None:
    training.optimizer.zero_grad(set_to_none=False)


def _backward(training: Training) -> None:
    training.loss(7).backward()


def _clip(training: Training) -> None:
    nn.utils.clip_grad_norm_(training.model.parameters(), 0.01)


def _unscale(training: Training) -> None:
    assert training.scaler is not None
    training.scaler.unscale_(training.optimizer)


def _step(training: Training) -> None:
    training.optimizer.step()


@pytest.mark.parametrize(
    ("reproducible", "inside"),
    [(False, _zero), (False, _backward), (False, _clip), (False, _unscale), (False, _step), (True, _backward)],
)
@pytest.mark.parametrize("index", [0, 1, MICRO_BATCHES - 1])
def test_whoever_changes_gradients_between_micro_batches_is_told(
    reproducible: bool, inside: Callable[[Training], None], index: int
) -> None:
    training = Training(reproducible=reproducible, scaler=inside is _unscale)
    with pytest.raises(RuntimeError, match="for index in step"):
        training.compute(training.step(), at=index, inside=lambda: inside(training))


@both
def test_what_was_dealt_and_not_computed_is_named(reproducible: bool) -> None:
    training = Training(reproducible=reproducible)

    def lose_one() -> None:
        for index in (step := training.step()):
            step.backward(training.loss(index))
            driver = training.run._engine._driver
            if driver.replica.record == Computing(frozenset()):
                driver.replica = driver.replica._replace(record=Computing(frozenset({2})))

    with pytest.raises(RuntimeError, match=r"not what it was dealt: they differ in micro-batch 2"):
        lose_one()
