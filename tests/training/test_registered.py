"""What is registered takes over the state of another process, whatever its tensors were made for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from unicron_elastic.training.registered import Registered


def test_an_average_that_was_made_for_inference_takes_a_state_over() -> None:
    given = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with torch.inference_mode():
        average = copy.deepcopy(given)
        for parameter in average.parameters():
            parameter.zero_()
    state = Registered({"ema": given}).state()
    Registered({"ema": average}).load(state, {})
    assert all(each.is_inference() for each in average.parameters())
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(average.parameters(), given.parameters(), strict=True))


class Shadow:
    """An average of a script's own, that copies into its tensors."""

    def __init__(self) -> None:
        with torch.inference_mode():
            self.shadow = [torch.zeros(2)]

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for mine, theirs in zip(self.shadow, state["shadow"], strict=True):
            mine.copy_(theirs)


def test_so_does_one_of_the_script_s_own() -> None:
    average = Shadow()
    Registered({"ema": average}).load({"ema": {"shadow": [torch.ones(2)]}}, {})
    assert average.shadow[0].tolist() == [1.0, 1.0]


def test_what_does_not_fit_is_named() -> None:
    of_two = Registered({"teacher": nn.Linear(2, 2), "student": nn.Linear(2, 2)})
    state = of_two.state()
    with pytest.raises(RuntimeError, match=r"^student: (?s:.*)size mismatch for weight"):
        Registered({"teacher": nn.Linear(2, 2), "student": nn.Linear(2, 3)}).load(state, {})


class Sampler(dict[str, Any]):
    """A dict of a script's own, whose state is another than what is in it."""

    def __init__(self) -> None:
        super().__init__(seen=0, cache=object())

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self["seen"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self["seen"] = state["seen"] + 1


def test_a_dict_of_a_class_of_its_own_keeps_its_state_dict() -> None:
    sampler = Sampler()
    registered = Registered({"sampler": sampler})
    assert registered.state() == {"sampler": {"seen": 0}}
    cache = sampler["cache"]
    registered.load({"sampler": {"seen": 4}}, {})
    assert sampler == {"seen": 5, "cache": cache}


class HalfSampler(dict[str, Any]):
    """One that can give a state and load none."""

    def state_dict(self) -> dict[str, Any]:
        return {}


def test_a_dict_that_has_half_of_what_a_state_needs_is_refused() -> None:
    with pytest.raises(TypeError, match="best must have state_dict and load_state_dict, and a HalfSampler has not"):
        Registered({"best": HalfSampler()})


def test_a_dict_is_registered_as_it_is_and_changed_in_place() -> None:
    best = {"accuracy": 0.1, "epochs_without": 2}
    state = Registered({"best": best}).state()
    assert state == {"best": {"accuracy": 0.1, "epochs_without": 2}}
    best["accuracy"] = 0.7
    assert state["best"]["accuracy"] == 0.1
    other: dict[str, Any] = {"of_before": 1}
    Registered({"best": other}).load(state, {})
    assert other == {"accuracy": 0.1, "epochs_without": 2}
