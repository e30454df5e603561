"""torch's rendezvous: its interface, its registry, and how its dynamic handler is left. Imports torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    dynamic_rendezvous,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

__all__ = [
    "RendezvousClosedError",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousGracefulExitError",
    "RendezvousHandler",
    "RendezvousInfo",
    "RendezvousParameters",
    "RendezvousStoreInfo",
    "RendezvousTimeoutError",
    "SignsOfLife",
    "forget_first_round",
    "get_rendezvous_handler",
    "hosts_that_wait",
    "leave",
    "name_methods_at_once",
    "parse_rendezvous_endpoint",
    "port_of_meeting",
    "signs_of_life",
]


def forget_first_round(handler: RendezvousHandler) -> None:
    """Have the dynamic ``handler`` tell its store's address in the next round, too: it keeps it and tells it once.

    A node that joins later would wait for it in vain.
    """
    if hasattr(handler, "_bootstrap_store_info"):
        handler._bootstrap_store_info = None


def name_methods_at_once() -> None:
    """Have torch's dynamic rendezvous, in this process, name the method it is in by a look at one frame.

    For each step of a meeting it makes two lists of all frames with ``inspect.stack()``, which looks through all loaded
    modules for each: of an agent with many, on a busy machine, that lasts longer than the last call of the others, who
    then go on without it, see that it waits, and begin again, for ever.
    """
    if hasattr(dynamic_rendezvous, "get_method_name"):
        dynamic_rendezvous.get_method_name = _method_name


def _method_name(depth: int = 2) -> str:
    try:
        return sys._getframe(depth).f_code.co_name
    except ValueError:  # there are not so many
        return "no_method_name"


def leave(handler: RendezvousHandler, timeout_s: float) -> None:
    """Take this node out of the dynamic ``handler``'s rendezvous, which stays open for the others.

    torch has no call for it: its handler closes the rendezvous for all, or vanishes and is missed after 15 s. What it
    does itself before it joins a new round is done here. Raises whatever this torch has to say to that.
    """
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _RendezvousExitOp

    handler._stop_heartbeats()
    handler._op_executor.run(_RendezvousExitOp(), time.monotonic() + timeout_s)


def hosts_that_wait(handler: RendezvousHandler) -> list[str]:
    """Return the hosts of the nodes that wait with this one for the dynamic ``handler``'s next round, if known.

    Until this node stands there itself its view is of before it came, which the others have told already.
    """
    try:
        state = handler._state_holder.state
        nodes = list(state.participants)
        return [] if state.complete or handler._this_node not in nodes else sorted(str(node.addr) for node in nodes)
    except (AttributeError, RuntimeError):  # another torch's, or it changes at this moment
        return []


@dataclass(frozen=True, slots=True)
class SignsOfLife:
    """`SignsOfLife` are the ``latest`` sign of each node, by its name, and the ``ranks`` of the others of the round.

    The nodes take one for dead that has given none for ``patience_s``.
    """

    latest: Mapping[str, object]
    ranks: Mapping[str, int]
    patience_s: float


def signs_of_life(handler: RendezvousHandler) -> SignsOfLife | None:
    """Return what the dynamic ``handler`` knew of the nodes' signs of life when it was asked last; None of others."""
    try:
        settings = handler.settings
        patience_s = settings.keep_alive_interval.total_seconds() * settings.keep_alive_max_attempt
        with handler._heartbeat_lock:
            state = handler._state_holder.state
            latest = {repr(node): sign for node, sign in state.last_heartbeats.items()}
            ranks = {repr(node): rank for node, rank in state.participants.items() if node != handler._this_node}
            ranks = ranks if state.complete else {}
    except (AttributeError, RuntimeError):  # another torch's
        return None
    return SignsOfLife(latest, ranks, patience_s)


def static_place(handler: RendezvousHandler) -> tuple[str, int, int] | None:
    """Return where several nodes of a static ``handler`` meet, this one's rank, and how many; None of others."""
    try:
        place, nodes = f"{handler.master_addr}:{handler.master_port}", int(handler.world_size)
        return (place, int(handler.rank), nodes) if nodes > 1 else None
    except (AttributeError, TypeError, ValueError):
        return None


def port_of_meeting(handler: RendezvousHandler) -> int | None:
    """Return the port of the store in which the nodes of the dynamic ``handler`` meet; None if it is not known."""
    backend: Any = getattr(getattr(handler, "_state_holder", None), "_backend", None)
    port: int | None = getattr(getattr(backend, "_store", None), "port", None)
    return port
