"""Losses that are answered in place: who goes on without whom, when the lost are replaced, and what cannot be so.

A loss makes the next world without those it took. Where nobody is gone and collectives failed all the same, the same
members connect anew (SEV3). What cannot be answered so is answered as ever: all workers of the node begin again.

The end of a training in place: what becomes of newcomers when the others have made their last step.

A script may ask for a part once more, as one does that trains in epochs, and one rank may end where others do so. So
newcomers wait until all workers of this node that have made their last step have ended well: then there is nothing
left to do, here and on every node, and they end as well. Those who ask once more do so without a rank that has ended.
Where somebody was lost after that step, who may have had the model to write, all begin again. Of whom other nodes lost
each world tells, so that a node whose workers end knows it as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from unicron_elastic.base.incident import Incident
from unicron_elastic.base.text import counted
from unicron_elastic.base.world import EndOfSteps, World
from unicron_elastic.faults import Fault, RootCause, Severity, classify, signature
from unicron_elastic.planning.model.configured import why_begin_again
from unicron_elastic.recovery import node, replica_mates, storms
from unicron_elastic.recovery.commands import (
    ChangeWorld,
    Command,
    KillWorkers,
    RecordIncident,
    ReplaceWorker,
    StartWorkers,
    Tell,
    TellPeers,
    WakeAt,
)
from unicron_elastic.recovery.events import MemberParted, OtherNodesLost, WorkerExited, WorldBroke
from unicron_elastic.recovery.hangs import METHOD as HANG_METHOD
from unicron_elastic.recovery.hangs import hang_after
from unicron_elastic.recovery.node import open_loss_incident
from unicron_elastic.recovery.policy import (
    Life,
    Repeats,
    Verdict,
    climb,
    count_repeats,
    judge,
    may_be_the_scripts,
    why_final,
    why_none_left,
)
from unicron_elastic.recovery.records import judged, open_incident
from unicron_elastic.recovery.replica_mates import named_ranks, who_ends_with, with_mates
from unicron_elastic.recovery.state import (
    JobState,
    Part,
    Phase,
    Worker,
    has_anyone_parted,
    is_anyone_elsewhere,
    is_newcomer,
    is_over,
    living_members,
    members_here,
    members_of,
    name_of,
    named,
)


def parted(state: JobState, worker: Worker, event: MemberParted) -> tuple[JobState, list[Command]]:
    """Book that a worker has made its last step: one that has proves that all have who trained with it."""
    state = state.with_worker(replace(worker, part=Part.PARTED, parted_in=event.world, parted_at=event.total))
    return (state, []) if event.world else end_newcomers(state)


def member_ended(state: JobState, worker: Worker, at: float) -> tuple[JobState, list[Command]]:
    """Decide what follows when a worker ends well: the training is over, or the others go on without it."""
    world = state.world
    if world is None:
        return state, []
    if worker.part is Part.PARTED:
        others = [each for each in state.running if each.part in (Part.MEMBER, Part.PARTED)]
        if worker.parted_in is not None and not all(is_unneeded(state, each) for each in others):
            # Who has made the last step as well may train once more; if what they do breaks, they do.
            has_broken = state.broke is not None or state.unbroken_since > worker.parted_in
            return without_the_ended(replace(state, broke=None), at) if has_broken else (state, [])
        state, commands = end_newcomers(state)
        if worker.parted_in is not None and not is_over(state):
            commands.append(ChangeWorld(over=worker.parted_in, reason=""))
        return state, commands
    is_in = world.rank_of(name_of(state, worker)) is not None
    if is_in and not replica_mates.trains_anyone_else(state, worker) and not is_anyone_elsewhere(state):
        return end_newcomers(state)
    names = replica_mates.whole(state, [name_of(state, worker)])
    state, mates = replica_mates.let_mates_end(state, [worker], at)
    commands = _until_they_end(state, mates, at)
    if is_in:
        who = f"rank {worker.rank} has ended by itself"
        reason = f"{_ended_with(who, mates)}: the others go on without {'them' if mates else 'it'}."
        return state, [ChangeWorld(lost=names, reason=reason), *commands]
    who = f"rank {worker.rank} ended by itself before it came to the others, who train on without it"
    said = f"{_ended_with(who, mates)}."
    is_told = bool(mates) or (worker.takes_place > 0 and bool(members_here(state)))
    return state, [Tell(reason=said), *commands] if is_told else commands


def _ended_with(who: str, mates: Sequence[Worker]) -> str:
    """Return that some have ended, and who ends with them."""
    if not mates:
        return who
    return f"{who}, and {named_ranks(mates, 'ends', 'end')} with it, as a replica is all of its ranks"


def _until_they_end(state: JobState, mates: Sequence[Worker], at: float) -> list[Command]:
    """Have it looked whether they have ended, when their time for that is over."""
    return [WakeAt(at=at + state.policy.teardown_timeout_s)] if mates else []


def without_the_ended(state: JobState, at: float) -> tuple[JobState, list[Command]]:
    """Have those who train once more do so without workers that have ended instead, and others end their steps."""
    world = state.world
    ended = [each for each in state.workers if each.part is Part.PARTED and each.parted_in and each.exit_code == 0]
    if world is None or is_over(state):
        return state, []
    ended = [each for each in ended if world.rank_of(name_of(state, each)) is not None]
    names = replica_mates.whole(state, (name_of(state, each) for each in ended))
    if not 0 < len(names) < world.size:
        return state, []
    state, mates = replica_mates.let_mates_end(state, ended, at)
    who = named_ranks(ended, "has ended by itself", "have ended by themselves")
    who = _ended_with(f"{who} after the last step", mates)
    without = "it" if len(ended) == 1 else "them"
    if len(names) > len(ended):
        without = "its replica" if len(ended) == 1 else "their replicas"
    reason = f"{who}: the others go on without {without}."
    return state, [
        ChangeWorld(lost=names, reason=reason),
        ChangeWorld(parted=_latest_end(ended), reason=""),
        *_until_they_end(state, mates, at),
    ]


def end_without_mates(state: JobState, worker: Worker, at: float) -> tuple[JobState, list[Command]] | None:
    """End a worker that asks for a part, if one of its replica has ended by itself; None if none has.

    Where nobody else trains nothing is done: what it waits for fails.
    """
    ended = replica_mates.have_others_ended(state, worker)
    is_anyone_there = replica_mates.trains_anyone_else(state, worker) or is_anyone_elsewhere(state)
    if not ended or state.world is None or not is_anyone_there:
        return None
    names = replica_mates.names_of(state, worker)
    state, mates = replica_mates.let_mates_end(state.with_worker(replace(worker, part=Part.NEWCOMER)), ended, at)
    reason = f"{_ended_with(named_ranks(ended, 'has ended', 'have ended'), mates)}."
    commands = _until_they_end(state, mates, at)
    return state, [ChangeWorld(lost=names, reason=reason) if names else Tell(reason=reason), *commands]


def _latest_end(have_parted: Iterable[Worker]) -> EndOfSteps:
    return max(EndOfSteps(worker.parted_in or 0, worker.parted_at) for worker in have_parted)


def left_to_the_others(state: JobState, before: World | None) -> tuple[JobState, list[Command]]:
    """Have those who still wait for the end of their steps do so without others, who have left it.

    Whoever will not train once more leaves the world; of the others it is told that all had come to that end.
    """
    world = state.world
    have_parted = [worker for worker in state.workers if worker.part is Part.PARTED]
    if world is None or world.number == 1 or not have_parted:
        return state, []
    gone = [
        worker
        for worker in state.workers
        if worker.is_lost or (worker in have_parted and (not worker.parted_in or worker.exit_code == 0))
    ]
    names = tuple(name for name in (name_of(state, worker) for worker in gone) if world.rank_of(name) is not None)
    names = replica_mates.whole(state, names)
    for worker in gone:  # whose mates cannot make another step either
        for mate in replica_mates.mates(state, worker):
            if mate.part is Part.MEMBER and name_of(state, mate) in names:
                end = replace(mate, part=Part.PARTED, parted_in=worker.parted_in, parted_at=worker.parted_at)
                state = state.with_worker(end)
    reason = "The training is over: those who still make their last step do so without the others."
    commands: list[Command] = [ChangeWorld(lost=names, reason=reason)] if names else []
    parted = _latest_end(have_parted)
    if parted.world and parted > world.parted and before is not None and world.breaks(before):
        commands.append(ChangeWorld(parted=parted, reason=""))
    return state, commands


def end_newcomers(state: JobState) -> tuple[JobState, list[Command]]:
    """End those who have not come to the others before these made their last steps."""
    late = [worker for worker in state.running if is_unneeded(state, worker)]
    for each in late:
        state = state.with_worker(replace(each, part=Part.LOST, was_killed=True))
    state = replace(state, replace_at=None)
    if not late:
        return state, []
    too_late = "came too late for the last step and"
    reason = f"The training is over: {named_ranks(late, f'{too_late} ends', f'{too_late} end')}."
    return state, [KillWorkers(local_ranks=tuple(each.local_rank for each in late), reason=reason)]


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
    lost += ["a rank of another node"] if world.lost_in >= made_in else []
    what = "was lost after the last step, and nobody does what it had to do there: all workers begin again."
    return f"{lost[0]} {what}" if lost else ""


def is_unneeded(state: JobState, worker: Worker) -> bool:
    """Return whether a worker has not come to the others before these made their last steps, nor have its mates."""
    mates = (each for each in replica_mates.mates(state, worker) if each.exit_code is None and not each.is_lost)
    return all(_is_late(state, each) for each in (worker, *mates))


def _is_late(state: JobState, worker: Worker) -> bool:
    """Return whether a worker has not come to the others before these made their last steps, if they have."""
    made_in = max((each.parted_in or 0 for each in state.workers if each.part is Part.PARTED), default=0)
    if state.world is not None:
        made_in = max(made_in, state.world.over)
    if worker.part is Part.MEMBER:
        return worker.since > made_in > 0
    return worker.part in (Part.NONE, Part.NEWCOMER) and (worker.takes_place > 0 or state.came_late)


REPLACE_AFTER_S = 0.25  # the survivors step first, if they do within this time: they need the processors
BROKE_METHOD = "exception propagation"
NOBODY_LEFT = "All who had the training state are lost: all workers begin again."
NO_STATE_LEFT = "NoStateLeft"  # the exception of a world in which nobody has the training state
BREAK_GRACE_S = 0.1  # within which a death is known that explains why collectives failed
BREAK_GRACE_NODES_S = 0.5  # ... if it may be that of a node


def go_on(state: JobState, fault: Fault, at: float, method: str) -> tuple[JobState, list[Command]] | None:
    """Leaves out whom this fault took, if the others can go on without; None if all workers have to begin again."""
    taken = _taken(state, fault, method)
    lost = _with_living_mates(state, taken)
    if state.phase is not Phase.RUNNING:
        return None
    if _does_nobody_need(state, lost):
        return _leave_out(state, lost, at, f"{fault.reason} Nobody needs it now.", taken)
    if not lost or not _can_others_go_on(state, lost) or _has_nobody_the_state(fault):
        return None
    is_final = why_final(state.policy, (fault.failure,)) is not None
    if not is_final and node.cannot_take_the_state(fault):
        return give_up(state, fault, at, method) or _leave_to_the_others(state, fault, lost, at)
    cause = RootCause(fault=fault, consequences=_raised_for_it(lost, taken), reason=fault.reason)
    if not is_final and all(is_newcomer(state, each) for each in lost):
        repeats, verdict = _answer_on_the_way(state, cause, lost, at)
    else:
        is_known = is_being_answered(state, fault, at)
        repeats = state.repeats if is_known else count_repeats(state.repeats, cause, _life(state, fault, at))
        verdict = judge(state.policy, state.restarts_used - is_known, repeats, (fault.failure,))
        verdict = replace(verdict, reason=f"{_who_goes_on(state, lost)} {verdict.reason}")
    if not verdict.restart:
        return None
    verdict = replace(verdict, reason=f"{_who_ends(lost, taken)}{verdict.reason}")
    attempts, rung = climb(state.attempts, fault, at, state.policy)
    why_stay = node.why_not_ask(state, why_not_in_place(state, -1)) if rung.severity is Severity.SEV1 else ""
    said = verdict.reason
    if why_stay:
        verdict = replace(verdict, reason=" ".join(filter(None, (said, rung.reason, f"The node stays: {why_stay}"))))
    verdict = replace(verdict, severity=rung.severity)
    state = replace(state, attempts=attempts, repeats=repeats, restarts_used=verdict.restarts_used, broke=None)
    does_ask = rung.severity is Severity.SEV1 and not why_stay
    is_noticed = does_ask or _is_missed(state, lost)
    state, booked = _book(state, cause, verdict, at=at, method=method, is_noticed=is_noticed)
    state, commands = _leave_out(state, lost, at, f"{fault.reason} {verdict.reason}", taken)
    answered = (signature(fault.failure), fault.failure.step) if state.incident is not None else None
    state = replace(hang_after(state, lost), answered=answered)
    if not does_ask:
        return state, [*commands, *booked]
    state, asks = node.ask_to_leave(state, cause, rung, verdict)
    return state, [*commands, *booked, *asks]


def _answer_on_the_way(
    state: JobState, cause: RootCause, lost: tuple[Worker, ...], at: float
) -> tuple[Repeats | None, Verdict]:
    """Decide to start newcomers once more, which is no loss of its own, unless it is sure that they fail again.

    The others make progress meanwhile; starts in vain have a limit, see ``storms``.
    """
    repeats = state.repeats
    if node.has_never_trained(state):
        repeats = count_repeats(repeats, cause, _life(state, cause.fault, at))
        verdict = judge(state.policy, 0, repeats, (cause.fault.failure,))
        if not verdict.restart:
            return repeats, verdict
    who = named_ranks(lost, "is", "are")
    reason = f"{_who_trains_on(state, lost)} {who} started again, which counts as no restart."
    return repeats, Verdict(restart=True, restarts_used=state.restarts_used, reason=reason)


def give_up(state: JobState, fault: Fault, at: float, method: str) -> tuple[JobState, list[Command]] | None:
    """Train on without replacements that do not come to train; None if nobody of this node trains."""
    taken = tuple(each for each in state.workers if each.local_rank == fault.failure.local_rank)
    lost = with_mates(state, taken)
    if not any(each.part in (Part.MEMBER, Part.PARTED) for each in state.running if each not in lost):
        return None
    if state.phase is not Phase.RUNNING or is_over(state):
        return None
    cause = RootCause(fault=fault, consequences=_raised_for_it(lost, taken), reason=fault.reason)
    running = tuple(each for each in lost if not _is_gone(each))
    reason = f"{_who_trains_on(state, lost)} {named_ranks(lost, 'is', 'are')} not replaced any more."
    reason = f"{_who_ends(running, taken)}{reason}"
    verdict = Verdict(restart=True, restarts_used=state.restarts_used, reason=reason)
    is_over_with = not running
    is_noticed = not is_over_with and _is_missed(state, lost)
    state, booked = _book(state, cause, verdict, at=at, method=method, is_noticed=is_noticed)
    lost = tuple(replace(each, is_given_up=True) for each in lost)
    for each in lost:
        state = state.with_worker(each)
    running = tuple(each for each in lost if not _is_gone(each))
    if is_over_with:
        return state, [Tell(reason=f"{fault.reason} {reason}"), *booked]
    state, commands = _leave_out(state, running, at, f"{fault.reason} {reason}", taken)
    return hang_after(state, lost), [*commands, *booked]


def _leave_to_the_others(
    state: JobState, fault: Fault, lost: tuple[Worker, ...], at: float
) -> tuple[JobState, list[Command]] | None:
    """Have this node leave, where nobody trains, for others that do; None if it is not worth asking."""
    does_ask = state.recall is not None and state.recall.departure is not None
    if node.is_only_on_its_way(state) or not (does_ask or is_worth_asking(state)):
        return None
    taken = [each for each in lost if each.local_rank == fault.failure.local_rank]
    ends = _who_ends(lost, taken).rstrip()
    state, commands = _leave_out(state, lost, at, " ".join(filter(None, (fault.reason, ends))), taken)
    state, asks = (state, []) if does_ask else node.ask_for(state, fault)
    return state, [*commands, *asks]


def is_worth_asking(state: JobState) -> bool:
    """Whether this node may leave, as far as it is known here, and the others could go on in place without it."""
    return not node.why_not_ask(state, why_not_in_place(state, -1))


def begun_again(incident: Incident, why: str) -> Incident:
    """Return the incident rewritten as a full restart, for ``why`` if others say so; no member will close it."""
    if not tells_itself(incident) or incident.first_step_at is not None:
        return incident
    return replace(incident, action="restart", decision=why or incident.decision, regrouped_at=None)


def tells_itself(incident: Incident) -> bool:
    """Whether its end is told by the members that went on."""
    return incident.action in ("go on", "reattempt")


def is_being_answered(state: JobState, fault: Fault, at: float) -> bool:
    """Whether a restart was used for it already.

    It follows from the loss that is being answered, or is the same bug of the script, met by another rank at the same
    step.
    """
    gone = state.find(fault.failure.local_rank)
    if state.answered is None or gone is None:
        return False
    is_bug = may_be_the_scripts(fault, _life(state, fault, at))
    is_same = state.answered == (signature(fault.failure), fault.failure.step) and not gone.takes_place
    return fault.is_consequence or (is_bug and is_same)


def _life(state: JobState, fault: Fault, at: float) -> Life:
    """How far the process came whose fault it is, while others go on."""
    local_rank = fault.failure.local_rank
    gone = state.find(local_rank)
    began_at = max((start.at for start in state.starts if start.local_rank == local_rank), default=state.began_at)
    return Life(
        lived_s=at - began_at,
        has_saved=None if gone is None else gone.has_saved,
        has_restored=None if gone is None else gone.has_restored,
    )


def _taken(state: JobState, fault: Fault, method: str) -> tuple[Worker, ...]:
    """Return whom the fault took: the worker that failed, and all who hang if that is the fault."""
    hung = state.hang.local_ranks if state.hang is not None and method == HANG_METHOD else ()
    taken = {fault.failure.local_rank, *hung}
    return tuple(worker for worker in state.workers if worker.local_rank in taken and not _is_gone(worker))


def _does_nobody_need(state: JobState, lost: tuple[Worker, ...]) -> bool:
    """Whether the others have made their last steps without these."""
    is_at_an_end = state.world is not None and has_anyone_parted(state)
    return bool(lost) and is_at_an_end and all(is_unneeded(state, worker) for worker in lost)


def _with_living_mates(state: JobState, taken: Iterable[Worker]) -> tuple[Worker, ...]:
    """Return these and all of their replicas who are not lost yet."""
    return tuple(each for each in with_mates(state, taken) if not _is_gone(each))


def _not_taken(lost: Iterable[Worker], taken: Iterable[Worker]) -> list[Worker]:
    of_fault = {each.local_rank for each in taken}
    return [each for each in lost if each.local_rank not in of_fault]


def _who_ends(lost: Sequence[Worker], taken: Sequence[Worker]) -> str:
    """Return who is lost because of a mate, as a sentence with a space behind it; "" if nobody is."""
    said = who_ends_with(_not_taken(lost, taken), taken)
    return f"{said} " if said else ""


def _raised_for_it(lost: Iterable[Worker], taken: Iterable[Worker]) -> tuple[Fault, ...]:
    """Return what mates of those whom a fault took have raised, which was left to be explained."""
    return tuple(classify(each.raised) for each in _not_taken(lost, taken) if each.raised is not None)


def awaits_cause(state: JobState, worker: Worker, fault: Fault) -> bool:
    """Whether it is waited for the death of a mate, which may explain what a worker has raised."""
    if not fault.is_consequence or not replica_mates.may_be_explained(state, worker):
        return False
    return _can_others_go_on(state, _with_living_mates(state, [worker]))


def unexplained(state: JobState, at: float) -> Fault | None:
    """Return what a worker has raised that no death of a mate explains, when it is time to act on that."""
    raised = [each.raised for each in state.workers if each.raised is not None and not _is_gone(each)]
    due = [failure for failure in raised if at >= failure.at + replica_mates.CAUSE_GRACE_S]
    return classify(due[0]) if due else None


def _has_nobody_the_state(fault: Fault) -> bool:
    """A newcomer says that all who had it are gone: then it is in snapshots, which all together go back to."""
    return (fault.failure.exception_type or "").rpartition(".")[2] == NO_STATE_LEFT


def _is_gone(worker: Worker) -> bool:
    return worker.part in (Part.LOST, Part.REPLACING)


def _can_others_go_on(state: JobState, lost: tuple[Worker, ...]) -> bool:
    """Whether somebody with the training state is left, and nobody who cannot go on in place."""
    if state.phase is not Phase.RUNNING or state.world is None:
        return False
    if is_over(state) or any(_trains_no_more(worker) for worker in state.workers):
        return False
    others = [worker for worker in state.running if worker not in lost]
    if any(_may_never_ask(state, worker) for worker in (*lost, *others)):
        return False
    return any(worker.part in (Part.MEMBER, Part.PARTED) for worker in others) or is_anyone_elsewhere(state)


def _trains_no_more(worker: Worker) -> bool:
    """Whether it is known to have made its last step of all: then what a lost one had to do at its end nobody does."""
    return worker.part is Part.PARTED and (worker.parted_in is None or worker.exit_code == 0)


def _may_never_ask(state: JobState, worker: Worker) -> bool:
    """Whether its script may do without worlds: not where others train in one, which it is on its way to."""
    return worker.part is Part.NONE and not worker.takes_place and not state.came_late


def go_on_without(state: JobState, event: OtherNodesLost) -> tuple[JobState, list[Command]] | None:
    """Leaves out the members of nodes that are gone; None if all workers here have to begin again."""
    world = state.world
    if world is None or not _can_others_go_on(state, ()):
        return None
    lost = members_of(world, event.nodes)
    if not lost:
        return state, []
    if len(lost) == world.size:  # those of this node are lost, too, and wait for their replacements
        return None
    if why_none_left(state.policy, state.restarts_used) is not None:
        return None
    used = state.restarts_used + 1
    decision = f"{_ranks_go(state, world.size - len(lost))} Restart {used} of {state.policy.max_restarts}."
    state, superseded = open_loss_incident(state, event)
    assert state.incident is not None
    incident = replace(state.incident, action="go on", decision=decision, stopped_at=event.at, restarts_used=used)
    said = f"{event.reason} {decision}"
    commands: list[Command] = [ChangeWorld(lost=lost, restarts_used=used, lost_in=world.number, reason=said)]
    commands += [] if superseded is None else [RecordIncident(incident=superseded)]
    state = replace(state, incident=incident, broke=None, reattempts=0)  # it explains what broke
    return state, [*commands, RecordIncident(incident=incident)]


def is_in_place(state: JobState) -> bool:
    """Whether all workers here can go on without, and with, others."""
    return _can_others_go_on(state, ())


def why_not_in_place(state: JobState, more: int) -> str:
    """Why all workers that could go on in place must begin again for so many nodes more or less, "" if they need not.

    The loss of a node is no such change: it must not cost the steps since the checkpoint.
    """
    if state.world is None or not is_in_place(state):
        return ""
    nodes = len({member.node for member in state.world.members})
    return why_begin_again(state.policy.configurations, state.started_on, nodes + more)


def _ranks_go(state: JobState, left: int) -> str:
    does = "it does" if left == 1 else "they do"
    where = f"with what {does} between steps" if has_anyone_parted(state) else "from the failed step"
    return f"{counted(left, 'rank goes', 'ranks go')} on {where}."


def _who_goes_on(state: JobState, lost: tuple[Worker, ...]) -> str:
    """Return who goes on from the step that failed; where the lost had not trained yet, none did."""
    if not _are_in(state, lost):
        return f"{counted(_ranks_left(state, lost), 'rank trains', 'ranks train')} on."
    return _ranks_go(state, _ranks_left(state, lost))


def _who_trains_on(state: JobState, lost: tuple[Worker, ...]) -> str:
    return f"{counted(_ranks_left(state, lost), 'rank trains', 'ranks train')} on:"


def _ranks_left(state: JobState, lost: tuple[Worker, ...]) -> int:
    """Return how many train on; who was lost just before may not be out of the world yet."""
    assert state.world is not None
    here = set(living_members(state)) - {name_of(state, worker) for worker in lost}
    return sum(member.node != state.node or member.name in here for member in state.world.members)


def _book(
    state: JobState,
    cause: RootCause,
    verdict: Verdict,
    *,
    at: float,
    method: str,
    action: str = "go on",
    is_noticed: bool = True,
) -> tuple[JobState, list[Command]]:
    """The state with an incident whose verdict is passed already; it is over if the others do not notice it."""
    # The evidence of a hang is still to come into its own.
    is_open = is_noticed or state.incident is not None or method == HANG_METHOD
    state, superseded = open_incident(state, cause.fault, at, method)
    assert state.incident is not None
    incident = replace(judged(state.incident, cause, at, verdict), action=action)
    if not is_open:
        incident = replace(incident, regrouped_at=at, first_step_at=at)
    commands: list[Command] = [] if superseded is None else [RecordIncident(incident=superseded)]
    return replace(state, incident=incident if is_open else None), [*commands, RecordIncident(incident=incident)]


def _is_missed(state: JobState, lost: tuple[Worker, ...]) -> bool:
    """Whether the others go on in another world without these: they have trained, or wait to be let in."""
    return _are_in(state, lost) or any(worker.part is Part.NEWCOMER for worker in lost)


def _are_in(state: JobState, lost: tuple[Worker, ...]) -> bool:
    assert state.world is not None
    return any(state.world.rank_of(name_of(state, worker)) is not None for worker in lost)


def _leave_out(
    state: JobState, lost: tuple[Worker, ...], at: float, reason: str, taken: Sequence[Worker]
) -> tuple[JobState, list[Command]]:
    """Let the others go on without them, end those who still run, and replace them soon.

    ``taken`` are those whom the fault took, and the others end with them.
    """
    assert state.world is not None
    of_lost = (name_of(state, worker) for worker in lost)
    names = tuple(name for name in of_lost if state.world.rank_of(name) is not None)
    is_missed = _is_missed(state, lost)
    number = state.world.number
    running = [worker for worker in lost if worker.exit_code is None]
    mates = _not_taken(running, taken)
    hung = tuple(worker.local_rank for worker in running if worker.raised is None and worker not in mates)
    for worker in lost:
        was_killed = worker.local_rank in hung or worker in mates
        has_trained = worker.part is Part.MEMBER and (worker.went_on_in or not worker.takes_place)
        lost_in = number if has_trained or worker.part is Part.PARTED else worker.lost_in
        left = replace(worker, part=Part.LOST, told_to_stop_at=at, was_killed=was_killed, lost_in=lost_in)
        state = state.with_worker(left)
    replace_at = at + REPLACE_AFTER_S
    # Who waited for a newcomer that is gone has to hear of it, and who never asked for a part is not missed.
    if is_anyone_elsewhere(state):
        reason = f"On {state.host}, {reason}"
    lost_in = number if any(worker.lost_in == number for worker in state.workers) else 0
    change = ChangeWorld(lost=names, restarts_used=state.restarts_used, lost_in=lost_in, reason=reason)
    commands: list[Command] = [change if is_missed else Tell(reason=reason)]
    if hung:
        commands.append(KillWorkers(local_ranks=hung, reason=f"{named(hung)} may not hear SIGTERM: SIGKILL at once."))
    if mates:
        of_mates = tuple(each.local_rank for each in mates)
        why = who_ends_with(mates, taken)
        commands.append(KillWorkers(local_ranks=of_mates, reason="" if why in reason else why))  # once is enough
    if len(hung) + len(mates) < len(running):  # who raised still tears down, and prints its traceback
        commands.append(WakeAt(at=at + state.policy.teardown_timeout_s))
    return replace(state, replace_at=replace_at), [*commands, WakeAt(at=replace_at)]


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
    reason = f"The {given_s:g} s for an end of its own are over: SIGKILL to {named(local_ranks).lower()}."
    return state, [KillWorkers(local_ranks=local_ranks, reason=reason)]


def lost_ended(state: JobState, worker: Worker, event: WorkerExited) -> tuple[JobState, list[Command]]:
    """The process of a lost worker has ended; it is replaced if the others have had their time."""
    state = state.with_worker(replace(worker, exit_code=event.exit_code))
    return (state, []) if state.replace_at is not None else replace_lost(state, event.at)


def replace_if_due(state: JobState, at: float) -> tuple[JobState, list[Command]]:
    """Replaces those whose time has come."""
    if state.replace_at is None or at < state.replace_at:
        return state, []
    return replace_lost(state, at)


def replace_lost(state: JobState, at: float) -> tuple[JobState, list[Command]]:
    """Replaces the lost whose processes have ended, unless all others have made their last step.

    Who was started often of late is replaced later, and those of one replica are replaced together.
    """
    put_off, state = state.replace_at, replace(state, replace_at=None)
    is_wanted = bool(members_here(state)) or is_anyone_elsewhere(state)
    if state.leaves or has_anyone_parted(state) or is_over(state) or not is_wanted:
        return state, []
    commands: list[Command] = []
    for lost in replica_mates.replicas_of(state, (each for each in state.workers if each.is_lost)):
        if any(each.exit_code is None or each.is_given_up for each in lost):
            continue
        local_ranks = [each.local_rank for each in lost]
        start_at = storms.may_start_at(state, local_ranks, at)
        if start_at > at:
            if start_at != put_off:
                said = f"{named_ranks(lost, 'restarts', 'restart')} in {start_at - at:.0f} s,"
                commands.append(Tell(reason=f"{said} {storms.why_later(state, local_ranks, at)}."))
            state = replace(state, replace_at=min(start_at, state.replace_at or start_at))
            commands.append(WakeAt(at=start_at))
            continue
        for worker in lost:
            state = state.with_worker(replace(worker, part=Part.REPLACING))
            reason = f"rank {worker.rank} restarts."
            commands.append(
                ReplaceWorker(local_rank=worker.local_rank, restarts_used=state.restarts_used, reason=reason)
            )
    return state, commands


def is_nobody_left(state: JobState) -> bool:
    """Whether all were lost here, none of them at its end, while those elsewhere were lost as well."""
    are_lost = all(worker.is_lost and worker.exit_code != 0 for worker in state.workers)
    return are_lost and not has_anyone_parted(state) and not is_over(state)


def begin_again(state: JobState) -> tuple[JobState, list[Command]]:
    """Begin again on all nodes: each may have counted on the others to go on. The restart is counted already."""
    commands: list[Command] = [TellPeers(reason=NOBODY_LEFT)]
    if state.incident is not None:  # whose end no member will tell any more
        incident = replace(state.incident, action="restart", decision=NOBODY_LEFT)
        state = replace(state, incident=incident)
        commands.append(RecordIncident(incident=incident))
    starts = StartWorkers(restarts_used=state.restarts_used, reason=NOBODY_LEFT)
    return replace(state, phase=Phase.IDLE), [*commands, starts]


def world_broke(state: JobState, event: WorldBroke) -> tuple[JobState, list[Command]]:
    """Waits a moment: a death explains it, most of the time."""
    if state.world is None or state.broke is not None or is_over(state):
        return state, []
    if event.world < (state.unbroken_since if event.outlives_joins else state.world.number):
        return state, []
    state, ended = without_the_ended(state, event.at)
    if ended:
        return state, ended
    return replace(state, broke=event), [WakeAt(at=event.at + _grace_s(state))]


def _grace_s(state: JobState) -> float:
    """Return how long a death may take to be known; who is known to end is waited for."""
    if any(each.ending_at is not None for each in state.running):
        return state.policy.teardown_timeout_s
    return BREAK_GRACE_NODES_S if is_anyone_elsewhere(state) else BREAK_GRACE_S


def cause_of_breaks(state: JobState, at: float) -> Fault | None:
    """Take who complains too often of its collectives for the cause (SEV2), when it is time to act on that."""
    broke = state.broke
    if broke is None or at < broke.at + _grace_s(state) or state.reattempts < state.policy.retries:
        return None
    return replace(classify(broke.failure), is_consequence=False, severity=Severity.SEV2)


def reattempt_if_due(state: JobState, at: float) -> tuple[JobState, list[Command]]:
    """Connect the same members anew if nobody is gone."""
    broke = state.broke
    if broke is None:
        return state, []
    if at < (due_at := broke.at + _grace_s(state)):
        return state, [WakeAt(at=due_at)]
    fault = classify(broke.failure)
    state = replace(state, broke=None, reattempts=state.reattempts + 1)
    decision = f"All ranks connect anew (attempt {state.reattempts} of {state.policy.retries})."
    verdict = Verdict(restart=True, restarts_used=state.restarts_used, reason=decision, severity=Severity.SEV3)
    cause = RootCause(fault=fault, consequences=(), reason=fault.reason)
    state, booked = _book(state, cause, verdict, at=at, method=BROKE_METHOD, action="reattempt")
    assert state.world is not None
    return state, [ChangeWorld(of=state.world.number, reason=f"{fault.reason} {decision}"), *booked]
