"""Which ranks train together as a replica of the model, and who waits: pure, so that all members conclude the same.

A *seat* is a place in a replica: a tensor-parallel rank of a pipeline stage. A process keeps its seat for life, as that
decides which part of the model it has. A replica is one process per seat. When one of them is lost, the others of that
replica cannot go on; they wait as spares until a process with the seat that is missing comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

Cut: TypeAlias = tuple[int, int]  # of an optimizer's state: into how many parts, and which of them


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaShape:
    """How a replica is cut: into ``tensor`` times ``pipeline`` seats."""

    tensor: int
    pipeline: int

    @property
    def seats(self) -> int:
        """How many processes a replica takes."""
        return self.tensor * self.pipeline

    def seat_of(self, rank: int, world_size: int) -> tuple[int, int]:
        """The seat and the replica of a rank, in the order that Megatron-Core has by default: "tp-cp-ep-dp-pp".

        Raises ValueError if ranks are left over.
        """
        if world_size % self.seats:
            raise ValueError(
                f"{world_size} ranks are no multiple of the {self.seats} that a replica takes (tensor {self.tensor}, "
                f"pipeline {self.pipeline})"
            )
        tensor_rank, rest = rank % self.tensor, rank // self.tensor
        replicas = world_size // self.seats
        return tensor_rank + self.tensor * (rest // replicas), rest % replicas

    def rank_of(self, seat: int, replica: int, replicas: int) -> int:
        """The inverse of ``seat_of``, for so many replicas."""
        return seat % self.tensor + self.tensor * (replica + replicas * (seat // self.tensor))


@dataclass(frozen=True, slots=True)
class FormerPlace:
    """Where a member was: its seat, and the name of its replica (None: it waited, or is new)."""

    seat: int
    replica: str | None
    has_state: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLayout:
    """Who trains together, by index of the member.

    ``replicas``: of each, the member in each seat. ``names``: of each, the name that it had before, if the same members
    were that replica then; else None.
    """

    shape: ReplicaShape
    replicas: tuple[tuple[int, ...], ...]
    names: tuple[str | None, ...]
    spares: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many members train."""
        return len(self.replicas) * self.shape.seats

    def replica_of(self, member: int) -> int | None:
        """Return the replica in which a member trains; None: it waits."""
        return next((number for number, members in enumerate(self.replicas) if member in members), None)

    def rank_of(self, member: int) -> int | None:
        """The rank among those who train, as Megatron-Core orders them; None: it waits."""
        replica = self.replica_of(member)
        if replica is None:
            return None
        return self.shape.rank_of(self.replicas[replica].index(member), replica, len(self.replicas))

    def in_seat(self, seat: int) -> tuple[int, ...]:
        """Return who has this seat, by replica."""
        return tuple(members[seat] for members in self.replicas)


def first_layout(shape: ReplicaShape, size: int) -> ReplicaLayout:
    """Return that of the process groups with which the script began, of so many ranks."""
    replicas = size // shape.seats
    return ReplicaLayout(
        shape=shape,
        replicas=tuple(
            tuple(shape.rank_of(seat, number, replicas) for seat in range(shape.seats)) for number in range(replicas)
        ),
        names=tuple(name_of(0, number) for number in range(replicas)),
        spares=(),
    )


def name_of(world: int, number: int) -> str:
    """Return the name of a replica that was put together in this world, 0: by the script, as its ``number``-th."""
    return f"{world}/{number}"


def lay_out(shape: ReplicaShape, places: Sequence[FormerPlace]) -> ReplicaLayout:
    """Form as many replicas as there are processes for, in the order of their first members.

    Those that are whole and have the training state stay as they are. Of the others' members and of newcomers more are
    put together, those who have the training state first.
    """
    before: dict[str, dict[int, int]] = {}
    for member, place in enumerate(places):
        if place.replica is not None:
            before.setdefault(place.replica, {})[place.seat] = member
    kept = {
        name: seats
        for name, seats in before.items()
        if len(seats) == shape.seats and all(places[member].has_state for member in seats.values())
    }
    taken = {member for seats in kept.values() for member in seats.values()}
    left: list[list[int]] = [[] for _ in range(shape.seats)]
    for member, place in enumerate(places):
        if member not in taken:
            left[place.seat].append(member)
    for members in left:
        members.sort(key=lambda member: (not places[member].has_state, member))
    more = min(map(len, left))
    named: list[tuple[tuple[int, ...], str | None]] = [
        (tuple(seats[seat] for seat in range(shape.seats)), name) for name, seats in kept.items()
    ]
    named += [(tuple(members[number] for members in left), None) for number in range(more)]
    named.sort(key=lambda replica: min(replica[0]))
    return ReplicaLayout(
        shape=shape,
        replicas=tuple(members for members, _ in named),
        names=tuple(name for _, name in named),
        spares=tuple(sorted(member for members in left for member in members[more:])),
    )
