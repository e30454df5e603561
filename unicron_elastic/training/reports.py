"""The reductions that a script makes between two steps, for reports: which they are, and whose shares they lack.

Each rank computes its share by the rank and the number of ranks that there were when the step ended, so the share of
one that is lost later is missing. A rank may have a result that another has not, because the fault interrupted the
reduction: it keeps it, and gives it when they meet.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from unicron_elastic.training.agreement import Report, Said
from unicron_elastic.world import World

__all__ = ["Reports"]


class Reports:
    """Of one process. ``is_partial``: whether the latest lacks a share."""

    def __init__(self) -> None:
        self.is_partial = False
        self._last: tuple[Report, Tensor] | None = None
        self._shared: dict[str, int] = {}  # the rank of each member, by name, when the shares were dealt
        self._lost: frozenset[int] = frozenset()  # of those, as others have told who are at the same ...
        self._place: tuple[int, int] | None = None  # ... total and state
        self._number = 0
        self._told: frozenset[int] = frozenset()

    def begin_shares(self, world: World | None, place: tuple[int, int]) -> None:
        """A step has ended at this total and state, with these members: what follows are shares of theirs."""
        self._shared = {} if world is None else {member.name: rank for rank, member in enumerate(world.members)}
        if place != self._place:  # else some that were lost since then are in shares of others
            self._lost = frozenset()
        self._told = frozenset()
        self._number = 0

    def begin(self) -> None:
        """One more reduction."""
        self._number += 1

    def lost(self, world: World | None) -> frozenset[int]:
        """The ranks of those days that are not in the ``world``."""
        names = {member.name for member in world.members} if world is not None else set(self._shared)
        return self._lost | {rank for name, rank in self._shared.items() if name not in names}

    def hear(self, said: Iterable[Said], place: tuple[int, int]) -> None:
        """Takes over whom others know to be lost who are between the same steps."""
        there = [each for each in said if each.is_between and (each.until, each.state) == place]
        if there:
            self._lost = (self._lost if place == self._place else frozenset()).union(*(each.lost for each in there))
            self._place = place

    def find(self, said: Sequence[Said], until: int, state: int, like: Tensor) -> tuple[Tensor, tuple[int, ...]] | None:
        """The result of the present reduction if another rank has it, in the type of ``like``, and what it lacks."""
        wanted = (until, state, self._number)
        for each in said:
            report = each.report
            if report is not None and (report.until, report.state, report.number) == wanted:
                if not report.value:
                    return torch.empty_like(like), report.lacks
                value = torch.frombuffer(bytearray.fromhex(report.value), dtype=torch.uint8)
                return value.view(like.dtype).reshape(like.shape).to(like.device), report.lacks
        return None

    def end(self, until: int, state: int, value: Tensor, lacks: Iterable[int]) -> None:
        """The reduction has this result."""
        missing = tuple(sorted(lacks))
        self.is_partial = bool(missing)
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
