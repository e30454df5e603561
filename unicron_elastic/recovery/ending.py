"""The end of a training in place: what becomes of newcomers when the others have made their last step.

A script may ask for a part once more, as one does that trains in epochs. So newcomers wait until a worker that has made
its last step ends well: then there is nothing left to do, here and on every node, and they end as well. Where somebody
was lost after that step, who may have had the model to write, all begin again then.
"""

from __future__ import annotations

from dataclasses import replace

from unicron_elastic.recovery.commands import ChangeWorld, Command, KillWorkers, Tell
from unicron_elastic.recovery.events import MemberParted
from unicron_elastic.recovery.members import is_anyone_elsewhere, is_over, members_here, name_of
from unicron_elastic.recovery.state import JobState, Part, Phase, Worker
from unicron_elastic.world import World

OVER = "The training is over: newcomers end."


def parted(state: JobState, worker: Worker, event: MemberParted) -> tuple[JobState, list[Command]]:
    """Book that a worker has made its last step: one that has proves that all have who trained with it."""
    state = state.with_worker(replace(worker, part=Part.PARTED, parted_in=event.world))
    return (state, []) if event.world else end_newcomers(state)


def member_ended(state: JobState, worker: Worker) -> tuple[JobState, list[Command]]:
    """Decide what follows when a worker ends well: the training is over, or the others go on without it."""
    world = state.world
    if world is None:
        return state, []
    if worker.part is Part.PARTED:
        state, commands = end_newcomers(state)
        if worker.parted_in is not None and not is_over(state):
            commands.append(ChangeWorld(over=worker.parted_in, reason=""))
        return state, commands
    if world.rank_of(name_of(state, worker)) is None:
        said = f"rank {worker.rank} ended by itself before it came to the others, who train on without it."
        return state, [Tell(reason=said)] if worker.takes_place and members_here(state) else []
    if not members_here(state) and not is_anyone_elsewhere(state):
        return end_newcomers(state)
    reason = f"rank {worker.rank} has ended by itself: the others go on without it."
    return state, [ChangeWorld(lost=(name_of(state, worker),), reason=reason)]


def left_to_the_others(state: JobState, before: World | None) -> list[Command]:
    """Have those who still wait for the end of their steps do so without others, who have left it.

    Whoever will not train once more leaves the world; of the others it is told that all had come to that end.
    """
    world = state.world
    have_parted = [worker for worker in state.workers if worker.part is Part.PARTED]
    if world is None or world.number == 1 or not have_parted:
        return []
    gone = [worker for worker in state.workers if worker.is_lost or (worker in have_parted and not worker.parted_in)]
    names = tuple(name for name in (name_of(state, worker) for worker in gone) if world.rank_of(name) is not None)
    reason = "The training is over: those who still make their last step do so without the others."
    commands: list[Command] = [ChangeWorld(lost=names, reason=reason)] if names else []
    parted_in = max(worker.parted_in or 0 for worker in have_parted)
    if parted_in > world.parted and before is not None and world.breaks(before):
        commands.append(ChangeWorld(parted=parted_in, reason=""))
    return commands


def end_newcomers(state: JobState) -> tuple[JobState, list[Command]]:
    """End those who have not come to the others before these made their last steps."""
    late = tuple(worker.local_rank for worker in state.running if is_unneeded(state, worker))
    for local_rank in late:
        each = state.find(local_rank)
        assert each is not None
        state = state.with_worker(replace(each, part=Part.LOST, was_killed=True))
    state = replace(state, replace_at=None)
    return state, [KillWorkers(local_ranks=late, reason=OVER)] if late else []


def why_not_over(state: JobState) -> str:
    """Return why all begin again although some begin to end, "" if they need not.

    Who was lost after its last step left to nobody what it had to do there. It was in the world of that step.
    """
    world = state.world
    if world is None or state.phase is not Phase.RUNNING:
        return ""
    have_parted = [worker for worker in state.workers if worker.part is Part.PARTED]
    if not world.over and all(worker.exit_code != 0 for worker in have_parted):
        return ""
    made_in = min((each for each in (world.over, *(worker.parted_in for worker in have_parted)) if each), default=0)
    if not made_in:
        return ""
    lost = [f"rank {worker.rank}" for worker in state.workers if worker.lost_in >= made_in]
    what = "was lost after the last step, and nobody does what it had to do there: all workers begin again."
    return f"{lost[0]} {what}" if lost else ""


def is_unneeded(state: JobState, worker: Worker) -> bool:
    """Return whether a worker has not come to the others before these made their last steps, if they have."""
    made_in = max((each.parted_in or 0 for each in state.workers if each.part is Part.PARTED), default=0)
    if state.world is not None:
        made_in = max(made_in, state.world.over)
    if worker.part is Part.MEMBER:
        return worker.since > made_in > 0
    return worker.part in (Part.NONE, Part.NEWCOMER) and (worker.takes_place > 0 or state.came_late)
