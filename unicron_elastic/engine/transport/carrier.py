"""What carries the collectives of a run: torch's default process group, made anew in each world.

Another carrier may take its place, as where the script's own process groups have to stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store, Work

from unicron_elastic.engine.transport.connect import connect_group
from unicron_elastic.engine.transport.waiter import Patience


class Carrier(Protocol):
    """A `Carrier` connects this process with the members of one world after another, and begins collectives."""

    @property
    def rank(self) -> int:
        """Return this one's among them."""

    @property
    def size(self) -> int:
        """Return how many they are."""

    @property
    def present(self) -> Any:
        """Return what has the connections of this world; None: there are none."""

    def connect(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        timeout_s: float,
        is_left: Callable[[], bool],
        patience: Patience | None,
        device: torch.device,
    ) -> None:
        """Connect with the members who meet in ``store``. Raises Superseded, or what torch raises."""

    def leave(self) -> Any:
        """Use this world's connections no more; return what has them, for who drops it waits for its threads."""

    def all_reduce(self, tensor: Tensor) -> Work | None:
        """Sum it over all, in place."""

    def broadcast(self, tensor: Tensor, source: int) -> Work | None:
        """Give all what ``source`` has."""

    def all_to_all(self, came: Tensor, gone: Tensor, counts: Sequence[int], given: Sequence[int]) -> Work | None:
        """Give each its part of ``gone``, and take one from each."""

    def all_gather(self, given: list[Tensor], tensor: Tensor) -> Work | None:
        """Take what each gives."""

    def send(self, tensor: Tensor, destination: int) -> Work | None:
        """Send to one."""

    def receive(self, tensor: Tensor, source: int) -> Work | None:
        """Receive from one."""


class DefaultGroup:
    """The `DefaultGroup` of torch, of this ``backend``, is a carrier that the script's collectives use as well."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._store: Store | None = None

    @property
    def rank(self) -> int:
        """Return this one's in the group."""
        return int(dist.get_rank())

    @property
    def size(self) -> int:
        """Return how many members the group has."""
        return int(dist.get_world_size())

    @property
    def present(self) -> Any:
        """Return the group."""
        return dist.group.WORLD if dist.is_initialized() else None

    def connect(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        timeout_s: float,
        is_left: Callable[[], bool],
        patience: Patience | None,
        device: torch.device,
    ) -> None:
        """Make the group."""
        self._store = connect_group(
            self._backend,
            store,
            rank=rank,
            size=size,
            timeout_s=timeout_s,
            is_left=is_left,
            patience=patience,
            device=device,
        )

    def leave(self) -> Any:
        """Have torch forget the group."""
        former = self.present
        if former is not None:
            dist.destroy_process_group()
        return former

    def all_reduce(self, tensor: Tensor) -> Work | None:
        """Sum it over all, in place."""
        return dist.all_reduce(tensor, async_op=True)

    def broadcast(self, tensor: Tensor, source: int) -> Work | None:
        """Give all what ``source`` has."""
        return dist.broadcast(tensor, source, async_op=True)

    def all_to_all(self, came: Tensor, gone: Tensor, counts: Sequence[int], given: Sequence[int]) -> Work | None:
        """Give each its part of ``gone``, and take one from each."""
        assert dist.group.WORLD is not None
        return dist.group.WORLD.alltoall_base(came, gone, list(counts), list(given))

    def all_gather(self, given: list[Tensor], tensor: Tensor) -> Work | None:
        """Take what each gives."""
        return dist.all_gather(given, tensor, async_op=True)

    def send(self, tensor: Tensor, destination: int) -> Work | None:
        """Send to one."""
        return dist.isend(tensor, destination)

    def receive(self, tensor: Tensor, source: int) -> Work | None:
        """Receive from one."""
        return dist.irecv(tensor, source)
