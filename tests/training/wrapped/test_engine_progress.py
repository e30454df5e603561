"""An engine that stands for DeepSpeed's, which is not there: what a run takes of it, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from unicron_elastic import Run, WrongUseError
from unicron_elastic.training.wrapped.engine_progress import EngineProgress
from unicron_elastic.training.wrapped.registered_by import registered_by


class DeepSpeedEngine(nn.Module):
    """`DeepSpeedEngine` is called as theirs."""

    def __init__(self, stage: int = 1, accumulated: int = 2) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        masters = [nn.Parameter(each.detach().float().clone()) for each in self.module.parameters()]
        self.basic_optimizer = torch.optim.SGD(masters, lr=0.1, momentum=0.9)
        self.optimizer = SimpleNamespace(
            loss_scaler=SimpleNamespace(cur_scale=256.0, cur_iter=0, dynamic=True, dtype=torch.half)
        )
        self.lr_scheduler: Any = None
        self.global_steps = self.global_samples = self.micro_steps = self.skipped_steps = 0
        self._stage, self._accumulated = stage, accumulated

    def zero_optimization_stage(self) -> int:
        return self._stage

    def gradient_accumulation_steps(self) -> int:
        return self._accumulated


class PipelineEngine(DeepSpeedEngine):
    """`PipelineEngine` is called as theirs."""


def accelerator_with(*models: Any) -> Any:
    return SimpleNamespace(_models=[*models], _custom_objects=["registered"])


def test_an_engine_goes_on_with_masters_counts_and_scale() -> None:
    before, after = DeepSpeedEngine(), DeepSpeedEngine()
    before.basic_optimizer.param_groups[0]["params"][0].data.fill_(7)
    before.global_steps, before.micro_steps, before.optimizer.loss_scaler.cur_scale = 3, 6, 64.0
    Run.of(after).load_state_dict(Run.of(before).state_dict())
    assert torch.equal(after.module.weight, before.module.weight)
    assert after.basic_optimizer.param_groups[0]["params"][0].eq(7).all()
    assert (after.global_steps, after.micro_steps) == (3, 6)
    assert vars(after.optimizer.loss_scaler) == vars(before.optimizer.loss_scaler)


def test_between_two_steps_nothing_is_kept() -> None:
    engine = DeepSpeedEngine()
    assert not EngineProgress(engine).is_between_steps
    engine.micro_steps = 3
    assert EngineProgress(engine).is_between_steps
    gradients = Run.of(engine)._gradients
    assert gradients.are_elsewhere
    assert gradients.are_there()
    assert gradients.has_new()
    assert not gradients.can_be_kept()
    engine.micro_steps = 4
    assert gradients.can_be_kept()


def test_the_engine_of_an_accelerator_is_taken_with_what_is_registered() -> None:
    engine = DeepSpeedEngine()
    engine.lr_scheduler = "scheduler"
    found = registered_by(accelerator_with(engine))
    assert {"model", "optimizer", "engine", "scheduler", "registered_0"} == set(found)
    assert found["optimizer"] is engine.basic_optimizer


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (DeepSpeedEngine(stage=3), "ZeRO 3 divides the parameters"),
        (PipelineEngine(), "with pipeline parallelism"),
    ],
)
def test_what_is_divided_otherwise_is_refused(engine: Any, words: str) -> None:
    with pytest.raises(WrongUseError, match=words):
        Run.of(engine)


def test_experts_are_refused() -> None:
    engine = DeepSpeedEngine()
    engine.has_moe_layers = True
    with pytest.raises(WrongUseError, match="with experts"):
        Run.of(engine)


def test_a_version_without_its_parts_is_refused() -> None:
    engine = DeepSpeedEngine()
    del engine.basic_optimizer
    with pytest.raises(WrongUseError, match="has no basic_optimizer here"):
        Run.of(engine)


def test_an_engine_without_an_optimizer_is_refused() -> None:
    engine = DeepSpeedEngine()
    engine.basic_optimizer = None
    with pytest.raises(TypeError, match="without an optimizer"):
        Run.of(engine)


def test_parts_of_an_optimizer_are_not_said_to_be_the_same() -> None:
    with pytest.raises(WrongUseError, match="with ZeRO 1 each rank has a part"):
        Run.of(DeepSpeedEngine(), replicated=True)
    assert Run.of(DeepSpeedEngine(stage=0), replicated=True)


def test_an_engine_has_no_steps() -> None:
    with pytest.raises(TypeError, match=r"must not be in DeepSpeed's engine for run.steps\(\)"):
        next(Run.of(DeepSpeedEngine()).steps(1, 1))


class DeepSpeedZeroOptimizer:
    """`DeepSpeedZeroOptimizer` is called as theirs."""

    __module__ = "deepspeed.runtime.zero"
    state_dict = dict

    def load_state_dict(self, state_dict_list: list[dict[str, Any]]) -> None:
        """Take what all ranks have."""


def test_who_registers_its_optimizer_is_told_how() -> None:
    with pytest.raises(WrongUseError, match=r"loads the states of all ranks at once: use Run.of\(engine\)"):
        Run(model=nn.Linear(1, 1), optimizer=DeepSpeedZeroOptimizer())
