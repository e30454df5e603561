"""What is registered takes over the state of another process, whatever its tensors were made for."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from unicron_elastic.training.registered import Registered, to_tell


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


class Cyclic:
    """`Cyclic` takes apart what it loads, and goes on with its tensors, as CyclicLR and averages of scripts do."""

    def __init__(self) -> None:
        self.value = torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "others": {"name": "linear"}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["others"].pop("name") == "linear"
        self.value = state.pop("value")


def test_what_is_given_to_an_object_may_be_changed_and_is_given_once_more() -> None:
    cyclic = Cyclic()
    state = {"cyclic": {"value": torch.ones(2), "others": {"name": "linear"}}}
    registered = Registered({"cyclic": cyclic})
    for _ in range(2):
        registered.load(state, {})
        assert cyclic.value.tolist() == [1.0, 1.0]
        cyclic.value.mul_(3.0)


def test_the_state_of_a_cyclic_scheduler_is_loaded_as_often_as_it_takes() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    scheduler = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.1, 0.5)
    registered = Registered({"scheduler": scheduler})
    state = registered.state()
    registered.load(state, {})
    registered.load(state, {})


def test_what_is_in_a_dict_is_changed_in_place_too_as_the_script_may_know_it_by_another_name() -> None:
    temperature, history, counts = torch.zeros(1, requires_grad=True), [1], np.zeros(2)
    values = {"temperature": temperature, "of": {"history": history, "counts": counts}, "best": 0.5}
    state = {"temperature": torch.ones(1), "of": {"history": [1, 2], "counts": np.ones(2), "more": 3}, "best": 0.25}
    Registered({"values": values}).load({"values": state}, {})
    assert values["temperature"] is temperature
    assert temperature.tolist() == [1.0]
    assert temperature.requires_grad
    assert (history, counts.tolist()) == ([1, 2], [1.0, 1.0])
    assert values["of"] == {"history": history, "counts": counts, "more": 3}
    assert values["best"] == 0.25


def test_what_has_another_form_takes_the_place() -> None:
    values: dict[str, Any] = {"sum": torch.zeros(1), "list": [torch.zeros(1), 2], "gone": 1}
    Registered({"values": values}).load({"values": {"sum": torch.ones(2), "list": [torch.ones(1)]}}, {})
    assert values["sum"].tolist() == [1.0, 1.0]
    assert values["list"] == [torch.ones(1)]
    assert "gone" not in values


def test_a_parameter_is_changed_in_place_by_the_tensor_that_it_travels_as() -> None:
    temperature = nn.Parameter(torch.zeros(1))
    values: dict[str, Any] = {"temperature": temperature}
    Registered({"values": values}).load({"values": {"temperature": torch.ones(1)}}, {})
    assert values["temperature"] is temperature
    assert temperature.tolist() == [1.0]


def test_a_tensor_that_cannot_be_written_to_is_replaced() -> None:
    values: dict[str, Any] = {"wide": torch.zeros(1).expand(3)}
    Registered({"values": values}).load({"values": {"wide": torch.ones(3)}}, {})
    assert values["wide"].tolist() == [1.0, 1.0, 1.0]


def test_a_dict_of_what_has_a_state_of_its_own_is_refused_at_once() -> None:
    net = nn.Linear(2, 2)
    optimizers = {"first": torch.optim.SGD(net.parameters(), lr=0.1)}
    with pytest.raises(TypeError, match=r"optimizers\['first'\] is a SGD, .* as Run\(\.\.\., first=\.\.\.\)"):
        Registered({"net": net, "optimizers": optimizers})


def test_people_are_not_told_of_what_follows_the_first_rank() -> None:
    objects = {"lightning": SimpleNamespace(follows_first=True), "ema": SimpleNamespace()}
    assert to_tell(["lightning", "ema"], objects) == ["ema"]
