"""How members that are connected give a newcomer the state, while all wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from unicron_elastic.state.layout import Layout, empty_tensors, rebuild
from unicron_elastic.state.packing import host_bytes
from unicron_elastic.training.group.sendable import NotSendableError, Stateful, sendable
from unicron_elastic.training.group.servant import NotGivenError
from unicron_elastic.worker.notices import StateTaken


class Exchange(Protocol):
    """The members of a world, connected."""

    def send(self, tensor: Tensor, destination: int) -> None:
        """Send to one member."""

    def receive(self, tensor: Tensor, source: int) -> None:
        """Receive from one member."""


def give_state(run: Stateful, members: Exchange, destinations: Sequence[int], device: torch.device) -> None:
    """Sends these ranks the state, or why it cannot be sent, which ends nothing. Raises what a collective raises."""
    tensors = list[Tensor]()
    try:
        layout, tensors = sendable(run)
        told, sign = layout.to_json(), 1
    except NotSendableError as error:
        told, sign = str(error), -1
    parts = _parts(told, tensors, sign)
    for destination in destinations:
        for part in parts:
            members.send(part.to(device), destination)


def receive_state(members: Exchange, source: int, device: torch.device) -> tuple[Any, int]:
    """Receives what ``give_state`` sends: the state, and its bytes.

    Raises NotGivenError if it is not sent, and what a collective raises.
    """

    def receive(tensor: Tensor) -> Tensor:
        target = tensor.to(device)
        members.receive(target, source)
        return target

    return _received(receive)


def about_taken(taken_bytes: int, took_s: float, node: str = "") -> StateTaken:
    """What the agent is told of a state that came by collectives. ``node``: what the giver's is called in the world."""
    host = node.partition("#")[0].rpartition("/")[0] or "another replica"
    return StateTaken(bytes_taken=taken_bytes, took_s=took_s, sources=(f"{host} (in the group)",))


class Broadcasts(Protocol):
    """The members of a world, connected."""

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Give all members what ``source`` has."""


def share_state(run: Stateful, members: Broadcasts, source: int, device: torch.device, *, is_source: bool) -> Any:
    """Gives all members the state that the ``source`` has, and returns it; None there. All members call it.

    Raises what a collective raises, and NotSendableError.
    """

    def share(tensor: Tensor) -> Tensor:
        shared = tensor.to(device)
        members.broadcast(shared, source)
        return shared

    if is_source:
        layout, tensors = sendable(run)
        for part in _parts(layout.to_json(), tensors):
            share(part)
        return None
    state, _ = _received(share)
    return state


def _parts(told: str, tensors: Sequence[Tensor], sign: int = 1) -> list[Tensor]:
    """Return what is sent of a state, one part after the other. ``sign`` -1: ``told`` is why it is not."""
    text = torch.frombuffer(bytearray(told.encode()), dtype=torch.uint8)
    return [torch.tensor([sign * text.numel()]), text, *(_bytes(tensor) for tensor in tensors if tensor.numel())]


def _received(receive: Callable[[Tensor], Tensor]) -> tuple[Any, int]:
    """Return the state that comes in such parts, and its bytes; ``receive`` gets each, like the tensor it is given.

    Raises NotGivenError if it is not sent.
    """
    length = int(receive(torch.empty(1, dtype=torch.int64)))
    text = host_bytes(receive(torch.empty(abs(length), dtype=torch.uint8))).decode()
    if length < 0:
        raise NotGivenError(text)
    layout = Layout.parse(text)
    tensors = empty_tensors(layout, "cpu")
    for tensor in tensors:
        if tensor.numel():
            target = _bytes(tensor)
            target.copy_(receive(torch.empty_like(target)))
    return rebuild(layout, tensors), layout.total_bytes


def _bytes(tensor: Tensor) -> Tensor:
    """View the tensor as bytes, whatever its type: back ends do not take all types."""
    return tensor.detach().reshape(-1).view(torch.uint8)
