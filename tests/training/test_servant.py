"""A state is given as it is where the script has not changed it for a while."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from unicron_elastic.state.pull.server import Unsendable
from unicron_elastic.training.group.arrival import Arrival
from unicron_elastic.training.group.handover import NotTakenError
from unicron_elastic.training.group.sendable import NotSendableError
from unicron_elastic.training.group.servant import Servant
from unicron_elastic.training.snapshot.gate import StateGate
from unicron_elastic.training.step.trainable import Trainable
from unicron_elastic.worker.instructions import Invitation


class Slow(nn.Module):
    """A layer whose forward pass lets others look at it when it has begun, and waits until they have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.begun, self.may_end = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        self.begun.set()
        self.may_end.wait(20.0)
        return x * self.weight


def _inner_weights(layer: Slow) -> None:
    functional_call(layer, {"weight": torch.zeros(4)}, (torch.ones(4),))


def _own_weights(layer: Slow) -> None:
    functional_call(layer, {"weight": layer.weight}, (torch.ones(4),))


def _each_samples_gradient(layer: Slow) -> None:
    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(layer, weights, (x,)).sum()

    vmap(grad(loss), in_dims=(None, 0))({"weight": layer.weight.detach()}, torch.ones(2, 4))


@pytest.fixture
def layer() -> Iterator[Slow]:
    made = Slow()
    yield made
    made.may_end.set()


def _held(layer: Slow, held: list[Any], patience_s: float) -> threading.Thread:
    gate = StateGate()
    gate.open(3)
    giver = Servant(layer, gate, lambda: (9, 3), Trainable(layer).is_as_seen, patience_s=patience_s)
    return threading.Thread(target=lambda: held.append(giver.hold()))


@pytest.mark.parametrize("way", [_inner_weights, _own_weights, _each_samples_gradient])
def test_a_state_is_not_read_within_a_functional_call(layer: Slow, way: Any) -> None:
    held = list[Any]()
    asks = _held(layer, held, patience_s=20.0)
    script = threading.Thread(target=way, args=(layer,))
    script.start()
    assert layer.begun.wait(20.0)
    asks.start()
    if way is not _own_weights:  # with its own weights it is what it was
        asks.join(0.1)
        assert not held
    layer.may_end.set()
    asks.join(20.0)
    script.join(20.0)
    (found,) = held
    assert found.step == 3
    assert [each.tolist() for each in found.tensors] == [[1.0] * 4]


def test_parameters_that_are_others_for_good_are_given_in_the_end(layer: Slow) -> None:
    held = list[Any]()
    asks = _held(layer, held, patience_s=0.05)
    layer.weight = nn.Parameter(torch.full((4,), 2.0))
    asks.start()
    asks.join(20.0)
    assert [each.tolist() for each in held[0].tensors] == [[2.0] * 4]


class Odd:
    """A state that can be sent when it is asked for again, as of a module that had others' tensors for a while."""

    def __init__(self) -> None:
        self.asked = 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        if self.asked == 1:
            raise NotSendableError("a tensor without storage")
        return {"step": 7}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Is not asked to."""


@pytest.mark.parametrize("is_whole_again", [True, False])
def test_what_cannot_be_sent_for_a_while_is_asked_for_again(is_whole_again: bool) -> None:
    gate, odd = StateGate(), Odd()
    gate.open(3)
    looks = iter([True, not is_whole_again])  # before, and when it was asked for
    giver = Servant(odd, gate, lambda: (9, 3), lambda: next(looks, True))
    if is_whole_again:
        giver.hold()
        assert odd.asked == 2
    else:
        with pytest.raises(Unsendable):
            giver.hold()
    assert gate.holds == is_whole_again


class Asked:
    """A membership in which others train, as an agent tells it."""

    def enter(self) -> Invitation:
        return Invitation(sources=({"name": "n0"},), key="00")


class Copied:
    """A handover that has taken a state over."""

    taken_until, taken_step = 9, 3


@pytest.mark.parametrize(
    ("fetched", "left", "why"),
    [
        (["first", "second", "third", "fourth"], ["fourth"], "first"),
        (["first", "a state", "third"], ["third"], ""),
        (["first", None, "third"], ["third"], "first"),  # whoever had it is gone
        ([None, "second"], ["second"], ""),
    ],
)
def test_a_state_that_does_not_fit_is_copied_anew_before_that_is_believed(
    fetched: list[Any], left: list[Any], why: str
) -> None:
    def fetch(*_: object) -> Any:
        if (now := fetched.pop(0)) in ("first", "second", "third", "fourth"):
            raise NotTakenError(now)
        return now

    membership: Any = Asked()
    handover: Any = Copied()
    arrival = Arrival(membership, handover, fetch)
    arrival.ask(is_again=False)
    if why:
        with pytest.raises(NotTakenError, match=why):
            arrival.copy()
    else:
        arrival.copy()
    assert fetched == left
