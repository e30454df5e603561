"""Who is in the worlds of a run, and what a new one has cost this rank: for its agent, and for who compares states."""

from __future__ import annotations

import time

from unicron_elastic.base.world import World
from unicron_elastic.worker.notices import WentOn


class Regrouping:
    """`Regrouping` remembers the members that met last, and what is to be told of a new world behind its first step."""

    def __init__(self) -> None:
        self._names: frozenset[str] = frozenset()
        self._gone: frozenset[str] = frozenset()  # with the latest world that had other members
        self._news: WentOn | None = None
        self._again: set[tuple[int, int]] = set()  # steps and micro-batches that the lost had

    def is_anyone_new(self, world: World) -> bool:
        """Whether this world has members that have not met these before, who have met."""
        return bool(self._names) and bool(_names(world) - self._names)

    def meet(self, world: World, step: int, computed: int, dealt: tuple[tuple[int, ...], ...]) -> bool:
        """Note that all members are in this step; return whether some are new.

        This rank has ``computed`` so many micro-batches of it, and ``dealt`` is what each is to compute besides.
        """
        before, self._names = self._names, _names(world)
        if before != self._names:
            self._gone = before - self._names
        if world.number > 1:
            if computed and self._gone:  # else the step had not begun, or it is a newcomer's share
                self._again.update((step, index) for each in dealt for index in each)
            self._news = WentOn(
                reused=self._news.reused if self._news else computed,
                recomputed=len(self._again),
                world=world.number,
                regrouped_ns=time.monotonic_ns(),
            )
        return bool(self._names - before)

    def take(self) -> WentOn | None:
        """Return what is to be told, once."""
        news, self._news = self._news, None
        if news is not None:
            self._again.clear()
        return news


def _names(world: World) -> frozenset[str]:
    return frozenset(member.name for member in world.members)
