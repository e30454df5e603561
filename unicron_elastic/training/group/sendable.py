"""What a newcomer is given of a run: all that is registered, if it can be sent, else a sentence that says why not."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from unicron_elastic.base.text import one_line
from unicron_elastic.state.layout import Layout, flatten

_REGISTERED = "run.state."  # where in the state of a run what is registered stands, by name
_WHY_CHARACTERS = 300


class NotSendableError(TypeError):
    """What is registered cannot be given to another process."""


class Stateful(Protocol):
    """What can be registered, as torch.distributed.checkpoint's Stateful."""

    def state_dict(self) -> dict[str, Any]:
        """The state, as nested dicts and lists of tensors, numbers and strings."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Takes it over."""


def state_of(name: str, registered: Stateful) -> dict[str, Any]:
    """The state of what is ``registered`` by this name. Raises NotSendableError if it gives none."""
    try:
        return registered.state_dict()
    except Exception as error:
        why = one_line(f"{type(error).__name__}: {error}", _WHY_CHARACTERS)
        raise NotSendableError(
            f"{name}, a {type(registered).__name__}, cannot be given to a rank that takes a lost one's place, as its "
            f"state_dict() raised {why}: register what gives its state between any two steps, on each rank by itself"
        ) from error


def sendable(run: Stateful) -> tuple[Layout, list[Tensor]]:
    """The state of a run as it is sent. Raises NotSendableError that names what of it cannot be."""
    try:
        return flatten(run.state_dict())
    except NotSendableError:
        raise
    except TypeError as error:
        raise NotSendableError(f"what is registered has to be sent to other ranks: {_place(str(error))}") from error


def check_sendable(run: Stateful) -> None:
    """Raises NotSendableError if others could not take over the state of a run as it is now."""
    layout, _ = sendable(run)
    try:
        Layout.parse(layout.to_json())
    except ValueError as error:
        raise NotSendableError(
            f"what is registered is too much to be sent to other ranks, {error}: have large lists as tensors"
        ) from error


def _place(complaint: str) -> str:
    return complaint.removeprefix(_REGISTERED)
