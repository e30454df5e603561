"""What carries the collectives of one seat: connections with who has the same seat in the other replicas, and no more.

They are no process group of torch's, whose default group is that of the replica.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, BroadcastOptions, PrefixStore, Store, Work

from unicron_elastic.compat.collectives.gloo_backend import AllgatherOptions
from unicron_elastic.engine.group.connect_inside import connect_inside
from unicron_elastic.engine.group.inside import Inside
from unicron_elastic.engine.group.register import MakeInside
from unicron_elastic.engine.transport.waiter import Patience


class SeatCarrier:
    """A `SeatCarrier` connects the processes in one ``seat``, by the numbers of their replicas."""

    def __init__(self, seat: int, make_inside: MakeInside) -> None:
        self._seat = seat
        self._make_inside = make_inside
        self._rank, self._size = 0, 1
        self._inside: Any = None  # an Inside: its collectives have names that its protocol does not list

    @property
    def rank(self) -> int:
        """Return the number of this one's replica."""
        return self._rank

    @property
    def size(self) -> int:
        """Return how many replicas there are."""
        return self._size

    @property
    def present(self) -> Inside | None:
        """Return what has the connections."""
        inside: Inside | None = self._inside
        return inside

    @property
    def _there(self) -> Any:
        assert self._inside is not None
        return self._inside

    def connect(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        timeout_s: float,
        is_left: Callable[[], bool],
        patience: Patience | None,
        device: torch.device,  # noqa: ARG002
    ) -> None:
        """Connect. Raises Superseded, or what torch raises."""
        self._inside = connect_inside(
            self._make_inside,
            PrefixStore(f"seat/{self._seat}", store),
            rank=rank,
            size=size,
            timeout_s=timeout_s,
            is_left=is_left,
            patience=patience,
        )
        self._rank, self._size = rank, size

    def leave(self) -> Inside | None:
        """Use these connections no more; return what has them."""
        former: Inside | None = self._inside
        self._inside = None
        return former

    def break_off(self) -> None:
        """Break these connections, and none of the replica's own. From any thread."""
        if (inside := self._inside) is not None:
            inside.break_off()

    def all_reduce(self, tensor: Tensor) -> Work:
        """Sum it over all replicas, in place."""
        return self._there.allreduce([tensor], AllreduceOptions())

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        """Give all replicas what ``source`` has."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        return self._there.broadcast([tensor], options)

    def all_to_all(self, came: Tensor, gone: Tensor, counts: Sequence[int], given: Sequence[int]) -> Work:
        """Give each its part of ``gone``, and take one from each."""
        return self._there.all_to_all_single(came, gone, list(counts), list(given))

    def all_gather(self, given: list[Tensor], tensor: Tensor) -> Work:
        """Take what each gives."""
        return self._there.allgather([given], [tensor], AllgatherOptions())

    def send(self, tensor: Tensor, destination: int) -> Work:
        """Send to one."""
        return self._there.send([tensor], destination, 0)

    def receive(self, tensor: Tensor, source: int) -> Work:
        """Receive from one."""
        return self._there.recv([tensor], source, 0)
