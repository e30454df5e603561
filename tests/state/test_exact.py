"""What was received is what is loaded, whatever ``load_state_dict`` makes of it."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unicron_elastic.state.exact import bits, check_same, load_exactly, tensors_of


class MasterWeights(torch.optim.Optimizer):
    """As those that train bf16 parameters with fp32 copies: they and a nested state are its state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        """Moves the copy, and the parameter with it."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["master"] = parameter.float().clone()
                    state["nested"] = {"moments": [torch.zeros(parameter.shape, dtype=torch.float64)]}
                    state["pair"] = (torch.zeros(3), 1)
                state["nested"]["moments"][0] += parameter.grad / 3
                state["pair"][0].add_(0.1)
                state["master"] -= group["lr"] * parameter.grad.float()
                parameter.copy_(state["master"])


class Wrapped:
    """As wrappers of optimizers are: the state is in ``.optimizer``."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """With something of its own."""
        return {"inner": self.optimizer.state_dict(), "scale": torch.tensor(3.0)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Without it."""
        self.optimizer.load_state_dict(state["inner"])


def trained(kind: Any) -> tuple[nn.Linear, Any]:
    """A bf16 layer and its optimizer after three steps."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 3).bfloat16()
    optimizer = kind(layer.parameters())
    for step in range(3):
        for parameter in layer.parameters():
            parameter.grad = torch.randn_like(parameter) * (step + 1)
        optimizer.step()
    if kind is torch.optim.AdamW:
        for state in optimizer.state.values():  # as of those that keep their moments in fp32
            state.update({name: value.float() / 3 for name, value in state.items()})
    return layer, optimizer


def same(one: Any, other: Any) -> None:
    mine, theirs = dict(tensors_of(one, "")), dict(tensors_of(other, ""))
    assert mine.keys() == theirs.keys()
    for place, tensor in mine.items():
        assert tensor.dtype == theirs[place].dtype, place
        assert torch.equal(bits(tensor), bits(theirs[place])), place


@pytest.mark.parametrize("kind", [MasterWeights, torch.optim.AdamW])
@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, Wrapped])
def test_the_state_of_bf16_parameters_stays_fp32(kind: Any, wrap: Any) -> None:
    _, giver = trained(kind)
    state = copy.deepcopy(wrap(giver).state_dict())
    taker = wrap(kind(nn.Linear(4, 3).bfloat16().parameters()))
    load_exactly(taker, state, "optimizer")
    same(taker.state_dict(), wrap(giver).state_dict())


def test_both_go_on_to_the_same_bits() -> None:
    (one, giver), other = trained(MasterWeights), nn.Linear(4, 3).bfloat16()
    other.load_state_dict(one.state_dict())
    taker = MasterWeights(other.parameters())
    load_exactly(taker, copy.deepcopy(giver.state_dict()), "optimizer")
    for step in range(50):
        for layer, optimizer in ((one, giver), (other, taker)):
            torch.manual_seed(step)
            for parameter in layer.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
    same(other.state_dict(), one.state_dict())


class Noting(MasterWeights):
    """Has in its state what is no tensor, as those that say how each parameter is trained."""

    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        """Notes it."""
        super().step()
        for state in self.state.values():
            state["how"], state["empty"], state["raw"] = "by rows", "", b"\x00\xff"
            state["more"] = {"names": ["a", ("b", "c")], "kinds": OrderedDict(z="fp32", a=torch.ones(2))}
            state["seen"], state["size"], state["none"] = Counter("aab"), torch.Size([2, 3]), None


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, Wrapped])
def test_what_is_no_tensor_stays_what_it_was(wrap: Any) -> None:
    _, giver = trained(Noting)
    state = copy.deepcopy(wrap(giver).state_dict())
    taker = wrap(Noting(nn.Linear(4, 3).bfloat16().parameters()))
    load_exactly(taker, state, "optimizer")
    assert no_tensors(taker.state_dict()) == no_tensors(wrap(giver).state_dict())
    same(taker.state_dict(), wrap(giver).state_dict())


def no_tensors(value: Any) -> Any:
    """The types and values of all else."""
    match value:
        case Tensor():
            return Tensor
        case dict():
            return type(value), [(key, no_tensors(part)) for key, part in value.items()]
        case list() | tuple():
            return type(value), [no_tensors(part) for part in value]
        case _:
            return type(value), value


class Casts(MasterWeights):
    """Keeps its state where nobody can put anything back."""

    def state_dict(self) -> dict[str, Any]:
        """A copy."""
        return copy.deepcopy(super().state_dict())


class Forgets(MasterWeights):
    """Says that it has loaded."""

    def load_state_dict(self, _state: dict[str, Any]) -> None:
        """And has not."""


class Rounds(MasterWeights):
    """Keeps the types, and not the values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """By way of bf16."""
        super().load_state_dict(state)
        for each in self.state.values():
            each["master"] = each["master"].bfloat16().float()


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        (Casts, r"^optimizer\.state\[0\]\.master was received as float32 and is bfloat16 after load_state_dict$"),
        (Forgets, r"^optimizer\.state\[0\]\.master was received and is not there after load_state_dict$"),
        (Rounds, r"^optimizer\.state\[0\]\.master was received with other values than it has after load_state_dict$"),
    ],
)
def test_what_cannot_be_loaded_as_it_was_is_named(kind: Any, complaint: str) -> None:
    _, giver = trained(MasterWeights)
    taker = kind(nn.Linear(4, 3).bfloat16().parameters())
    if kind is Rounds:
        with torch.no_grad():
            next(iter(giver.state.values()))["master"].add_(1e-6)
        taker = kind(nn.Linear(4, 3).parameters())
    with pytest.raises(ValueError, match=complaint):
        load_exactly(taker, copy.deepcopy(giver.state_dict()), "optimizer")


@pytest.mark.parametrize(
    ("loaded", "received", "complaint"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0]), "x was received with other values"),
        (torch.zeros(2), torch.zeros(3), r"x was received in the shape \[3\] and is \[2\]"),
        (torch.tensor(float("nan")), torch.tensor(float("nan")), None),
        (torch.tensor(1j), torch.tensor(-1j), "other values"),
        (torch.zeros(0, 2), torch.zeros(0, 2), None),
        (torch.eye(3).t(), torch.eye(3), None),
        (torch.tensor(True), torch.tensor(False), "other values"),
        (torch.zeros(2, dtype=torch.float8_e4m3fn), torch.zeros(2, dtype=torch.float8_e4m3fn), None),
    ],
)
def test_bits_are_compared(loaded: Tensor, received: Tensor, complaint: str | None) -> None:
    if complaint is None:
        check_same({"x": loaded}, {"x": received}, "")
    else:
        with pytest.raises(ValueError, match=complaint):
            check_same({"x": loaded}, {"x": received}, "")
