"""How a newcomer gets the state: from the nearest replicas while they compute, or in the group while all wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from unicron_elastic.state.client import Pulled, SourcesLost, pull
from unicron_elastic.state.layout import Layout, empty_tensors, flatten, rebuild
from unicron_elastic.state.server import Held, NotAtRest, StateServer
from unicron_elastic.training.rest import Rest

__all__ = ["Servant", "fetch_state", "give_state", "take_state"]

REST_TIMEOUT_S = 60.0  # a step may take long, and its end is not at rest
PULL_TIMEOUT_S = 600.0


class HasState(Protocol):
    """A run."""

    def state_dict(self) -> dict[str, Any]:
        """All of it."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes it over."""


class Servant:
    """Serves the state of a run, from the first time that it is asked for."""

    def __init__(self, run: HasState, rest: Rest) -> None:
        self._run = run
        self._rest = rest
        self._server: StateServer | None = None
        rest.on_expire = self._break_off

    def serve(self, key: str) -> dict[str, Any]:
        """Begins to serve those who know ``key``, if it does not yet; returns the address. Raises OSError."""
        if self._server is None:
            self._server = StateServer(self, bytes.fromhex(key))
        return dict(self._server.address)

    def hold(self) -> Held:
        """Keeps the state as it is. Raises NotAtRest."""
        try:
            state = self._rest.hold(REST_TIMEOUT_S)
        except TimeoutError as error:
            raise NotAtRest(str(error)) from None
        try:
            layout, tensors = flatten(self._run.state_dict())
        except BaseException:
            self._rest.release()
            raise
        return Held(step=state, layout=layout, tensors=tensors)

    def release(self, held: Held) -> None:  # noqa: ARG002 - one hold is like another
        """Lets the state go on."""
        self._rest.release()

    def _break_off(self) -> None:
        """The state is about to change: whoever has not copied all of it begins again."""
        server, self._server = self._server, None
        if server is not None:
            server.close()


def fetch_state(run: HasState, invitation: Mapping[str, Any]) -> Pulled | None:
    """Copies the state from where the invitation says and takes it over.

    None if all sources were lost on the way. Until the result is released the sources stay in their step.
    """
    try:
        pulled = pull(invitation["sources"], bytes.fromhex(invitation["key"]), timeout_s=PULL_TIMEOUT_S)
    except (SourcesLost, TimeoutError):
        return None
    run.load_state_dict(rebuild(pulled.layout, pulled.tensors))
    return pulled


def give_state(run: HasState, destinations: Sequence[int], device: torch.device) -> None:
    """Sends the state to these ranks of the default group. Raises what a collective raises."""
    layout, tensors = flatten(run.state_dict())
    text = torch.frombuffer(bytearray(layout.to_json().encode()), dtype=torch.uint8)
    for destination in destinations:
        _send(torch.tensor([text.numel()]), destination, device)
        _send(text, destination, device)
        for tensor in tensors:
            if tensor.numel():
                _send(_bytes(tensor), destination, device)


def take_state(run: HasState, source: int, device: torch.device) -> None:
    """Receives what ``give_state`` sends, and takes it over. Raises what a collective raises."""
    length = int(_receive(torch.empty(1, dtype=torch.int64), source, device))
    text = _receive(torch.empty(length, dtype=torch.uint8), source, device)
    layout = Layout.parse(bytes(text.cpu().numpy()).decode())
    tensors = empty_tensors(layout, "cpu")
    for tensor in tensors:
        if tensor.numel():
            target = _bytes(tensor)
            target.copy_(_receive(torch.empty_like(target), source, device))
    run.load_state_dict(rebuild(layout, tensors))


def _bytes(tensor: Tensor) -> Tensor:
    """As bytes, whatever its type: back ends do not take all types."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _send(tensor: Tensor, destination: int, device: torch.device) -> None:
    dist.send(tensor.to(device), destination)


def _receive(tensor: Tensor, source: int, device: torch.device) -> Tensor:
    target = tensor.to(device)
    dist.recv(target, source)
    return target
