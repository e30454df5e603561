"""Which workers of a node are members of the world, and what they are called there."""

from __future__ import annotations

from unicron_elastic.recovery.state import JobState, Part, Worker
from unicron_elastic.world import Member


def name_of(state: JobState, worker: Worker) -> str:
    """Of the member that a worker is or will be; nobody else in this job has it, as nodes are called differently."""
    return f"{worker.rank}.{worker.takes_place}#{state.node.rpartition('#')[2]}"


def member_of(state: JobState, worker: Worker) -> Member:
    return Member(name=name_of(state, worker), node=state.node, local_rank=worker.local_rank)


def first_members(state: JobState) -> tuple[Member, ...]:
    """What the workers of a new generation on this node will be."""
    return tuple(member_of(state, worker) for worker in state.workers)


def is_over(state: JobState) -> bool:
    """Whether members that have made their last steps have begun to end."""
    return state.world is not None and state.world.over > 0


def living_members(state: JobState) -> tuple[str, ...]:
    """What those workers are called in a world that run, and that the others do not go on without."""
    return tuple(name_of(state, worker) for worker in state.running if not worker.is_lost)


def trains_here(state: JobState, worker: Worker) -> bool:
    """Whether a worker is one of those who train together: no newcomer, and not lost."""
    if state.world is None:
        return not worker.takes_place
    return state.world.rank_of(name_of(state, worker)) is not None


def is_newcomer(state: JobState, worker: Worker) -> bool:
    """Whether a worker is on its way into a world in which others train already."""
    if state.world is None or not (worker.takes_place or state.came_late):
        return False
    return worker.part in (Part.NONE, Part.NEWCOMER) and not trains_here(state, worker)


def members_here(state: JobState) -> list[Worker]:
    return [worker for worker in state.running if worker.part is Part.MEMBER]


def is_anyone_elsewhere(state: JobState) -> bool:
    return state.world is not None and any(member.node != state.node for member in state.world.members)


def nodes_elsewhere(state: JobState) -> tuple[str, ...]:
    """The other nodes whose workers are members of the world, as the rendezvous calls them."""
    members = () if state.world is None else state.world.members
    return tuple(sorted({member.node.rpartition("#")[0] for member in members if member.node != state.node}))


def has_anyone_parted(state: JobState) -> bool:
    return any(worker.part is Part.PARTED for worker in state.workers)


def has_anyone_a_part(state: JobState) -> bool:
    """Whether a worker here trains with the others, or has made its last step with them."""
    return any(worker.part in (Part.MEMBER, Part.PARTED) for worker in state.workers)


def named(local_ranks: tuple[int, ...]) -> str:
    return f"{'Worker' if len(local_ranks) == 1 else 'Workers'} {', '.join(map(str, local_ranks))}"
