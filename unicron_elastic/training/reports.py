"""The reductions that a script makes between two steps, for reports: which they are, and whose shares they lack.

Each rank computes its share by the rank and the number of ranks that there were when the step ended, so the share of
one that is lost later is missing. A rank may have a result that another has not, because the fault interrupted the
reduction: it keeps it, and gives it when they meet.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from unicron_elastic.base.world import World
from unicron_elastic.training.group.speech import Report, Said

Place: TypeAlias = tuple[int, int]
FIRST: Place = (-1, -1)  # where no step has ended yet in this process


class Reports:
    """Of one process. ``is_partial``: whether the latest lacks a share."""

    def __init__(self) -> None:
        self.is_partial = False
        self.place = FIRST  # the total and the step behind which these reductions are, the same on all ranks
        self._last: tuple[Report, Tensor] | None = None
        self._shared: dict[str, int] = {}  # the rank of each member, by name, when the shares were dealt
        self._lost: frozenset[int] = frozenset()  # of those, as others have told who are at the same place
        self._heard: tuple[Place, frozenset[int]] = (FIRST, frozenset())  # of the place to which this rank comes next
        self._number = 0
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

    def begin(self) -> None:
        """One more reduction."""
        self._number += 1

    def lost(self, world: World | None) -> frozenset[int]:
        """The ranks of those days that are not in the ``world``."""
        if world is None:
            return self._lost
        if self.place == FIRST:
            return _lost_from_the_first(world)
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

    def find(self, said: Sequence[Said], like: Tensor) -> tuple[Tensor, tuple[int, ...]] | None:
        """The result of the present reduction if another rank has it, in the type of ``like``, and what it lacks."""
        for each in said:
            report = each.report
            if report is not None and (report.until, report.state, report.number) == (*self.place, self._number):
                if not report.value:
                    return torch.empty_like(like), report.lacks
                value = torch.frombuffer(bytearray.fromhex(report.value), dtype=torch.uint8)
                return value.view(like.dtype).reshape(like.shape).to(like.device), report.lacks
        return None

    def end(self, value: Tensor, lacks: Iterable[int]) -> None:
        """The reduction has this result."""
        missing = tuple(sorted(lacks))
        self.is_partial = bool(missing)
        until, state = self.place
        report = Report(until=until, state=state, number=self._number, value="", lacks=missing)
        self._last = report, value.clone()  # as the script may change what it gets

    def last(self) -> Report | None:
        """The latest that has a result, for those who have it not."""
        if self._last is None:
            return None
        report, value = self._last
        return replace(report, value=bytes(value.cpu().reshape(-1).view(torch.uint8).numpy()).hex())

    def tell(self, steps: int) -> None:
        """Says, once for all reductions of the same shares, after ``steps`` steps, which are missing."""
        assert self._last is not None
        lacks = frozenset(self._last[0].lacks)
        if lacks - self._told:
            ranks = f"rank{'s' * (len(lacks) > 1)} {', '.join(map(str, sorted(lacks)))}"
            sys.stderr.write(
                f"unicron: run.mean() after {steps} steps is partial: the share of {ranks}, lost since then, is not in "
                "it.\n"
            )
            self._told |= lacks


def _lost_from_the_first(world: World) -> frozenset[int]:
    """The launcher's ranks that the world has not: shares of the first step are those that the launcher has dealt."""
    if world.number == 1:
        return frozenset()
    there = {member.name.partition(".")[0] for member in world.members}
    return frozenset(rank for rank in range(int(os.environ.get("WORLD_SIZE", "1"))) if str(rank) not in there)
