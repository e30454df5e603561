"""Makes the inside of a group for a new world, in a way that can be given up."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from torch.distributed import Store

from unicron_elastic.engine.group.inside import Inside
from unicron_elastic.engine.group.register import MakeInside
from unicron_elastic.engine.transport.interruptible_store import InterruptibleStore
from unicron_elastic.engine.transport.superseded import made_unless_superseded
from unicron_elastic.engine.transport.waiter import Patience


def connect_inside(
    make_inside: MakeInside,
    store: Store,
    *,
    rank: int,
    size: int,
    timeout_s: float,
    is_left: Callable[[], bool],
    patience: Patience | None = None,
) -> Inside:
    """Return one whose ``size`` members meet in ``store``, which no other group uses.

    ``is_left`` tells that a newer world ends this one. Raises Superseded, or what torch raises.
    """
    stoppable = InterruptibleStore(store, is_left)
    timeout = timedelta(seconds=timeout_s)
    made: Inside = made_unless_superseded(lambda: make_inside(stoppable, rank, size, timeout), is_left, patience)
    return made
