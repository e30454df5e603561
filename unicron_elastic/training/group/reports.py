"""The reductions that a script makes between two steps, for reports: which they are, and whose shares they lack.

Each rank computes its share by the rank and the number of ranks that there were when the step ended, so the share of
one that is lost later is missing. A rank may have a result that another has not, because the fault interrupted the
reduction: it keeps it, and gives it when they meet.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from unicron_elastic.base.text import counted
from unicron_elastic.base.world import World
from unicron_elastic.engine.protocol.said import Report, Said

Place: TypeAlias = tuple[int, int]
FIRST: Place = (-1, -1)  # where no step has ended yet in this process


class Reports:
    """Of one process. ``is_partial``: whether the latest lacks a share."""

    def __init__(self, seats: int = 1) -> None:
        """``seats``: how many ranks a member of a world is made of."""
        self._seats = seats
        self.is_partial = False
        self.place = FIRST  # the total and the step behind which these reductions are, the same on all ranks
        self._last: tuple[Report, Tensor] | None = None
        self._shared: dict[str, int] = {}  # the rank of each member, by name, when the shares were dealt
        self._lost: frozenset[int] = frozenset()  # of those, as others have told who are at the same place
        self._heard: tuple[Place, frozenset[int]] = (FIRST, frozenset())  # of the place to which this rank comes next
        self._number = 0
        self.asks: Report | None = None  # the one whose result this rank waits for
        self._like = torch.empty(0)
        self._told: frozenset[int] = frozenset()

    def begin_shares(self, world: World | None, place: Place) -> None:
        """A step has ended at this total and state, with these members: what follows are shares of theirs."""
        self._shared = {} if world is None else {member.name: rank for rank, member in enumerate(world.members)}
        # Some that were lost since then may be in shares of others, who came there before.
        self._lost = self._heard[1] if self._heard[0] == place else frozenset()
        if place != self.place:  # all have come behind that step, and so have the result that they may have missed
            self._last = None
        self.place = place
        self._told = frozenset()
        self._number = 0

    def begin(self, kind: str, like: Tensor, call: str = "mean") -> None:
        """One more ``call``, of such a ``kind``, whose result has numbers of this type."""
        self._number += 1
        until, state = self.place
        self.asks = Report(until=until, state=state, number=self._number, kind=kind, call=call)
        self._like = like

    def lost(self, world: World | None) -> frozenset[int]:
        """The ranks of those days that are not in the ``world``."""
        if world is None:
            return self._lost
        if self.place == FIRST:
            return _lost_from_the_first(world, self._seats)
        names = {member.name for member in world.members}
        return self._lost | {rank for name, rank in self._shared.items() if name not in names}

    def hear(self, said: Iterable[Said], step: Place) -> None:
        """Takes over whom others know to be lost who report where this rank does, or will behind its ``step``."""
        for each in said:
            if each.is_between and each.place == self.place:
                self._lost |= each.lost
            elif each.is_between and each.place == step:
                before = self._heard[1] if self._heard[0] == step else frozenset()
                self._heard = (step, before | each.lost)

    def room(self, report: Report) -> Tensor:
        """Memory for the result that this rank waits for, and another has."""
        return torch.empty(report.bytes, dtype=torch.uint8, device=self._like.device).view(self._like.dtype)

    def take(self, report: Report, result: Tensor) -> None:
        """Takes over what another has given."""
        self._last = report, result

    def find(self) -> tuple[Tensor, tuple[int, ...]] | None:
        """The result of the present reduction, if this rank has it, and what it lacks."""
        if self._last is None or self.asks is None or self._last[0].key != self.asks.key:
            return None
        return self._last[1], self._last[0].lacks

    def end(self, found: tuple[Tensor, Iterable[int]] | None) -> None:
        """The reduction has this result; None: it has none for this rank."""
        assert self.asks is not None
        missing = () if found is None else tuple(sorted(found[1]))
        if found is not None:
            size = found[0].numel() * found[0].element_size()
            self._last = replace(self.asks, lacks=missing, bytes=size), found[0]
        self.is_partial = found is None or bool(missing)
        self.asks = None

    def last(self) -> Report | None:
        """The latest that has a result, for those who have it not."""
        return None if self._last is None else self._last[0]

    @property
    def result(self) -> Tensor:
        """Its result."""
        assert self._last is not None
        return self._last[1]

    def tell(self, steps: int) -> None:
        """Says, once for all reductions of the same shares, after ``steps`` steps, which are missing."""
        assert self._last is not None
        call, lacks = self._last[0].call, frozenset(self._last[0].lacks)
        if lacks - self._told:
            of = [member * self._seats + seat for member in sorted(lacks) for seat in range(self._seats)]
            ranks = f"rank{'s' * (len(of) > 1)} {', '.join(map(str, of))}"
            made = counted(steps, "step", "steps")
            sys.stderr.write(
                f"unicron: run.{call}() after {made} is partial: the share of {ranks}, lost since then, is not in it.\n"
            )
            self._told |= lacks


def _lost_from_the_first(world: World, seats: int) -> frozenset[int]:
    """The launcher's members that the world has not: shares of the first step are those that the launcher has dealt."""
    if world.number == 1:
        return frozenset()
    there = {member.name.partition(".")[0] for member in world.members}
    firsts = range(0, int(os.environ.get("WORLD_SIZE", "1")), seats)
    return frozenset(rank // seats for rank in firsts if str(rank) not in there)
