"""Makes the process group of a world, in a way that can be given up."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from unicron_elastic.engine.transport.interruptible_store import InterruptibleStore
from unicron_elastic.engine.transport.superseded import given_up_when
from unicron_elastic.engine.transport.waiter import Patience

_hooks: dict[Any, Any] = {}  # torch's hook for exceptions, of the last group, and the one that it calls


def connect_group(
    backend: str,
    store: Store,
    *,
    rank: int,
    size: int,
    timeout_s: float,
    is_left: Callable[[], bool],
    patience: Patience | None = None,
    device: torch.device | None = None,
) -> Store:
    """Makes the default process group of the world whose members meet in ``store``; ``timeout_s`` is that of its waits.

    ``is_left`` tells that a newer world ends this one. Returns a store that must be kept as long as the group is used:
    torch keeps what it has of it in C++ only, and groups that are made later would find it empty. Raises Superseded, or
    DistError.
    """
    store = PrefixStore("group", store)
    if "nccl" not in backend:  # which reads its store in ways of its own
        store = InterruptibleStore(store, is_left)
    options = {"device_id": device} if device is not None and device.type == "cuda" else {}
    with given_up_when(is_left, patience=patience), _one_hook():
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s), **options
        )
    return store


@contextlib.contextmanager
def _one_hook() -> Iterator[None]:
    """torch wraps the hook for exceptions with each group: a process would have a layer, and a name, of each world."""
    before = sys.excepthook = _hooks.pop(sys.excepthook, sys.excepthook)
    yield
    if sys.excepthook is not before:
        _hooks.clear()
        _hooks[sys.excepthook] = before
