"""Replicas of several ranks that are threads: as ``threads_as_ranks``, but a rank that dies takes its replica with it.

Each seat has the whole model, and the same gradients: their mean over the seats is what one has. So all that is checked
of replicas of one rank is checked here as well, and besides that the seats of a replica decide the same.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from threads_as_ranks import LOOK_S, Died, Group, Job, Rank, _has_state, here
from torch import Tensor

from unicron_elastic.base.world import Member, World
from unicron_elastic.worker.instructions import Invitation
from unicron_elastic.worker.notices import Left, Notice


class ThreadMates:
    """`ThreadMates` are the threads of one replica, as one of them has them: `Mates`."""

    mesh = None
    tensor = 1
    shard = 0
    backend = "gloo"

    def __init__(self, rank: SeatRank, replica: Replica, seat: int) -> None:
        self._rank, self._replica = rank, replica
        self._count = 0
        self.seat, self.seats = seat, replica.job.seats
        self.is_lead = seat == 0

    def share(self, told: str) -> list[str]:
        """As Mates.share; ends with a mate that dies."""
        self._rank.point()
        self._count += 1
        job = self._replica.job
        with job.changed:
            slot = self._replica.told.setdefault(self._count, {})
            slot[self.seat] = told
            job.changed.notify_all()
            while not job.changed.wait_for(lambda: len(slot) == self.seats, LOOK_S):
                self._rank.live()
                job.check_time()
        self._rank.point()
        return [slot[seat] for seat in range(self.seats)]

    def mean(self, tensor: Tensor) -> Tensor:
        """As Mates.mean."""
        return (self.sum(tensor.double()) / self.seats).to(tensor.dtype)

    def sum(self, tensor: Tensor) -> Tensor:
        """As Mates.sum."""
        told = self.share(json.dumps(tensor.tolist()))
        return torch.stack([torch.tensor(json.loads(each), dtype=tensor.dtype) for each in told]).sum(0)


class Replica:
    """A `Replica` is its ranks; ``told`` is what they have told each other, by number and seat."""

    def __init__(self, job: SeatJob, number: int, again: str = "") -> None:
        self.job, self.number = job, number
        self.told: dict[int, dict[int, str]] = {}
        self.ready: set[str] = set()
        self.ranks = [SeatRank(job, self, seat, f"{number}.{seat}{again}") for seat in range(job.seats)]

    @property
    def names(self) -> tuple[str, ...]:
        """Those of its ranks now."""
        return tuple(rank.name for rank in self.ranks)


class SeatRank(Rank):
    """A `SeatRank` is one thread in a seat of a replica."""

    def __init__(self, job: SeatJob, replica: Replica, seat: int, name: str) -> None:
        super().__init__(job, name, replica.number * job.seats + seat, job.draw())
        self.replica, self.seat = replica, seat
        self.mates = ThreadMates(self, replica, seat)
        self.of: SeatJob = job

    def wait_until_heard(self, number: int, timeout_s: float) -> bool:
        """As AgentMembership."""
        end = time.monotonic() + timeout_s
        while (heard := self.newer_than(0)) is None or heard[0].number < number:
            if time.monotonic() > end:
                return False
            time.sleep(0.001)
        return True

    def enter(self) -> Invitation | None:
        """As AgentMembership; those of a node that joins may be members before they say that they are ready."""
        answer = super().enter()
        if answer is not None and self.of.joins_by_node:
            self.is_ready(0)
        return answer

    def is_ready(self, _state: int) -> None:
        """The agent takes in all ranks of a replica at once."""
        self.point()
        with self.job.changed:
            self.live()
            self.replica.ready.add(self.name)
            is_in = self.job.newest.rank_of(self.name) is not None
            if self.replica.ready >= set(self.replica.names) and not is_in:
                members = tuple(Member(name=r.name, node="n", local_rank=r.local_rank) for r in self.replica.ranks)
                self.job.change(joined=members)
        while self.job.newest.rank_of(self.name) is None:
            self.live()
            self.job.check_time()
            time.sleep(0.001)

    def tell(self, message: Notice) -> None:
        """A replica leaves as one."""
        if not isinstance(message, Left):
            super().tell(message)
            return
        with self.job.changed:
            if self.job.newest.rank_of(self.name) is not None:
                self.job.change(lost=self.replica.names)
            self.name += "~"

    def connect(self) -> None:
        """With those of this seat."""
        super().connect()
        assert self.world is not None
        self.group = self.of.group_of_seat(self.world, self.seat)


class SeatJob(Job):
    """A `SeatJob` has ``replicas`` of so many ``seats``."""

    def __init__(self, seed: int, *, replicas: int, seats: int, joins_by_node: bool = False, **options: Any) -> None:
        super().__init__(seed, ranks=0, **options)
        self.seats = seats
        self.joins_by_node = joins_by_node
        self.of_seats: dict[tuple[int, int], Group] = {}
        self.replicas = [Replica(self, number) for number in range(replicas)]
        self.ranks = [rank for each in self.replicas for rank in each.ranks]
        members = tuple(Member(name=rank.name, node="n", local_rank=rank.local_rank) for rank in self.ranks)
        self.newest = World(number=1, members=members, store="h:1")

    def draw(self) -> int | None:
        """More points are passed by each of several."""
        found = super().draw()
        return None if found is None else 2 * found

    def group_of_seat(self, world: World, seat: int) -> Group:
        """Return the connections of a seat in a world."""
        with self.changed:
            members = tuple(world.members[seat :: self.seats])
            return self.of_seats.setdefault((world.number, seat), Group(self, replace(world, members=members)))

    def die(self, rank: Rank) -> None:
        """With its whole replica, unless the job could not go on then."""
        assert isinstance(rank, SeatRank)
        with self.changed:
            mates = set(rank.replica.names)
            left = [each for each in self.ranks if each.name not in self.dead | self.ended | mates]
            alive = [each for each in left if self.newest.rank_of(each.name) is not None]
            others = [each for each in alive if each.run is not None and _has_state(each.run)]
            if len({each.replica.number for each in others if isinstance(each, SeatRank)}) * self.seats > len(others):
                return  # some of a replica, and not all of it
            if not others or not self.deaths_left or self.ended:
                return
            self.deaths_left -= 1
            self.lose(rank, is_replaced=self.newcomers)
        raise Died

    def lose(self, rank: Rank, *, is_replaced: bool) -> None:
        """Has the others go on without all of its replica."""
        assert isinstance(rank, SeatRank)
        with self.changed:
            names = rank.replica.names
            if self.dead >= set(names):
                return
            self.dead |= set(names)
            self.change(lost=names)
            self.changed.notify_all()
            if is_replaced:
                replica = Replica(self, rank.replica.number, names[0].partition(".")[2][1:] + "'")
                self.replicas.append(replica)
                for each in replica.ranks:
                    self._start(each)


class MatesHere:
    """`MatesHere` are those of whichever thread asks, in the place of `Mates`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(here.rank.mates, name)


def parameters(job: SeatJob) -> Sequence[Any]:
    """Return what those have come to who have ended."""
    return [rank.parameters for rank in job.ranks if rank.name not in job.dead]
