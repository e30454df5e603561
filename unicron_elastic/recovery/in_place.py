"""Going on in place: those who can stay in their processes go on from the failed step, the lost are replaced.

It takes workers that have asked for it (they use ``unicron_elastic.Run``). The world is the set of those who train
together; whoever is lost is left out of the next world (``losses``), is replaced, gets the state from a member, and
joins. Here is how a worker becomes a member, and ceases to be one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from unicron_elastic.base.incident import Incident
from unicron_elastic.base.text import counted
from unicron_elastic.base.world import World
from unicron_elastic.recovery import departure, node_loss, replica_mates, storms, worker_loss
from unicron_elastic.recovery.commands import (
    ChangeWorld,
    Command,
    InviteMember,
    RecordIncident,
    TellWorld,
)
from unicron_elastic.recovery.events import (
    MemberEntered,
    MemberLeft,
    MemberParted,
    MemberWentOn,
    StateFetched,
    WorkerReplaced,
    WorldBroke,
    WorldChanged,
)
from unicron_elastic.recovery.hangs import went_on
from unicron_elastic.recovery.state import (
    JobState,
    Part,
    Phase,
    Worker,
    first_members,
    living_members,
    member_of,
    members_here,
    members_of,
    name_of,
)
from unicron_elastic.recovery.worker_loss import replace_lost, world_broke

AboutWorld = (
    WorkerReplaced | MemberEntered | MemberLeft | StateFetched | WorldChanged | WorldBroke | MemberWentOn | MemberParted
)


def about_world(state: JobState, event: AboutWorld) -> tuple[JobState, list[Command]]:
    """Books what happened to the world and its members."""
    if state.phase is not Phase.RUNNING:
        return state, []
    match event:
        case WorkerReplaced():
            state = storms.started(_replaced(state, event), [event.worker.local_rank], event.at)
            return replica_mates.end_with_lost(state, event.worker.local_rank, event.at)
        case WorldChanged():
            return _world_changed(state, event)
        case WorldBroke():
            return world_broke(state, event)
        case _:
            pass
    worker = state.find(event.local_rank)
    if worker is None or worker.exit_code is not None or worker.is_lost:
        return state, []
    match event:
        case MemberEntered():
            state = replace(state, replica_size=max(state.replica_size, event.replica_size))
            return worker_loss.end_without_mates(state, worker, event.at) or _entered(state, worker, event.at)
        case StateFetched():
            return _fetched(state, worker)
        case MemberLeft():
            return _left(state, worker)
        case MemberWentOn():
            return _went_on(state, worker, event)
        case MemberParted():
            return worker_loss.parted(state, worker, event)


def _entered(state: JobState, worker: Worker, at: float) -> tuple[JobState, list[Command]]:
    if state.world is not None and state.world.rank_of(name_of(state, worker)) is None:
        wish = _wish_for_all(state, worker)
        state, commands = _came_late(state, worker)
        return state, [*commands, *wish]
    state = state.with_worker(replace(worker, part=Part.MEMBER))
    if state.world is not None:
        # After it had parted it trains once more, and those who were lost meanwhile are wanted again.
        state, commands = replace_lost(state, at) if worker.part is Part.PARTED else (state, [])
        state, ended = worker_loss.without_the_ended(state, at) if worker.part is Part.PARTED else (state, [])
        commands += ended
        told: list[Command] = [TellWorld(local_rank=worker.local_rank)]
        if state.came_late and worker.part is Part.NONE:  # another worker of this node has had it taken in
            told.insert(0, InviteMember(local_rank=worker.local_rank, sources=()))
        return state, [*told, *commands]
    if any(each.part is Part.MEMBER for each in state.workers if each is not state.find(worker.local_rank)):
        return state, []  # the first world is being agreed on
    return state, [ChangeWorld(joined=first_members(state), restarts_used=state.restarts_used, reason="")]


def _wish_for_all(state: JobState, asks: Worker) -> list[Command]:
    """The first worker that asks on a node that came late has all of them taken in: one world, and not one for each.

    Who takes the place of another comes by itself, when it has the state.
    """
    is_first = all(worker.part not in (Part.MEMBER, Part.NEWCOMER) for worker in state.workers)
    if not state.came_late or not is_first or asks.takes_place:
        return []
    began = [worker for worker in state.running if not worker.is_lost and not worker.takes_place]
    members = tuple(member_of(state, worker) for worker in replica_mates.complete(state, began))
    return [ChangeWorld(joined=members, restarts_used=state.restarts_used, reason="")] if members else []


def _came_late(state: JobState, worker: Worker) -> tuple[JobState, list[Command]]:
    """A newcomer gets the state from a member here, or else, invited without a source, from one elsewhere in the group.

    It must know that it is one: if all who have the state are lost meanwhile, it has nothing to begin with. Of a
    replica of several it gets what those have who stand in its place in theirs.
    """
    state = state.with_worker(replace(worker, part=Part.NEWCOMER, is_ready=False))
    members = (each for each in members_here(state) if replica_mates.holds_the_same(state, each, worker))
    sources = tuple(each.local_rank for each in members)
    return state, [InviteMember(local_rank=worker.local_rank, sources=sources)]


def _fetched(state: JobState, worker: Worker) -> tuple[JobState, list[Command]]:
    worker, world = state.find(worker.local_rank) or worker, state.world
    if world is not None and world.rank_of(name_of(state, worker)) is not None:
        return state, [TellWorld(local_rank=worker.local_rank)]  # its node has had it taken in
    if worker.part is not Part.NEWCOMER or world is None:
        return state, []
    state = state.with_worker(replace(worker, is_ready=True))
    if not replica_mates.are_ready(state, worker):
        return state, []
    back = replica_mates.with_mates(state, [worker])
    here = living_members(state)  # whom these replace may not be out of the world yet
    size = len(back) + sum(member.node != state.node or member.name in here for member in world.members)
    who = replica_mates.named_ranks(back, "is back and joins", "are back and join")
    reason = f"{who} the others: {counted(size, 'rank', 'ranks')}."
    return state, [ChangeWorld(joined=tuple(member_of(state, each) for each in back), reason=reason)]


def _left(state: JobState, worker: Worker) -> tuple[JobState, list[Command]]:
    """A newcomer was too early or too late; when it comes again it has another name, as no member ever comes back.

    Its mates say the same, at the same time, and all leave when the first one does.
    """
    if worker.part is not Part.MEMBER:
        return state, []
    replica = replica_mates.with_mates(state, [worker])
    leave = [each for each in replica if each.exit_code is None and each.part in (Part.MEMBER, Part.PARTED)]
    names = replica_mates.whole(state, (name_of(state, each) for each in leave))
    for each in leave:
        again = replace(each, part=Part.NONE, is_ready=False, takes_place=each.takes_place + 1, since=0)
        state = state.with_worker(again)
    comes = replica_mates.named_ranks(leave, "comes later, when its script is", "come later, when their scripts are")
    return state, [ChangeWorld(lost=names, reason=f"{comes} where the others are.")]


def _without_what_it_mends(state: JobState, before: World | None) -> JobState:
    """Forget of connections that broke ``before`` what those in the present world do not have."""
    world, broke = state.world, state.broke
    assert world is not None
    if before is None or world.breaks(before):
        return replace(state, unbroken_since=world.number, broke=None)
    return replace(state, broke=broke if broke is not None and broke.outlives_joins else None)


def _world_changed(state: JobState, event: WorldChanged) -> tuple[JobState, list[Command]]:
    if state.world is not None and event.world.number <= state.world.number:
        return state, []
    before = state.world
    used = max(state.restarts_used, event.world.restarts_used)
    came_late = before is None and all(member.node != state.node for member in event.world.members)
    state = replace(state, world=event.world, restarts_used=used, came_late=state.came_late or came_late)
    state = _without_what_it_mends(state, before)
    if departure.is_left_out(state):
        return departure.end_workers(state, event.at)
    if node_loss.is_left_out(state, before):
        return node_loss.begin_anew(state, event.at)
    told: list[Command] = []
    late: list[Command] = []
    for worker in state.workers:
        is_in = event.world.rank_of(name_of(state, worker)) is not None
        if worker.part is Part.PARTED and worker.exit_code == 0 and not is_in:  # the others train on without it
            state = state.with_worker(replace(worker, part=Part.MEMBER))
    for worker in state.running:
        if event.world.over and worker_loss.is_unneeded(state, worker):
            continue
        is_in = event.world.rank_of(name_of(state, worker)) is not None
        if is_in and worker.part is Part.PARTED and worker.parted_in:
            told.append(TellWorld(local_rank=worker.local_rank))
        elif is_in and worker.part in (Part.MEMBER, Part.NEWCOMER):
            since = worker.since if worker.part is Part.MEMBER and worker.since else event.world.number
            state = state.with_worker(replace(worker, part=Part.MEMBER, since=since))
            told.append(TellWorld(local_rank=worker.local_rank))
        elif not is_in and worker.part is Part.MEMBER:
            state, more = _came_late(state, worker)
            late += more
    if event.world.over:  # who has not made its last step hears of it and meets nobody
        state, ended = worker_loss.end_newcomers(state)
        return state, [*told, *ended]
    state, left_out = worker_loss.left_to_the_others(state, before)
    left_out += _without_the_gone(state, event.world)
    return state, [*told, *late, *left_out, *_without_the_ended(state, event.world)]


def _without_the_gone(state: JobState, world: World) -> list[Command]:
    """A node may have joined and left, or been lost, in the same moment: its word that it joins came later."""
    lost = members_of(world, state.gone)
    reason = "Members whose node has gone meanwhile are left out."
    return (
        [ChangeWorld(lost=lost, restarts_used=state.restarts_used, reason=reason)] if 0 < len(lost) < world.size else []
    )


def _without_the_ended(state: JobState, world: World) -> list[Command]:
    """A newcomer may have ended while the world that takes it in was written, so that nobody could leave it out yet."""
    here = {member.name for member in world.members if member.node == state.node}
    parted = [worker for worker in state.workers if worker.part is Part.PARTED]
    ended = [worker for worker in state.workers if worker.exit_code == 0 and not worker.is_lost]
    over = {name_of(state, worker) for worker in (*ended, *parted)}
    lost = replica_mates.whole(state, sorted(here - over - set(living_members(state))))
    if not lost or len(lost) == world.size:
        return []
    reason = "Members whose processes have ended meanwhile are left out."
    return [ChangeWorld(lost=lost, restarts_used=state.restarts_used, reason=reason)]


def _went_on(state: JobState, worker: Worker, event: MemberWentOn) -> tuple[JobState, list[Command]]:
    counted = replace(worker, went_on_in=event.world, lost_in=0)
    if worker.went_on_in or not worker.takes_place:  # else it has come just now
        counted = replace(counted, reused=event.reused, recomputed=event.recomputed)
    state = storms.stepped(state, worker.local_rank)
    state, told = went_on(replace(state.with_worker(counted), reattempts=0), worker)
    world = state.world
    members = members_here(state)
    if world is None or state.incident is None or any(each.went_on_in < world.number for each in members):
        return state, told
    incident = replace(
        state.incident,
        first_step_at=event.at,
        regrouped_at=_regrouped_at(state.incident, event),
        micro_batches_reused=_total(each.reused for each in members),
        # All tell of all; a node that has lost all its members does not hear of it.
        micro_batches_recomputed=max(
            (each.recomputed for each in members if each.recomputed is not None), default=None
        ),
    )
    state, commands = replace_lost(replace(state, incident=None, answered=None), event.at)
    return state, [*told, *commands, RecordIncident(incident=incident)]


def _total(counts: Iterable[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _regrouped_at(incident: Incident, event: MemberWentOn) -> float:
    """Return when the ranks met, as the member tells it that stepped last, within reason."""
    return min(max(event.regrouped_at or event.at, incident.stopped_at or event.at), event.at)


def _replaced(state: JobState, event: WorkerReplaced) -> JobState:
    before = state.find(event.worker.local_rank)
    if before is None or before.part is not Part.REPLACING:
        return state
    started = event.worker
    worker = Worker(
        local_rank=started.local_rank,
        rank=started.rank,
        pid=started.pid,
        takes_place=before.takes_place + 1,
        lost_in=before.lost_in,
    )
    return state.with_worker(worker)
