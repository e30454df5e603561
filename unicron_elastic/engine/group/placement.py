"""Where a group that outlives its worlds is now: in which of them, as whom, by what its collectives are carried."""

from __future__ import annotations

from collections.abc import Callable

from unicron_elastic.engine.group.future_watch import FutureWatch
from unicron_elastic.engine.group.inside import Inside
from unicron_elastic.engine.transport.waiter import Patience, Waiter


class Placement:
    """A `Placement` is one group's in one world. ``is_left`` tells that a newer one has come."""

    __slots__ = ("futures", "inside", "is_broken", "waiter", "world")

    def __init__(self, inside: Inside, world: int, is_left: Callable[[], bool], patience: Patience | None) -> None:
        self.inside = inside
        self.world = world
        self.is_broken = False
        self.waiter = Waiter(lambda: self.is_broken or is_left(), looks_up=inside.looks_up, patience=patience)
        self.futures = FutureWatch(is_left, self.break_off)

    def break_off(self) -> None:
        """Break its connections: what waits ends, and nobody waits for what does not."""
        self.is_broken = True
        self.inside.break_off()
