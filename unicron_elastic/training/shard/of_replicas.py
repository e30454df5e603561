"""The worlds of a job as its replicas have them: a member is a replica of so many processes, by the name of its first.

Pure. All processes of a replica are members of a world, or none is: agents see to that.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from unicron_elastic.base.world import Member, World


def of_replicas(world: World, seats: int, name: str) -> tuple[World, int | None]:
    """Return the world of replicas, and the number there of the one in which ``name`` is; None: of none.

    Raises RuntimeError if a replica lacks a process.
    """
    replicas = [list(members) for _, members in groupby(world.members, key=lambda each: _place(each, seats))]
    if torn := next((each for each in replicas if len(each) != seats), None):
        raise RuntimeError(
            f"world {world.number} has {len(torn)} of {seats} processes of the replica of {torn[0].name} on "
            f"{torn[0].node.partition('#')[0]}: {world.reason}"
        )
    leads = tuple(replace(each[0], local_rank=each[0].local_rank // seats) for each in replicas)
    number = next((n for n, each in enumerate(replicas) if any(member.name == name for member in each)), None)
    return replace(world, members=leads), number


def _place(member: Member, seats: int) -> tuple[str, int]:
    return member.node, member.local_rank // seats
