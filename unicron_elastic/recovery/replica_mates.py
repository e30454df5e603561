"""Replicas of several processes of a node: who is lost with whom, and who comes back with whom.

The workers of a node are dealt to its replicas in their order, ``replica_size`` to each. What one of them has of the
model none of its mates has, so a replica is lost as soon as one of its processes is: in each world it is whole, or not
there at all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from unicron_elastic.recovery.commands import Command, KillWorkers
from unicron_elastic.recovery.state import JobState, Part, Worker, members_here, name_of

CAUSE_GRACE_S = 0.5  # within which the death of a mate is known that explains what a worker raised


def mates(state: JobState, worker: Worker) -> tuple[Worker, ...]:
    """Return the other workers of its replica."""
    return tuple(each for each in with_mates(state, [worker]) if each.local_rank != worker.local_rank)


def with_mates(state: JobState, workers: Iterable[Worker]) -> tuple[Worker, ...]:
    """Return all workers of the replicas of these."""
    replicas = {worker.local_rank // state.replica_size for worker in workers}
    return tuple(each for each in state.workers if each.local_rank // state.replica_size in replicas)


def replicas_of(state: JobState, workers: Iterable[Worker]) -> list[tuple[Worker, ...]]:
    """Return these workers by replica."""
    by_replica: dict[int, tuple[Worker, ...]] = {}
    for each in workers:
        number = each.local_rank // state.replica_size
        by_replica[number] = (*by_replica.get(number, ()), each)
    return list(by_replica.values())


def whole(state: JobState, names: Iterable[str]) -> tuple[str, ...]:
    """Return these names of members here, and those of all others of the present world that are of their replicas."""
    found = tuple(names)
    here = [] if state.world is None else [each for each in state.world.members if each.node == state.node]
    replicas = {each.local_rank // state.replica_size for each in here if each.name in found}
    of_them = (each.name for each in here if each.local_rank // state.replica_size in replicas)
    return tuple(dict.fromkeys((*found, *of_them)))


def holds_the_same(state: JobState, one: Worker, other: Worker) -> bool:
    """Return whether two workers of different replicas hold the same part of the model."""
    return (one.local_rank - other.local_rank) % state.replica_size == 0


def are_ready(state: JobState, worker: Worker) -> bool:
    """Return whether all newcomers of its replica have said that they are ready."""
    newcomers = with_mates(state, [worker])
    return all(each.is_ready and each.part is Part.NEWCOMER and each.exit_code is None for each in newcomers)


def complete(state: JobState, workers: Collection[Worker]) -> list[Worker]:
    """Return those of these workers whose mates are among them as well."""
    return [each for each in workers if all(mate in workers for mate in mates(state, each))]


def named_ranks(workers: Sequence[Worker], does: str, do: str) -> str:
    """Return what people read: rank 3 ``does``, or ranks 3, 4 ``do``."""
    ranks = ", ".join(str(each.rank) for each in workers)
    return f"rank {ranks} {does}" if len(workers) == 1 else f"ranks {ranks} {do}"


def who_ends_with(ending: Sequence[Worker], taken: Sequence[Worker]) -> str:
    """Return a sentence on those ``ending`` who have not failed, and those whom a fault has ``taken``; "" for none."""
    if not ending:
        return ""
    who = named_ranks(taken, "", "").rstrip()
    return f"{named_ranks(ending, 'ends', 'end')} with {who}, as a replica is all of its ranks."


def may_be_explained(state: JobState, worker: Worker) -> bool:
    """Return whether a mate runs that may be about to die: what they do together fails before the kernel tells."""
    return any(each.exit_code is None and not each.is_lost for each in mates(state, worker))


def have_others_ended(state: JobState, worker: Worker) -> tuple[Worker, ...]:
    """Return the mates that have ended by themselves, with code 0, so that nobody takes their places."""
    return tuple(each for each in mates(state, worker) if each.exit_code == 0 and not each.is_lost)


def let_mates_end(state: JobState, ended: Iterable[Worker], at: float) -> tuple[JobState, tuple[Worker, ...]]:
    """Give up those whose mates have ended by themselves; they may do so, too, within a time. Return who they are.

    Who has made its last step ends by itself, or asks for a part in vain.
    """
    let_go = tuple(
        each
        for each in with_mates(state, ended)
        if each.exit_code is None and each.part in (Part.NONE, Part.NEWCOMER, Part.MEMBER)
    )
    for each in let_go:
        state = state.with_worker(replace(each, part=Part.LOST, is_given_up=True, told_to_stop_at=at))
    return state, let_go


def end_with_lost(state: JobState, local_rank: int, at: float) -> tuple[JobState, list[Command]]:
    """End a process that was just started, if one of its mates was lost meanwhile: all are started again together."""
    worker = state.find(local_rank)
    if worker is None or worker.exit_code is not None or worker.part is not Part.NONE:
        return state, []
    lost = tuple(each for each in mates(state, worker) if each.is_lost)
    if not lost:
        return state, []
    is_given_up = any(each.is_given_up for each in lost)
    ends = replace(worker, part=Part.LOST, told_to_stop_at=at, was_killed=True, is_given_up=is_given_up)
    reason = who_ends_with([worker], lost)
    return state.with_worker(ends), [KillWorkers(local_ranks=(local_rank,), reason=reason)]


def trains_anyone_else(state: JobState, worker: Worker) -> bool:
    """Return whether others of this node than those of its replica train, as far as it is known here."""
    replica = {each.local_rank for each in with_mates(state, [worker])}
    return any(each.local_rank not in replica for each in members_here(state))


def names_of(state: JobState, worker: Worker) -> tuple[str, ...]:
    """Return the names of all of its replica that the present world has."""
    world = state.world
    return tuple(
        name
        for name in (name_of(state, each) for each in with_mates(state, [worker]))
        if world is not None and world.rank_of(name) is not None
    )
