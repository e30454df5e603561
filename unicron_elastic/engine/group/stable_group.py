"""A process group that stays the same object in all worlds, for models, meshes and compiled code that hold it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import Work

from unicron_elastic.compat.collectives.gloo_backend import MIND_NO_TIME_OUT
from unicron_elastic.compat.collectives.python_group import PythonGroup
from unicron_elastic.compat.groups import set_ranks
from unicron_elastic.engine.group.group_work import GroupWork
from unicron_elastic.engine.group.inside import Inside
from unicron_elastic.engine.group.placement import Placement
from unicron_elastic.engine.transport.waiter import Patience


class StableGroup(PythonGroup):
    """A `StableGroup` carries its collectives by an inside, which is exchanged when a new world begins.

    Outside it keeps its identity and its name; rank and size are those of the world that it has entered.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._placement: Placement | None = None
        self._ranks: list[int] = []
        self.on_broken: Callable[[], object] = lambda: None  # before a wait raises that a collective broke

    def enter(
        self,
        inside: Inside,
        *,
        rank: int,
        ranks: Sequence[int],
        world: int = 0,
        is_left: Callable[[], bool] = lambda: False,
        patience: Patience | None = None,
    ) -> Inside | None:
        """Have ``inside`` carry what begins from now on, in a world in which this process is ``rank`` of the group.

        ``ranks``: its members, by their ranks in the whole job. ``is_left`` tells that a newer world has come, and ends
        waits; ``patience`` is how long this process waits for the others. Returns the inside before, broken off: who
        drops it waits for gloo's threads.
        """
        former = self._placement
        if former is not None and not former.is_broken:
            former.break_off()
        self._placement = Placement(inside, world, is_left, patience)
        self._ranks = list(ranks)
        self.become(rank, len(ranks))
        set_ranks(self, self._ranks)
        if self.group_name:  # else torch gives it one in a moment
            inside.call_itself(self.group_name, self._ranks)
        return None if former is None else former.inside

    @property
    def world(self) -> int:
        """Return the number of the world that it has entered last."""
        return self._at.world

    @property
    def inside(self) -> Inside:
        """Return what carries its collectives now."""
        return self._at.inside

    def break_off(self) -> None:
        """Break its connections, and no other group's: what waits in it raises. From any thread."""
        self._at.break_off()

    # -- what torch asks ----------------------------------------------------------------------------------------------

    @property
    def kind(self) -> str:
        """Return the name of the back end inside."""
        return self._at.inside.kind

    @property
    def begun(self) -> int:
        """Return how many collectives were begun in this world."""
        return self._at.inside.sequence_number()

    def setGroupName(self, name: str) -> None:
        """Take the name that torch gives it."""
        super().setGroupName(name)
        self._at.inside.call_itself(name, self._ranks)

    def carry(self, name: str, *arguments: Any, **named: Any) -> Work:
        """Begin a collective."""
        placement = self._at
        work = getattr(placement.inside, name)(*arguments, **named)
        return GroupWork(work, placement, self.on_broken, minds_time_out=name not in MIND_NO_TIME_OUT)

    def abort(self) -> None:
        """Do what ``break_off`` does, under torch's name."""
        self.break_off()

    def shutdown(self) -> None:
        """End it, when nothing is under way."""
        self._at.inside.shutdown()

    @property
    def _at(self) -> Placement:
        if self._placement is None:
            raise RuntimeError("the process group has entered no world yet")
        return self._placement
