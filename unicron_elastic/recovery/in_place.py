"""Going on in place: those who can stay in their processes go on from the failed step, the lost are replaced.

It takes workers that have asked for it (they use ``unicron_elastic.Run``). The world is the set of those who train
together; whoever is lost is left out of the next world, is replaced, gets the state from a member, and joins. What
cannot be answered so is answered as ever: all workers of the node stop and begin again.
"""

from __future__ import annotations

from dataclasses import replace

from unicron_elastic.faults import Fault, RootCause, Severity, Status, classify, signature
from unicron_elastic.incident import Incident
from unicron_elastic.recovery.commands import (
    ChangeWorld,
    Command,
    InviteMember,
    KillWorkers,
    MeetNodes,
    RecordIncident,
    ReplaceWorker,
    Tell,
    TellWorld,
    WakeAt,
)
from unicron_elastic.recovery.events import (
    MemberEntered,
    MemberParted,
    MemberWentOn,
    NodesLost,
    NodeUnhealthy,
    StateFetched,
    WorkerExited,
    WorkerReplaced,
    WorldBroke,
    WorldChanged,
)
from unicron_elastic.recovery.hangs import METHOD as HANG_METHOD
from unicron_elastic.recovery.ladder import climb
from unicron_elastic.recovery.node import open_node_incident
from unicron_elastic.recovery.policy import Verdict, count_repeats, judge, why_none_left
from unicron_elastic.recovery.records import judged, open_incident
from unicron_elastic.recovery.state import JobState, Part, Phase, Worker
from unicron_elastic.world import Member, World

__all__ = [
    "FOR_NODES",
    "AboutWorld",
    "about_world",
    "end_lost",
    "first_members",
    "go_on",
    "go_on_without",
    "is_being_answered",
    "is_in_place",
    "lost_ended",
    "meet_nodes",
    "member_ended",
    "reattempt_if_due",
    "replace_if_due",
    "tells_itself",
]

FOR_NODES = "the nodes meet, and the workers go on."
REPLACE_AFTER_S = 0.25  # the survivors step first, if they do within this time: they need the processors
BROKE_METHOD = "exception propagation"
BREAK_GRACE_S = 0.1  # within which a death is known that explains why collectives failed
BREAK_GRACE_NODES_S = 0.5  # ... if it may be that of a node

AboutWorld = WorkerReplaced | MemberEntered | StateFetched | WorldChanged | WorldBroke | MemberWentOn | MemberParted


def about_world(state: JobState, event: AboutWorld) -> tuple[JobState, list[Command]]:
    """Books what happened to the world and its members."""
    if state.phase is not Phase.RUNNING:
        return state, []
    match event:
        case WorkerReplaced():
            return _replaced(state, event), []
        case WorldChanged():
            return _world_changed(state, event)
        case WorldBroke():
            return _world_broke(state, event)
        case _:
            pass
    worker = state.find(event.local_rank)
    if worker is None or worker.exit_code is not None or worker.is_lost:
        return state, []
    match event:
        case MemberEntered():
            return _entered(state, worker)
        case StateFetched():
            return _fetched(state, worker)
        case MemberWentOn():
            return _went_on(state, worker, event)
        case MemberParted():
            return _parted(state, worker)


# -- members ----------------------------------------------------------------------------------------------------------


def _name(state: JobState, worker: Worker) -> str:
    """Of the member that a worker is or will be; nobody else in this job has it, as nodes are called differently."""
    return f"{worker.rank}.{worker.takes_place}#{state.node.rpartition('#')[2]}"


def _member(state: JobState, worker: Worker) -> Member:
    return Member(name=_name(state, worker), node=state.node, local_rank=worker.local_rank)


def _entered(state: JobState, worker: Worker) -> tuple[JobState, list[Command]]:
    if state.world is not None and state.world.rank_of(_name(state, worker)) is None:
        return _came_late(state, worker)
    state = state.with_worker(replace(worker, part=Part.MEMBER))
    if state.world is not None:
        return state, [TellWorld(local_rank=worker.local_rank)]
    if any(each.part is Part.MEMBER for each in state.workers if each is not state.find(worker.local_rank)):
        return state, []  # the first world is being agreed on
    return state, [ChangeWorld(joined=first_members(state), restarts_used=state.restarts_used, reason="")]


def _came_late(state: JobState, worker: Worker) -> tuple[JobState, list[Command]]:
    """A newcomer gets the state from a member here, or else from one elsewhere, in the group."""
    state = state.with_worker(replace(worker, part=Part.NEWCOMER))
    sources = tuple(each.local_rank for each in _members(state))
    if not sources:
        return _fetched(state, worker)
    return state, [InviteMember(local_rank=worker.local_rank, sources=sources)]


def first_members(state: JobState) -> tuple[Member, ...]:
    """What the workers of a new generation on this node will be."""
    return tuple(_member(state, worker) for worker in state.workers)


def _fetched(state: JobState, worker: Worker) -> tuple[JobState, list[Command]]:
    worker = state.find(worker.local_rank) or worker
    if worker.part is not Part.NEWCOMER or state.world is None:
        return state, []
    reason = f"rank {worker.rank} is back: {state.world.size + 1} ranks train together."
    return state, [ChangeWorld(joined=(_member(state, worker),), reason=reason)]


def _world_changed(state: JobState, event: WorldChanged) -> tuple[JobState, list[Command]]:
    if state.world is not None and event.world.number <= state.world.number:
        return state, []
    before = state.world
    used = max(state.restarts_used, event.world.restarts_used)
    state = replace(state, world=event.world, broke=None, restarts_used=used)
    told: list[Command] = []
    late: list[Command] = []
    for worker in state.running:
        is_in = event.world.rank_of(_name(state, worker)) is not None
        if is_in and worker.part in (Part.MEMBER, Part.NEWCOMER):
            state = state.with_worker(replace(worker, part=Part.MEMBER))
            told.append(TellWorld(local_rank=worker.local_rank))
        elif not is_in and worker.part is Part.MEMBER:
            was_in = before is not None and before.rank_of(_name(state, worker)) is not None
            state, more = _left_out(state, worker, event.at) if was_in else _came_late(state, worker)
            late += more
    return state, told + late + _leave_to_the_others(state, event.world)


def _leave_to_the_others(state: JobState, world: World) -> list[Command]:
    """Who has made its last step does not come to meet the others any more."""
    over = [worker for worker in state.workers if worker.part is Part.PARTED]
    names = tuple(name for name in (_name(state, worker) for worker in over) if world.rank_of(name) is not None)
    reason = "The training is over: those who still make their last step do so without the others."
    return [ChangeWorld(lost=names, reason=reason)] if names and world.number > 1 else []


def _left_out(state: JobState, worker: Worker, at: float) -> tuple[JobState, list[Command]]:
    """Others took it for lost; it begins again."""
    state = state.with_worker(replace(worker, part=Part.LOST, told_to_stop_at=at, was_killed=True))
    reason = f"The others go on without rank {worker.rank}: SIGKILL, and it begins again."
    return state, [KillWorkers(local_ranks=(worker.local_rank,), reason=reason)]


def _went_on(state: JobState, worker: Worker, event: MemberWentOn) -> tuple[JobState, list[Command]]:
    counted = replace(worker, went_on_in=event.world, reused=event.reused, recomputed=event.recomputed)
    state = replace(state.with_worker(counted), reattempts=0)
    world = state.world
    members = _members(state)
    if world is None or state.incident is None or any(each.went_on_in < world.number for each in members):
        return state, []
    incident = replace(
        state.incident,
        first_step_at=event.at,
        regrouped_at=_regrouped_at(state.incident, event),
        micro_batches_reused=sum(each.reused for each in members),
        micro_batches_recomputed=max((each.recomputed for each in members), default=0),  # all tell of all
    )
    state, commands = _replace_lost(replace(state, incident=None, answered=None))
    return state, [*commands, RecordIncident(incident=incident)]


def _regrouped_at(incident: Incident, event: MemberWentOn) -> float:
    """As the member tells it that stepped last, within reason."""
    return min(max(event.regrouped_at or event.at, incident.stopped_at or event.at), event.at)


def _members(state: JobState) -> list[Worker]:
    return [worker for worker in state.running if worker.part is Part.MEMBER]


# -- losses -----------------------------------------------------------------------------------------------------------


def go_on(state: JobState, fault: Fault, at: float, method: str) -> tuple[JobState, list[Command]] | None:
    """Leaves out whom this fault took, if the others can go on without; None if all workers have to begin again."""
    lost = _taken(state, fault, method)
    if not lost or not _can_others_go_on(state, lost):
        return None
    cause = RootCause(fault=fault, consequences=(), reason=fault.reason)
    is_known = is_being_answered(state, fault)
    repeats = state.repeats if is_known else count_repeats(state.repeats, cause)
    verdict = judge(state.policy, state.restarts_used - is_known, repeats, (fault.failure,))
    attempts, rung = climb(state.attempts, fault, at, state.policy)
    if not verdict.restart or rung.severity is Severity.SEV1:
        return None
    verdict = replace(verdict, severity=rung.severity, reason=f"{_who_goes_on(state, lost)} {verdict.reason}")
    state = replace(state, attempts=attempts, repeats=repeats, restarts_used=verdict.restarts_used, broke=None)
    state, booked = _book(state, cause, verdict, at=at, method=method, action="go on")
    state, commands = _leave_out(state, lost, at, f"{fault.reason} {verdict.reason}")
    answered = (signature(fault.failure), fault.failure.step)
    return replace(state, hang=None, answered=answered), [*commands, *booked]


def tells_itself(incident: Incident) -> bool:
    """Whether its end is told by the members that went on."""
    return incident.action in ("go on", "reattempt")


def is_being_answered(state: JobState, fault: Fault) -> bool:
    """Whether a restart was used for it already.

    It follows from the loss that is being answered, or is the same bug of the script, met by another rank at the same
    step.
    """
    gone = state.find(fault.failure.local_rank)
    if state.answered is None or gone is None:
        return False
    is_bug = count_repeats(None, RootCause(fault=fault, consequences=(), reason=fault.reason)) is not None
    is_same = state.answered == (signature(fault.failure), fault.failure.step) and not gone.takes_place
    return fault.is_consequence or (is_bug and is_same)


def _taken(state: JobState, fault: Fault, method: str) -> tuple[Worker, ...]:
    """Whom the fault took: the worker that failed, and all who hang if that is the fault."""
    hung = state.hang.local_ranks if state.hang is not None and method == HANG_METHOD else ()
    taken = {fault.failure.local_rank, *hung}
    return tuple(worker for worker in state.workers if worker.local_rank in taken and not _is_gone(worker))


def _is_gone(worker: Worker) -> bool:
    return worker.part in (Part.LOST, Part.REPLACING)


def _can_others_go_on(state: JobState, lost: tuple[Worker, ...]) -> bool:
    """Whether somebody with the training state is left, and nobody who cannot go on in place."""
    if state.phase is not Phase.RUNNING or state.world is None:
        return False
    if any(worker.part is Part.PARTED or (worker.part is Part.NONE and not worker.takes_place) for worker in lost):
        return False
    others = [worker for worker in state.running if worker not in lost]
    if any(worker.part is Part.PARTED or (worker.part is Part.NONE and not worker.takes_place) for worker in others):
        return False
    return any(worker.part is Part.MEMBER for worker in others) or _is_anyone_elsewhere(state)


def _is_anyone_elsewhere(state: JobState) -> bool:
    return state.world is not None and any(member.node != state.node for member in state.world.members)


def go_on_without(state: JobState, event: NodesLost) -> tuple[JobState, list[Command]] | None:
    """Leaves out the members of nodes that are gone; None if all workers here have to begin again."""
    world = state.world
    if world is None or not _can_others_go_on(state, ()):
        return None
    lost = tuple(member.name for member in world.members if member.node.rpartition("#")[0] in event.nodes)
    if not lost:
        return state, []
    if why_none_left(state.policy, state.restarts_used) is not None:
        return None
    used = state.restarts_used + 1
    decision = f"{_ranks_go(world.size - len(lost))} Restart {used} of {state.policy.max_restarts}."
    found = NodeUnhealthy(
        at=event.at, status=Status.LOST_CONNECTION, severity=Severity.SEV1, reason=event.reason, why_stay=None
    )
    state, superseded = open_node_incident(state, found)
    assert state.incident is not None
    incident = replace(state.incident, action="go on", decision=decision, stopped_at=event.at, restarts_used=used)
    commands: list[Command] = [ChangeWorld(lost=lost, restarts_used=used, reason=f"{event.reason} {decision}")]
    commands += [] if superseded is None else [RecordIncident(incident=superseded)]
    return replace(state, incident=incident, broke=None), [*commands, RecordIncident(incident=incident)]


def is_in_place(state: JobState) -> bool:
    """Whether all workers here can go on without, and with, others."""
    return _can_others_go_on(state, ())


def meet_nodes(state: JobState) -> tuple[JobState, list[Command]] | None:
    """Has the nodes meet while the workers go on; None if all workers here have to begin again for it."""
    if not is_in_place(state):
        return None
    return replace(state, newcomers="", join_at=None), [MeetNodes(reason=state.newcomers)]


def _ranks_go(left: int) -> str:
    return f"{'1 rank goes' if left == 1 else f'{left} ranks go'} on from the failed step."


def _who_goes_on(state: JobState, lost: tuple[Worker, ...]) -> str:
    assert state.world is not None
    left = state.world.size - sum(state.world.rank_of(_name(state, worker)) is not None for worker in lost)
    return _ranks_go(left)


def _book(
    state: JobState, cause: RootCause, verdict: Verdict, *, at: float, method: str, action: str
) -> tuple[JobState, list[Command]]:
    """The state with an incident whose verdict is passed already."""
    state, superseded = open_incident(state, cause.fault, at, method)
    assert state.incident is not None
    incident = replace(judged(state.incident, cause, at, verdict), action=action)
    commands: list[Command] = [] if superseded is None else [RecordIncident(incident=superseded)]
    return replace(state, incident=incident), [*commands, RecordIncident(incident=incident)]


def _leave_out(state: JobState, lost: tuple[Worker, ...], at: float, reason: str) -> tuple[JobState, list[Command]]:
    """Has the others go on without them, ends those who still run, and has them replaced soon."""
    assert state.world is not None
    of_lost = (_name(state, worker) for worker in lost)
    names = tuple(name for name in of_lost if state.world.rank_of(name) is not None)
    is_awaited = any(worker.part is Part.NEWCOMER for worker in lost)
    running = [worker for worker in lost if worker.exit_code is None]
    hung = tuple(worker.local_rank for worker in running if worker.raised is None)
    for worker in lost:
        was_killed = worker.local_rank in hung
        state = state.with_worker(replace(worker, part=Part.LOST, told_to_stop_at=at, was_killed=was_killed))
    replace_at = at + REPLACE_AFTER_S
    # Who waited for a newcomer that is gone has to hear of it, and who never asked for a part is not missed.
    if _is_anyone_elsewhere(state):
        reason = f"On {state.host}, {reason}"
    change = ChangeWorld(lost=names, restarts_used=state.restarts_used, reason=reason)
    commands: list[Command] = [change if names or is_awaited else Tell(reason=reason)]
    if hung:
        commands.append(KillWorkers(local_ranks=hung, reason=f"{_named(hung)} may not hear SIGTERM: SIGKILL at once."))
    if len(hung) < len(running):  # who raised still tears down, and prints its traceback
        commands.append(WakeAt(at=at + state.policy.teardown_timeout_s))
    return replace(state, replace_at=replace_at), [*commands, WakeAt(at=replace_at)]


def _named(local_ranks: tuple[int, ...]) -> str:
    return f"{'Worker' if len(local_ranks) == 1 else 'Workers'} {', '.join(map(str, local_ranks))}"


def end_lost(state: JobState, at: float) -> tuple[JobState, list[Command]]:
    """Ends the lost whose time for an end of their own is over."""
    given_s = state.policy.teardown_timeout_s
    late = tuple(
        worker
        for worker in state.running
        if worker.is_lost and not worker.was_killed and at >= (worker.told_to_stop_at or at) + given_s
    )
    if not late:
        return state, []
    for worker in late:
        state = state.with_worker(replace(worker, was_killed=True))
    local_ranks = tuple(worker.local_rank for worker in late)
    reason = f"The {given_s:g} s for an end of its own are over: SIGKILL to {_named(local_ranks).lower()}."
    return state, [KillWorkers(local_ranks=local_ranks, reason=reason)]


def lost_ended(state: JobState, worker: Worker, event: WorkerExited) -> tuple[JobState, list[Command]]:
    """The process of a lost worker has ended; it is replaced if the others have had their time."""
    state = state.with_worker(replace(worker, exit_code=event.exit_code))
    return (state, []) if state.replace_at is not None else _replace_lost(state)


def replace_if_due(state: JobState, at: float) -> tuple[JobState, list[Command]]:
    """Replaces those whose time has come."""
    if state.replace_at is None or at < state.replace_at:
        return state, []
    return _replace_lost(state)


def _replace_lost(state: JobState) -> tuple[JobState, list[Command]]:
    """Replaces the lost whose processes have ended, unless all others have made their last step."""
    state = replace(state, replace_at=None)
    if _has_anyone_parted(state) or not (_members(state) or _is_anyone_elsewhere(state)):
        return state, []
    commands: list[Command] = []
    for worker in state.workers:
        if worker.is_lost and worker.exit_code is not None:
            state = state.with_worker(replace(worker, part=Part.REPLACING))
            reason = f"rank {worker.rank} restarts."
            commands.append(
                ReplaceWorker(local_rank=worker.local_rank, restarts_used=state.restarts_used, reason=reason)
            )
    return state, commands


def _replaced(state: JobState, event: WorkerReplaced) -> JobState:
    before = state.find(event.worker.local_rank)
    if before is None or before.part is not Part.REPLACING:
        return state
    started = event.worker
    times = before.takes_place + 1
    worker = Worker(local_rank=started.local_rank, rank=started.rank, pid=started.pid, takes_place=times)
    return state.with_worker(worker)


def member_ended(state: JobState, worker: Worker) -> tuple[JobState, list[Command]]:
    """A member ended well before the others did: they go on without it."""
    world = state.world
    if world is None or worker.part is Part.PARTED or world.rank_of(_name(state, worker)) is None:
        return state, []
    if not _members(state) and not _is_anyone_elsewhere(state):
        return _end_newcomers(state)
    reason = f"rank {worker.rank} has ended by itself: the others go on without it."
    return state, [ChangeWorld(lost=(_name(state, worker),), reason=reason)]


def _parted(state: JobState, worker: Worker) -> tuple[JobState, list[Command]]:
    """One member that has made its last step proves that all have: newcomers are not needed any more."""
    return _end_newcomers(state.with_worker(replace(worker, part=Part.PARTED)))


def _end_newcomers(state: JobState) -> tuple[JobState, list[Command]]:
    late = tuple(w.local_rank for w in state.running if w.takes_place and w.part in (Part.NONE, Part.NEWCOMER))
    for local_rank in late:
        each = state.find(local_rank)
        assert each is not None
        state = state.with_worker(replace(each, part=Part.LOST, was_killed=True))
    state = replace(state, replace_at=None)
    return state, [KillWorkers(local_ranks=late, reason="The training is over: newcomers end.")] if late else []


def _has_anyone_parted(state: JobState) -> bool:
    return any(worker.part is Part.PARTED for worker in state.workers)


# -- the same world once more -----------------------------------------------------------------------------------------


def _world_broke(state: JobState, event: WorldBroke) -> tuple[JobState, list[Command]]:
    """Waits a moment: a death explains it, most of the time."""
    if state.world is None or event.world < state.world.number or state.broke is not None:
        return state, []
    return replace(state, broke=event), [WakeAt(at=event.at + _grace_s(state))]


def _grace_s(state: JobState) -> float:
    return BREAK_GRACE_NODES_S if _is_anyone_elsewhere(state) else BREAK_GRACE_S


def reattempt_if_due(state: JobState, at: float) -> tuple[JobState, list[Command]]:
    """Has the same members connect anew if nobody is gone; who complains too often is taken to be the cause (SEV2)."""
    broke = state.broke
    if broke is None or at < broke.at + _grace_s(state):
        return state, []
    state = replace(state, broke=None)
    fault = classify(broke.failure)
    if state.reattempts >= state.policy.retries:
        gone_on = go_on(state, replace(fault, is_consequence=False, severity=Severity.SEV2), at, BROKE_METHOD)
        return (state, []) if gone_on is None else gone_on
    state = replace(state, reattempts=state.reattempts + 1)
    decision = f"All ranks connect anew (attempt {state.reattempts} of {state.policy.retries})."
    verdict = Verdict(restart=True, restarts_used=state.restarts_used, reason=decision, severity=Severity.SEV3)
    cause = RootCause(fault=fault, consequences=(), reason=fault.reason)
    state, booked = _book(state, cause, verdict, at=at, method=BROKE_METHOD, action="reattempt")
    return state, [ChangeWorld(of=broke.world, reason=f"{fault.reason} {decision}"), *booked]
