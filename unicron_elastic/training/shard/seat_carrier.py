"""What carries the collectives of one seat: connections with who has the same seat in the other replicas, and no more.

They are no process group of torch's, whose default group is that of the replica.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, BroadcastOptions, PrefixStore, Store, Work

from unicron_elastic.compat.collectives.gloo_backend import AllgatherOptions
from unicron_elastic.engine.group import GlooInside
from unicron_elastic.engine.group.connect_inside import connect_inside
from unicron_elastic.engine.transport.waiter import Patience


class SeatCarrier:
    """A `SeatCarrier` connects the processes in one ``seat``, by the numbers of their replicas."""

    def __init__(self, seat: int) -> None:
        self._seat = seat
        self._inside: GlooInside | None = None

    @property
    def rank(self) -> int:
        """Return the number of this one's replica."""
        return int(self._there.rank())

    @property
    def size(self) -> int:
        """Return how many replicas there are."""
        return int(self._there.size())

    @property
    def present(self) -> GlooInside | None:
        """Return what has the connections."""
        return self._inside

    @property
    def _there(self) -> GlooInside:
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
        made = connect_inside(
            GlooInside,
            PrefixStore(f"seat/{self._seat}", store),
            rank=rank,
            size=size,
            timeout_s=timeout_s,
            is_left=is_left,
            patience=patience,
        )
        assert isinstance(made, GlooInside)
        self._inside = made

    def leave(self) -> GlooInside | None:
        """Use these connections no more; return what has them."""
        former, self._inside = self._inside, None
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
