from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from unicron_elastic import Run
from unicron_elastic.training.wrapped.registered_by import registered_by


def accelerator(**lists: Any) -> Any:
    names = ("_models", "_optimizers", "_schedulers", "_custom_objects")
    return SimpleNamespace(**{name: lists.get(name, []) for name in names}, scaler=lists.get("scaler"))


def test_what_was_prepared_is_registered_without_its_wrappers() -> None:
    model, other, inner = nn.Linear(1, 1), nn.Linear(1, 1), object()
    found = registered_by(
        accelerator(
            _models=[model],
            _optimizers=[SimpleNamespace(optimizer=inner), other],
            _schedulers=[SimpleNamespace(scheduler=other)],
            _custom_objects=[inner],
            scaler=inner,
        )
    )
    assert found == {
        "model": model,
        "optimizer": inner,
        "optimizer_1": other,
        "scheduler": other,
        "scaler": inner,
        "registered_0": inner,
    }


def test_several_models_are_one() -> None:
    models = [nn.Linear(1, 1), nn.Linear(2, 2)]
    assert list(registered_by(accelerator(_models=models))["model"]) == models


def test_what_is_no_accelerator_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"Run.of\(\) takes an accelerate.Accelerator or DeepSpeed's engine, and not a Linear"
    ):
        Run.of(nn.Linear(1, 1))
    with pytest.raises(TypeError, match=r"call accelerator.prepare\(model\) before"):
        Run.of(accelerator())
