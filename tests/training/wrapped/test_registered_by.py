from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from unicron_elastic import Run
from unicron_elastic.training.wrapped.registered_by import OF_LOOP, registered_by


def accelerator(**parts: Any) -> Any:
    names = ("_models", "_optimizers", "_schedulers", "_custom_objects")
    return SimpleNamespace(**{"scaler": None, "step": 0, **{name: [] for name in names}, **parts})


def test_what_was_prepared_is_registered_without_its_wrappers() -> None:
    model, other, inner = nn.Linear(1, 1), nn.Linear(1, 1), object()
    found = registered_by(
        accelerator(
            options_of_run=dict,  # an accelerator in place, each of which counts its own batches
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


def test_where_the_next_step_of_accelerates_own_is_goes_on() -> None:
    model = nn.Linear(1, 1)
    kept = Run.of(accelerator(_models=[model], step=4)).state_dict()
    other = accelerator(_models=[model])
    Run.of(other).load_state_dict(kept)
    assert other.step == 4


def test_a_state_of_before_and_one_for_a_loop_in_place_can_be_read() -> None:
    model, of_before = nn.Linear(1, 1), accelerator(_models=[nn.Linear(1, 1)], step=4)
    kept = Run.of(of_before).state_dict()
    Run(model=model).load_state_dict(kept)
    assert model.weight.equal(of_before._models[0].weight)
    (name,) = OF_LOOP
    del kept["state"][name]
    other = accelerator(_models=[model], step=2)
    Run.of(other).load_state_dict(kept)
    assert other.step == 2


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
