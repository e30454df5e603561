"""What the entry point `torchrun.handlers` names. torch loads it while it is itself imported, so it imports nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def creator() -> Callable[[Any], Any]:
    """The function that makes a handler of torch's RendezvousParameters."""
    return _create


def _create(parameters: Any) -> Any:
    from unicron_elastic.rendezvous.torch.create_handler import create_handler

    return create_handler(parameters)
