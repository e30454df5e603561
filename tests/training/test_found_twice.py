"""What is registered has no object in two places: a state that is put back would have two."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from unicron_elastic import Run, WrongUseError
from unicron_elastic.training.found_twice import found_twice
from unicron_elastic.training.group.sendable import NotSendableError
from unicron_elastic.training.registered import Registered

pytestmark = pytest.mark.usefixtures("no_launcher")
MODEL = nn.Linear(2, 2)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), 0.1)
ZEROS, LIST, ARRAY = torch.zeros(4), [1], np.zeros(3)

SHARED: dict[str, dict[str, Any]] = {
    "the model's weights": {"best": {"weights": MODEL.state_dict()}},
    "a tensor": {"a": {"mean": ZEROS, "var": ZEROS}},
    "two views": {"a": {"mean": ZEROS[:2], "var": ZEROS[1:]}},
    "a list": {"a": {"one": LIST, "other": [LIST]}},
    "a list, many times": {"a": {"many": [[]] * 3}},
    "a dict, of two": {"a": {"of": (values := {"x": 1})}, "b": {"of": values}},
    "a registered dict": {"a": values, "b": values},
    "an array": {"a": {"one": ARRAY, "other": ARRAY}},
    "an array and its tensor": {"a": {"one": ARRAY, "other": torch.from_numpy(ARRAY)}},
    "a tensor and its array": {"a": {"one": ZEROS, "other": ZEROS.numpy()[1:]}},
    "within a tuple": {"a": {"one": (LIST, 2), "other": LIST}},
    "itself": {"a": (own := {})},
}
own["a"] = own


@pytest.mark.parametrize("what", SHARED)
def test_two_places_of_one_object_are_named(what: str) -> None:
    said = found_twice(SHARED[what], {"model": MODEL, "optimizer": OPTIMIZER})
    assert " are one object, and a state that is put back would have two: register copies" in said
    assert all(name in said for name in SHARED[what])


def test_what_is_alike_and_not_one_is_none() -> None:
    alike = {"weights": copy.deepcopy(MODEL.state_dict()), "none": [torch.empty(0), torch.empty(0), np.empty(0), ()]}
    small = {"a": 1, "b": 1, "c": "text", "d": "text", "e": None, "of": [[], [], {}, {}]}
    assert found_twice({"a": alike, "b": small}, {"model": MODEL, "optimizer": OPTIMIZER}) == ""


def test_a_run_refuses_it_at_once() -> None:
    with pytest.raises(WrongUseError, match=r"^a tensor of model and best\['weights'\]\['weight'\] are one object"):
        Run(model=MODEL, best={"weights": MODEL.state_dict()})


def test_what_becomes_one_later_is_not_kept_and_that_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log: dict[str, Any] = {"now": {"steps": 0}, "epochs": []}
    run = Run(model=MODEL, log=log)
    run.save(tmp_path, 1)
    log["epochs"].append(log["now"])
    run.save(tmp_path, 2)
    run.snapshot(2)
    said = "no state is kept as long as it is so: log['epochs'][0] and log['now'] are one object"
    assert capsys.readouterr().err.count(said) == 1
    with pytest.raises(NotSendableError, match="are one object"):
        Registered({"log": log}).state()
    log["now"] = {"steps": 0}
    run.save(tmp_path, 3)
    run.wait_saved()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-1", "step-3"]
