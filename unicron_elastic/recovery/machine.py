"""The recovery state machine of one job on one node: ``handle(state, event) -> (state, commands)``.

    IDLE --workers started--> RUNNING --all ended well--> FINISHED
                                 |  fault, peer's fault, membership
                                 v
                              STOPPING --all ended--> IDLE (start again) or FINISHED (failed)

Workers that train in place go on without one that is lost (``in_place``, ``worker_loss``). Else a fault stops every
worker of the node and a new generation starts, as torchrun does it; the verdict is passed when all workers have ended,
because only then every report that tells the root cause from its consequences is in.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import replace

from unicron_elastic.faults import Failure, Fault, Status, classify, left_early, root_cause
from unicron_elastic.recovery import departure, in_place, node, node_loss, storms, worker_loss
from unicron_elastic.recovery.commands import (
    AskToLeave,
    Command,
    FailJob,
    FinishJob,
    KillWorkers,
    RecordIncident,
    StartWorkers,
    TellPeers,
    WakeAt,
)
from unicron_elastic.recovery.events import (
    Event,
    EvidenceGathered,
    FirstStepDone,
    LeaveAnswered,
    MemberEntered,
    MembershipChanged,
    NodeRecalled,
    NodesDepart,
    NodesSilent,
    NodeUnhealthy,
    OtherNodesLost,
    PeerFailed,
    StepEnded,
    TakenForLost,
    TimePassed,
    WatchBegan,
    WorkerEnding,
    WorkerExited,
    WorkerOutOfStep,
    WorkerRaised,
    WorkersGoOn,
    WorkersHung,
    WorkersStarted,
)
from unicron_elastic.recovery.hangs import (
    METHOD,
    about_hang,
    hang_fault,
    left_alone,
    observed,
    out_of_step_fault,
    told_if_due,
    why_act,
)
from unicron_elastic.recovery.node import (
    explained,
    is_only_on_its_way,
    leave_answered,
    left,
    may_leave,
    node_unhealthy,
    turn_back,
    weigh,
)
from unicron_elastic.recovery.policy import (
    Life,
    climb,
    count_repeats,
    judge,
    restarts_after_progress,
    why_none_left,
)
from unicron_elastic.recovery.records import judged, open_incident
from unicron_elastic.recovery.replica_mates import CAUSE_GRACE_S
from unicron_elastic.recovery.state import JobState, Phase, Worker, named
from unicron_elastic.recovery.stopping import end_of_teardown, not_told, stop, stop_ending, summon


def handle(state: JobState, event: Event) -> tuple[JobState, list[Command]]:
    """The state after ``event`` and what the agent is to do now. Events that come too late change nothing."""
    if _is_too_late(state, event):
        return state, []
    used_before = state.restarts_used
    state, commands = _handled(state, event)
    for ends in (_end_storm, _begin_again_at_the_end):
        state, more = ends(state, event.at)
        commands += more
    if state.running or state.awaits_replacements or state.phase not in (Phase.RUNNING, Phase.STOPPING):
        return storms.pace(state, used_before, commands, event.at)
    state, more = _all_ended(state, event.at)
    return storms.pace(state, used_before, commands + more, event.at)


def _handled(state: JobState, event: Event) -> tuple[JobState, list[Command]]:
    match event:
        case WorkersStarted():
            return _workers_started(state, event)
        case WorkerRaised() | WorkerEnding() | WorkerExited():
            return _about_worker(state, event)
        case FirstStepDone():
            return _first_step_done(state, event)
        case WorkersHung() | WorkersGoOn() | WatchBegan():
            return about_hang(state, event)
        case WorkerOutOfStep():
            return _worker_out_of_step(state, event)
        case EvidenceGathered():
            return _evidence_gathered(state, event)
        case NodeUnhealthy() | NodeRecalled() | StepEnded() | LeaveAnswered():
            return _about_node(state, event)
        case PeerFailed() | OtherNodesLost() | NodesSilent() | TakenForLost() | NodesDepart():
            return _about_peers(state, event)
        case MembershipChanged():
            return departure.nodes_join(state, event)
        case TimePassed():
            return _time_passed(state, event)
        case MemberEntered():
            state, commands = in_place.about_world(state, event)
            state, more = departure.trains_again(state, event.at)
            return state, [*commands, *more]
        case _:
            return in_place.about_world(state, event)


def _is_too_late(state: JobState, event: Event) -> bool:
    """Whether the event speaks to a job that is over, or of a generation that is not the present one."""
    if state.phase is Phase.FINISHED:
        return True
    if isinstance(event, WorkersStarted):
        return state.phase is not Phase.IDLE  # none was asked for, and those that run must not be forgotten
    if isinstance(event, WorkerRaised | NodeUnhealthy | NodeRecalled | LeaveAnswered | TimePassed):
        return False  # known by its pid; of the node, whatever runs there; compared with the deadlines
    return event.generation not in (None, state.generation)


def _workers_started(state: JobState, event: WorkersStarted) -> tuple[JobState, list[Command]]:
    workers = tuple(Worker(local_rank=w.local_rank, rank=w.rank, pid=w.pid) for w in event.workers)
    opened = node_loss.known_late(state, event.why_lost)
    opened = None if opened is None else worker_loss.begun_again(opened, state.summons)
    state = replace(
        state,
        phase=Phase.RUNNING,
        generation=state.generation + 1,
        restarts_used=event.restarts_used,
        workers=workers,
        faults=(),
        summons="",
        lost="",
        join=None,
        started_on=event.nodes,
        began_at=event.at,
        counts_as_restart=True,
        why_stay=event.why_stay,
        recall=None,  # of which the new round tells
        node=event.node,
        replica_size=1,  # until these workers say another
        observed=None,
        world=None,
        unbroken_since=0,
        came_late=event.do_others_train,
        is_left_out=False,
        gone=frozenset(),
        silent=None,
        broke=None,
        reattempts=0,
        answered=None,
        replace_at=None,
    )
    state = storms.started(state, [worker.local_rank for worker in workers], event.at)
    commands: list[Command] = []
    if opened is not None and opened.regrouped_at is None:
        incident = replace(opened, regrouped_at=event.at, restarts_used=event.restarts_used)
        state, commands = replace(state, incident=incident), [RecordIncident(incident=incident)]
    if state.broken is None or not may_leave(state):
        return state, commands
    state, more = _node_unhealthy(state, replace(state.broken, at=event.at))  # it had to stay until now
    return state, [*commands, *more]


def _about_worker(state: JobState, event: WorkerRaised | WorkerEnding | WorkerExited) -> tuple[JobState, list[Command]]:
    if isinstance(event, WorkerRaised):
        return _worker_raised(state, event)
    if isinstance(event, WorkerExited):
        return _worker_exited(state, event)
    return _worker_ending(state, event), []


def _worker_raised(state: JobState, event: WorkerRaised) -> tuple[JobState, list[Command]]:
    worker = state.find(event.failure.local_rank, event.failure.pid)
    if worker is None or worker.exit_code is not None or worker.raised is not None:
        return state, []
    ended = replace(worker, raised=event.failure, step=event.failure.step)
    state = state.with_worker(replace(ended, has_saved=event.has_saved, has_restored=event.has_restored))
    if not _came_before_stop(worker, event.failure.at) or worker.is_lost:
        return state, []  # an exception on SIGTERM is how many scripts stop, and whose loss is known has no other fault
    fault = classify(event.failure)
    if worker_loss.awaits_cause(state, worker, fault):
        return state, [WakeAt(at=event.at + CAUSE_GRACE_S)]
    return _fault_noticed(state, fault, event.at, worker_loss.BROKE_METHOD)


def _worker_ending(state: JobState, event: WorkerEnding) -> JobState:
    worker = state.find(event.local_rank)
    if worker is None or worker.exit_code is not None or worker.told_to_stop_at is not None:
        return state
    return state.with_worker(replace(worker, ending_at=event.at))


def _worker_exited(state: JobState, event: WorkerExited) -> tuple[JobState, list[Command]]:
    worker = state.find(event.local_rank)
    if worker is None or worker.exit_code is not None:
        return state, []
    step = worker.step if event.step is None else event.step
    state = state.with_worker(
        replace(
            worker,
            exit_code=event.exit_code,
            step=step,
            left_at=event.ended_at if event.exit_code == 0 and _came_before_stop(worker, event.ended_at) else None,
            has_saved=event.has_saved,
            has_restored=event.has_restored,
        )
    )
    commands: list[Command] = []
    if worker.is_lost and state.phase is Phase.RUNNING:
        state, commands = worker_loss.lost_ended(state, worker, event)
    elif worker.raised is not None and state.phase is Phase.RUNNING:  # which was left to be explained, and is not
        fault = classify(replace(worker.raised, exit_code=event.exit_code))
        state, commands = _fault_noticed(state, fault, event.at, worker_loss.BROKE_METHOD)
    elif event.exit_code == 0 and state.phase is Phase.RUNNING:
        state, commands = worker_loss.member_ended(state, worker, event.at)
    elif any(f.failure.local_rank == worker.local_rank for f in state.faults):
        state = _add_exit_code(state, worker.local_rank, event.exit_code)
    elif event.exit_code != 0 and not _was_forgiven(state, worker) and _is_fault(state.phase, worker, event):
        state, commands = _ended_badly(state, worker, event)
    return state, commands


def _ended_badly(state: JobState, worker: Worker, event: WorkerExited) -> tuple[JobState, list[Command]]:
    fault = classify(_failure_at_exit(worker, event))
    was_stopping = state.phase is Phase.STOPPING
    state, commands = _fault_noticed(state, fault, event.at, "process supervision")
    if not was_stopping:
        return state, commands
    # Who raised because of a peer's end has nothing left to tell, and it may take long to tear down.
    followers = {each.failure.local_rank for each in state.faults if each.is_consequence}
    followers -= {each.failure.local_rank for each in state.faults if not each.is_consequence}
    state, more = stop_ending(state, event.at, fault.reason, [w for w in not_told(state) if w in followers])
    return state, commands + more


def _came_before_stop(worker: Worker, at: float) -> bool:
    return worker.told_to_stop_at is None or at < worker.told_to_stop_at


def _was_forgiven(state: JobState, worker: Worker) -> bool:
    """Whether it raised for the end of a peer that stopped for a newcomer, or was lost, and now ends for that."""
    is_known = state.phase is Phase.STOPPING and (not state.counts_as_restart or state.lost != "")
    return is_known and worker.raised is not None and worker.told_to_stop_at is None


def _is_fault(phase: Phase, worker: Worker, event: WorkerExited) -> bool:
    """A worker told to stop may end as it likes, but not by a signal that we did not send.

    The kernel tells of a killed process only when its memory is freed, milliseconds after its sockets closed: the
    errors of its peers, and so our SIGTERM, often come first.
    """
    if phase is Phase.STOPPING and event.exit_code == -signal.SIGTERM:
        return False
    if _came_before_stop(worker, event.ended_at):
        return True
    ours = -signal.SIGKILL if worker.was_killed else -signal.SIGTERM
    return event.exit_code < 0 and event.exit_code != ours


def _failure_at_exit(worker: Worker, event: WorkerExited) -> Failure:
    ended = replace(worker, exit_code=event.exit_code, step=event.step)
    return replace(_failure_of(ended, event.ended_at), why_killed=event.why_killed)


def _failure_of(worker: Worker, at: float) -> Failure:
    return Failure(
        at=at,
        rank=worker.rank,
        local_rank=worker.local_rank,
        pid=worker.pid,
        exit_code=worker.exit_code,
        step=worker.step,
    )


def _add_exit_code(state: JobState, local_rank: int, exit_code: int) -> JobState:
    """Adds the exit code to the fault that the same worker's exception made."""
    faults = tuple(
        classify(replace(f.failure, exit_code=exit_code))
        if f.failure.local_rank == local_rank and f.failure.exception_type is not None  # else that exit is our doing
        else f
        for f in state.faults
    )
    return replace(state, faults=faults)


def _fault_noticed(
    state: JobState, fault: Fault, at: float, method: str, why_stop: str | None = None
) -> tuple[JobState, list[Command]]:
    """Answer a fault: in place if that can be, else all stop; ``why_stop`` stands for what was said of it before."""
    if state.leaves:  # which concerns nobody else any more
        return departure.end_workers(state, at) if state.phase is Phase.RUNNING else (state, [])
    if state.is_left_out:  # nobody waits for these workers any more
        return state, []
    gone_on = worker_loss.go_on(state, fault, at, method)
    return gone_on or _stop_for(state, fault, at, method, why_stop)


def _stop_for(
    state: JobState, fault: Fault, at: float, method: str, why_stop: str | None = None
) -> tuple[JobState, list[Command]]:
    """Books the fault; the first one of a generation opens an incident and has everybody stop."""
    join = state.join
    if state.phase is Phase.RUNNING and join is not None and join.at is not None and fault.is_consequence:
        # Another node has stopped for those who wait a moment before this one.
        return summon(state, at, departure.reason_to_begin_again(join), counts=False)
    if (following := node_loss.follows(state, fault)) is not None:
        return following, []
    is_first = not state.faults
    state = replace(state, faults=(*state.faults, fault))
    if not is_first or state.leaving is not None:
        return state, []
    state, superseded = open_incident(state, fault, at, method)
    were_peers_first = bool(state.summons) and state.counts_as_restart
    # In the order in which they may be slow: a signal, the network, a disk.
    commands: list[Command] = []
    if state.phase is Phase.RUNNING:
        state, commands = stop(state, at, why_stop or fault.reason)
    if not were_peers_first and not is_only_on_its_way(state):
        commands.append(TellPeers(reason=fault.reason))
    if superseded is not None:
        commands.append(RecordIncident(incident=superseded))
    return state, commands


def _end_storm(state: JobState, at: float) -> tuple[JobState, list[Command]]:
    """End a storm: this node leaves for a worker that was started too often, or the others train on without it."""
    fault = storms.overrun(state, at)
    if fault is None:
        return state, []
    return node.ask_for(state, fault) if worker_loss.is_worth_asking(state) else _train_on_without(state, fault, at)


def _train_on_without(state: JobState, fault: Fault, at: float) -> tuple[JobState, list[Command]]:
    """Give up a worker that does not come to train; where nobody else of this node trains, all begin again."""
    given_up = worker_loss.give_up(state, fault, at, node.SUPERVISION)
    return given_up or _stop_for(state, fault, at, node.SUPERVISION)


def _begin_again_at_the_end(state: JobState, at: float) -> tuple[JobState, list[Command]]:
    """Begin again, all, if some end whose training others, that were lost after it, had not ended."""
    reason = worker_loss.why_not_over(state)
    if not reason:
        return state, []
    state, commands = summon(state, at, reason, counts=True)
    return state, [*commands, TellPeers(reason=reason)]


def _about_peers(
    state: JobState, event: PeerFailed | OtherNodesLost | NodesSilent | TakenForLost | NodesDepart
) -> tuple[JobState, list[Command]]:
    if isinstance(event, NodesSilent):
        state = replace(state, silent=event)
        return _without_the_missed(state, event.at) or (state, [])
    if isinstance(event, TakenForLost) and node_loss.do_others_go_on(state):
        return node_loss.begin_anew(state, event.at, event.reason)
    if isinstance(event, OtherNodesLost | NodesDepart):
        state = replace(state, gone=state.gone | set(event.nodes))
    if isinstance(event, NodesDepart):
        why_not = worker_loss.why_not_in_place(state, -len(event.nodes))
        gone_on = None if why_not else departure.go_on_without(state, event)
        return gone_on or departure.node_departs(state, event)
    gone_on = worker_loss.go_on_without(state, event) if isinstance(event, OtherNodesLost) else None
    if gone_on is not None:
        return gone_on
    state, commands = node_loss.booked(state, event) if isinstance(event, OtherNodesLost) else (state, [])
    state, stopping = summon(state, event.at, event.reason, counts=True)
    return state, [*stopping, *commands]


def _without_the_missed(state: JobState, at: float) -> tuple[JobState, list[Command]] | None:
    """Go on, or begin again, without silent nodes that are lost; the others may not know it. None if there are none."""
    lost = node_loss.missed(state, at)
    if lost is None:
        return None
    state, commands = _about_peers(replace(state, silent=None), lost)
    if state.phase is not Phase.RUNNING:
        commands.append(TellPeers(reason=lost.reason))
    return state, commands


def _worker_out_of_step(state: JobState, event: WorkerOutOfStep) -> tuple[JobState, list[Command]]:
    worker = state.find(event.local_rank)
    if worker is None or state.phase is not Phase.RUNNING or worker.exit_code is not None:
        return state, []
    return left_alone(state, out_of_step_fault(worker, event), event.at, METHOD)


def _about_node(
    state: JobState, event: NodeUnhealthy | NodeRecalled | StepEnded | LeaveAnswered
) -> tuple[JobState, list[Command]]:
    match event:
        case NodeUnhealthy():
            return (state, []) if state.leaves else _node_unhealthy(state, event)
        case NodeRecalled():
            return departure.node_recalled(state, event)
        case StepEnded():
            return departure.step_ended(state, event)
        case LeaveAnswered():
            return _leave_answered(state, event)


def _leave_answered(state: JobState, event: LeaveAnswered) -> tuple[JobState, list[Command]]:
    if state.departure is not None:
        return leave_answered(state, event)
    asked = None if state.recall is None else state.recall.departure
    state, commands = departure.answered(state, event)
    if not event.why_not or asked is None or asked.otherwise is None:
        return state, commands
    state, more = _train_on_without(state, asked.otherwise, event.at)
    return state, commands + more


def _node_unhealthy(state: JobState, event: NodeUnhealthy) -> tuple[JobState, list[Command]]:
    was_running = state.phase is Phase.RUNNING
    state, commands, must_stop = node_unhealthy(state, event)
    if not must_stop or not was_running:
        return state, commands
    state, stopping = stop(state, event.at, event.reason, is_anyone_gone=False)
    return state, [*stopping, *commands]


def _evidence_gathered(state: JobState, event: EvidenceGathered) -> tuple[JobState, list[Command]]:
    if state.hang is not None:
        return _act_if_due(replace(state, hang=replace(state.hang, evidence=event)), event.at)
    incident = state.incident
    if incident is None or incident.method != METHOD or incident.evidence is not None:
        return state, []
    return replace(state, incident=replace(incident, evidence=event.report)), []  # late, but not lost


def _act_if_due(state: JobState, at: float) -> tuple[JobState, list[Command]]:
    """Tells of a hang and acts on it when that is due, with the evidence, or without if that took too long."""
    hang = state.hang
    fault = None if hang is None else hang_fault(state, hang)
    if hang is None or fault is None:  # or they have ended meanwhile
        return replace(state, hang=None), []
    state, commands = told_if_due(state, at)
    if not hang.is_due(at):
        return state, commands
    if not state.policy.acts_on_hangs:
        state, more = observed(state, fault)
        return state, commands + more
    state, more = _fault_noticed(state, fault, at, METHOD, why_act(hang, at))
    if state.incident is None:  # nobody needed who hung
        return state, commands + more
    report = None if hang.evidence is None else hang.evidence.report
    state = replace(state, incident=replace(state.incident, noticed_at=hang.at, evidence=report))
    return state, commands + more


def _time_passed(state: JobState, event: TimePassed) -> tuple[JobState, list[Command]]:
    due = departure.act_if_due(state, event.at)
    if due is not None:
        return due
    if (met := departure.meet_if_due(state, event.at)) is not None:
        return met
    if state.phase is Phase.RUNNING:
        return _while_running(state, event.at)
    if state.kill_at is None:
        return storms.start_if_due(state, event.at)
    policy = state.policy
    left = tuple(w.local_rank for w in state.running if not w.was_killed)
    if event.at >= state.kill_at and left:
        reason = f"{named(left)} did not end within {policy.stop_timeout_s:g} s of SIGTERM: SIGKILL."
        workers = tuple(replace(w, was_killed=True) if w.local_rank in left else w for w in state.workers)
        # Who gets SIGKILL needs no SIGTERM any more.
        state = replace(state, workers=workers).told_to_stop(not_told(state), event.at)
        return replace(state, teardown_at=None), [KillWorkers(local_ranks=left, reason=reason)]
    if state.teardown_at is not None and event.at >= state.teardown_at:
        return end_of_teardown(state, event.at)
    return state, []


def _while_running(state: JobState, at: float) -> tuple[JobState, list[Command]]:
    state, commands = worker_loss.replace_if_due(state, at)
    state, more = worker_loss.end_lost(state, at)
    commands += more
    if (fault := worker_loss.unexplained(state, at)) is not None:
        state, more = _fault_noticed(state, fault, at, worker_loss.BROKE_METHOD)
        return state, commands + more
    if (without := _without_the_missed(state, at)) is not None:
        state, more = without
        return state, commands + more
    fault = worker_loss.cause_of_breaks(state, at)
    if fault is not None:
        state, more = _fault_noticed(replace(state, broke=None), fault, at, worker_loss.BROKE_METHOD)
        return state, commands + more
    for due in (worker_loss.reattempt_if_due, _act_if_due):
        state, more = due(state, at)
        commands += more
    return state, commands


def _all_ended(state: JobState, at: float) -> tuple[JobState, list[Command]]:
    state = replace(state, kill_at=None, teardown_at=None, hang=None, broke=None, replace_at=None)
    if state.leaves:
        return departure.left(state, at)
    if state.phase is Phase.RUNNING and worker_loss.is_nobody_left(state):
        return worker_loss.begin_again(state)
    if state.phase is Phase.RUNNING:
        return replace(state, phase=Phase.FINISHED), [FinishJob(reason="All workers of this node ended well.")]
    used = restarts_after_progress(state.policy, state.restarts_used, (w.step for w in state.workers))
    state = replace(state, restarts_used=used)
    if state.leaving is not None:
        return left(state, at)
    if state.faults:
        return _judge_faults(state, at)
    if not state.counts_as_restart:
        return replace(state, phase=Phase.IDLE), [StartWorkers(restarts_used=used, reason=state.summons)]
    none_left = why_none_left(state.policy, used)
    if none_left is not None:
        state, recorded = node_loss.ended(state, at, "fail", none_left)
        fails = FailJob(cause=None, reason=f"{state.summons} {none_left}")
        return replace(state, phase=Phase.FINISHED), [*recorded, fails]
    decision = f"Restart {used + 1} of {state.policy.max_restarts}."
    state, recorded = node_loss.ended(state, at, "restart", decision)
    starts = StartWorkers(restarts_used=used + 1, reason=state.summons)
    return replace(state, phase=Phase.IDLE), [*recorded, starts]


def _life(state: JobState, at: float) -> Life:
    """How far this generation came. What workers of other nodes saved is unknown here."""
    return Life(
        lived_s=at - state.began_at,
        has_saved=_any((*(worker.has_saved for worker in state.workers), None if state.started_on > 1 else False)),
        has_restored=_any([worker.has_restored for worker in state.workers]),
    )


def _any(known: Iterable[bool | None]) -> bool | None:
    found = set(known)
    return True if True in found else (None if None in found else False)


def _with_who_left(state: JobState) -> tuple[Fault, ...]:
    """Return the faults; if all are consequences, with that of the worker that left first while others trained.

    Who was told to stop was told by somebody else.
    """
    left = [worker for worker in state.workers if worker.left_at is not None]
    are_consequences = all(fault.is_consequence for fault in state.faults)
    if not left or not are_consequences or all(fault.status is Status.STOPPED_BY_REQUEST for fault in state.faults):
        return state.faults
    first = min(left, key=lambda worker: (worker.left_at or 0.0, worker.rank))
    return (left_early(_failure_of(first, first.left_at or 0.0)), *state.faults)


def _judge_faults(state: JobState, at: float) -> tuple[JobState, list[Command]]:
    cause = explained(root_cause(_with_who_left(state)), state.findings)
    is_known = worker_loss.is_being_answered(state, cause.fault, at)
    repeats = state.repeats if is_known else count_repeats(state.repeats, cause, _life(state, at))
    own_departure = None
    is_on_its_way = is_only_on_its_way(state)
    used = 0 if is_on_its_way else state.restarts_used - is_known
    verdict = judge(state.policy, used, repeats, tuple(f.failure for f in state.faults))
    if is_on_its_way and verdict.restart:
        verdict = replace(verdict, restarts_used=state.restarts_used, reason=node.ON_ITS_WAY)
    if is_on_its_way and (not verdict.restart or node.cannot_take_the_state(cause.fault)):
        own_departure = turn_back(state, verdict, cause)
    elif verdict.restart:
        attempts, rung = climb(state.attempts, cause.fault, at, state.policy)
        state = replace(state, attempts=attempts)
        verdict, own_departure = weigh(state, verdict, rung, cause)
    assert state.incident is not None  # the first fault of a generation opens one
    was_told = not state.summons and state.incident.reason == cause.reason
    incident = judged(state.incident, cause, at, verdict)
    recorded = RecordIncident(incident=incident)
    reason = f"{cause.reason} {verdict.reason}"
    if own_departure is not None:
        state = replace(state, phase=Phase.LEAVING, repeats=repeats, incident=incident, departure=own_departure)
        return state, [AskToLeave(reason=reason)]
    if not verdict.restart:
        state = replace(state, phase=Phase.FINISHED, repeats=repeats, incident=None)
        return state, [recorded, FailJob(cause=cause, reason=reason)]
    said = verdict.reason if was_told else reason  # stopping the workers said the rest already
    state = replace(state, phase=Phase.IDLE, repeats=repeats, incident=incident)
    return state, [recorded, StartWorkers(restarts_used=verdict.restarts_used, reason=said)]


def _first_step_done(state: JobState, event: FirstStepDone) -> tuple[JobState, list[Command]]:
    worker = state.find(event.local_rank)
    if worker is None or state.phase is not Phase.RUNNING:
        return state, []
    state = storms.stepped(state.with_worker(replace(worker, has_stepped=True)), worker.local_rank)
    if state.incident is None or not all(w.has_stepped for w in state.running):
        return state, []
    if worker_loss.tells_itself(state.incident):
        return state, []
    incident = replace(state.incident, first_step_at=event.at)
    return replace(state, incident=None), [RecordIncident(incident=incident)]
