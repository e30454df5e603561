"""A node that is sick: it leaves the job if the job can go on without it, and explains what fails on it if not.

Where the others can go on in place, a node that is suspected or broken leaves as one does that is well: it asks, the
others make a world without its workers, and only then these end: nobody begins again for it. All that sets it apart
from a node that is recalled is the quarantine.
"""

from __future__ import annotations

from dataclasses import replace

from unicron_elastic.base.incident import Incident
from unicron_elastic.faults import Fault, RootCause, Severity, Status
from unicron_elastic.recovery.commands import (
    AskToLeave,
    Command,
    LeaveJob,
    RecordIncident,
    StartWorkers,
    Tell,
    TellPeers,
)
from unicron_elastic.recovery.events import LeaveAnswered, NodeUnhealthy, OtherNodesLost
from unicron_elastic.recovery.policy import Rung, Verdict, restart, why_none_left
from unicron_elastic.recovery.records import EXPLAINS_S, open_incident
from unicron_elastic.recovery.state import (
    Departure,
    JobState,
    Phase,
    Recall,
    RecallStage,
    has_anyone_a_part,
    is_anyone_elsewhere,
    nodes_elsewhere,
)

METHOD = "node health"
LEAVES = "This node leaves the job."
ON_ITS_WAY = "Others train, and the workers here begin again, which counts as no restart."
KEPT_S = 600.0
SUSPECT_S = 3600.0  # in quarantine, of a node that is only suspected; a broken one waits for people
UNFIT_S = 600.0  # ... of a node that is well, and that the job does not fit: another may have it soon
NOT_TAKEN = "NotTakenError"  # the exception of a newcomer that the state of the others does not fit

# What these say is less than what a GPU's own word says.
_VAGUE = frozenset({Status.CUDA_ERROR, Status.EXITED_ABNORMALLY, Status.KILLED_BY_SIGNAL, Status.TASK_HANG})


def _why_not_spared(state: JobState) -> str:
    """Why this node stays in the job although it has no part in the training, as a sentence; "" if it may leave."""
    if any(worker.exit_code == 0 and worker.told_to_stop_at is None for worker in state.workers):
        return "The node stays: its part of the job is ending."
    if not state.policy.isolates:
        return "The node stays: --unicron-on-fault is observe."
    if state.why_stay:
        return f"The node stays: {state.why_stay}"
    return ""


def _why_not_leave(state: JobState) -> str:
    """Why this node stays in the job whatever is found, as a sentence; "" if it may leave."""
    if why := _why_not_spared(state):
        return why
    if why_none_left(state.policy, state.restarts_used) is not None:
        return "The node stays: the other nodes have no restart left to go on without it."
    return ""


def node_unhealthy(state: JobState, event: NodeUnhealthy) -> tuple[JobState, list[Command], bool]:
    """Books what was found. True: all workers are to stop now, and this node leaves the job when they have."""
    state = replace(state, findings=(*_kept(state.findings, event.at), event))
    if event.severity is not Severity.SEV1 or state.leaving is not None:
        return state, [], False
    state = replace(state, broken=event)  # once the node may leave, it does
    if state.phase not in (Phase.RUNNING, Phase.STOPPING) or state.faults:
        return state, [], False  # faults are judged soon, with this in hand
    why = _why_not_leave(state)
    if not why:
        state, superseded = open_node_incident(state, event)
        state = replace(state, leaving=event, summons=event.reason, counts_as_restart=True)
        closed = [] if superseded is None else [RecordIncident(incident=superseded)]
        return state, [TellPeers(reason=event.reason), *closed], True
    is_known = state.observed is not None and event.at - (state.observed.noticed_at or 0.0) <= EXPLAINS_S
    if is_known or state.phase is not Phase.RUNNING or state.incident is not None:
        # One incident for all findings of a moment; and one that waits for its first step is not cut short.
        return state, [], False
    state, commands = _observed(state, event, why)
    return state, commands, False


def left(state: JobState, at: float) -> tuple[JobState, list[Command]]:
    """What is done when the workers of a leaving node have ended."""
    assert state.leaving is not None
    assert state.incident is not None
    consequences = tuple(fault.reason for fault in state.faults)
    incident = replace(state.incident, stopped_at=at, consequences=consequences)
    used = state.restarts_used
    departure = Departure(
        cause=None,
        reason=incident.reason,
        leaves=Verdict(restart=False, isolate=True, restarts_used=used, reason=LEAVES),
        stays=restart(state.policy, used),
        is_broken=True,
    )
    state = replace(state, phase=Phase.LEAVING, incident=incident, leaving=None, departure=departure)
    return state, [AskToLeave(reason=incident.reason)]


def has_left_broken(state: JobState, at: float) -> tuple[JobState, list[Command]]:
    """Take this node, which was found broken on its way out of the job, to quarantine: the others have let it go."""
    state, _asks = left(state, at)
    return leave_answered(replace(state, recall=None), LeaveAnswered(at=at, why_not=""))


def leave_answered(state: JobState, event: LeaveAnswered) -> tuple[JobState, list[Command]]:
    """Leaves, or restarts here if the job cannot spare this node any more."""
    departure, incident = state.departure, state.incident
    if departure is None or incident is None:
        return state, []
    verdict = departure.leaves
    if event.why_not:
        verdict = replace(departure.stays, reason=f"{departure.stays.reason} The node stays: {event.why_not}")
    incident = replace(incident, action=verdict.action, decision=verdict.reason)
    recorded, reason = RecordIncident(incident=incident), f"{departure.reason} {verdict.reason}"
    if verdict.isolate:
        state = replace(state, phase=Phase.FINISHED, incident=None, departure=None)
        return state, [recorded, leave_job(departure, reason)]
    state = replace(state, phase=Phase.IDLE, incident=incident, departure=None)
    return state, [recorded, StartWorkers(restarts_used=verdict.restarts_used, reason=reason)]


def open_loss_incident(state: JobState, event: OtherNodesLost) -> tuple[JobState, Incident | None]:
    """The same for other nodes that are lost to the workers of this one."""
    found = NodeUnhealthy(at=event.at, status=Status.LOST_CONNECTION, severity=Severity.SEV1, reason=event.reason)
    return open_node_incident(state, found)


def open_node_incident(state: JobState, event: NodeUnhealthy) -> tuple[JobState, Incident | None]:
    """The state with a new incident for what was found, and the incident that it closes."""
    number = state.incidents + 1
    incident = Incident(
        number=number,
        run_id=state.run_id,
        job=state.job,
        host=state.host,
        time="",
        generation=state.generation,
        rank=None,
        status=event.status.value,
        severity=int(event.severity),
        method=METHOD,
        reason=event.reason,
        action="",
        decision="",
        restarts_used=state.restarts_used,
        max_restarts=state.policy.max_restarts,
        workers=len(state.workers),
        occurred_at=event.at,
        noticed_at=event.at,
    )
    superseded = None if state.incident is None else replace(state.incident, superseded_by=number)
    return replace(state, incident=incident, incidents=number), superseded


def _observed(state: JobState, event: NodeUnhealthy, why: str) -> tuple[JobState, list[Command]]:
    """Records the finding and lets the workers go on; a failure that follows soon is told in the same incident."""
    state, superseded = open_node_incident(state, event)
    assert state.incident is not None
    incident = replace(state.incident, action="observe", decision=why)
    commands: list[Command] = [] if superseded is None else [RecordIncident(incident=superseded)]
    return replace(state, incident=None, observed=incident), [*commands, RecordIncident(incident=incident)]


def explained(cause: RootCause, findings: tuple[NodeUnhealthy, ...]) -> RootCause:
    """The root cause in the light of what was found on the node shortly before, if that is worse or says more."""
    found = [each for each in findings if cause.fault.failure.at - each.at <= EXPLAINS_S]
    if not found:
        return cause
    fault, worst = cause.fault, min(found, key=lambda each: each.severity)
    if worst.severity > fault.severity or (worst.severity == fault.severity and fault.status not in _VAGUE):
        return cause
    reason = f"{worst.reason.rstrip('.')}; {cause.reason}"
    fault = replace(fault, status=worst.status, severity=worst.severity, is_consequence=False, reason=reason)
    return RootCause(fault=fault, consequences=cause.consequences, reason=reason)


def weigh(state: JobState, verdict: Verdict, rung: Rung, cause: RootCause) -> tuple[Verdict, Departure | None]:
    """The verdict, to restart, as the ladder of severities changes it: at SEV1 the node departs if it may."""
    verdict = replace(verdict, severity=rung.severity)
    if rung.severity is not Severity.SEV1:
        return verdict, None
    stays = replace(verdict, reason=" ".join(filter(None, (verdict.reason, rung.reason))))
    why_not = _why_not_leave(state)
    if why_not:
        return replace(stays, reason=f"{stays.reason} {why_not}"), None
    leaves = Verdict(
        restart=False,
        isolate=True,
        severity=rung.severity,
        restarts_used=state.restarts_used,
        reason=f"{rung.reason} {LEAVES}".strip(),
    )
    is_broken = cause.fault.severity is Severity.SEV1
    return leaves, Departure(cause=cause, reason=cause.reason, leaves=leaves, stays=stays, is_broken=is_broken)


def may_leave(state: JobState) -> bool:
    """Whether the job can go on without this node."""
    return not _why_not_leave(state)


def is_only_on_its_way(state: JobState) -> bool:
    """Whether no worker here has had a part in the job, in which others train, and the node may leave it again."""
    return has_never_trained(state) and not _why_not_spared(state)


def has_never_trained(state: JobState) -> bool:
    """Whether others train, and nobody here has had a part in that. Their world may not be known here yet."""
    if state.world is None:
        return state.came_late
    return state.came_late and is_anyone_elsewhere(state) and not has_anyone_a_part(state)


def turn_back(state: JobState, verdict: Verdict, cause: RootCause) -> Departure:
    """The departure of a node that fails again and again on its way: that must not end the job of the others."""
    leaves = replace(
        verdict,
        restart=False,
        isolate=True,
        reason=f"{'' if verdict.restart else f'{verdict.reason} '}Others train without this node: it leaves the job.",
    )
    again = Verdict(restart=True, restarts_used=state.restarts_used, reason="Its workers begin again.")
    return Departure(cause=cause, reason=cause.reason, leaves=leaves, stays=again, is_broken=False)


def leave_job(departure: Departure, why: str) -> LeaveJob:
    """Return how this node leaves: one that is broken is in quarantine until somebody lifts it, others for a while."""
    quarantine_s: float | None = SUSPECT_S
    if departure.is_broken:
        quarantine_s = None
    elif departure.cause is not None and cannot_take_the_state(departure.cause.fault):
        quarantine_s = UNFIT_S
    return LeaveJob(cause=departure.cause, reason=why, quarantine_s=quarantine_s)


def cannot_take_the_state(fault: Fault) -> bool:
    """Whether a newcomer says that the others' state does not fit what its script has made, as it never will."""
    return (fault.failure.exception_type or "").rpartition(".")[2] == NOT_TAKEN


def _kept(findings: tuple[NodeUnhealthy, ...], at: float) -> tuple[NodeUnhealthy, ...]:
    """Those that may still explain a failure: a hang is judged long after it began."""
    return tuple(each for each in findings if at - each.at <= KEPT_S)


SUPERVISION = "process supervision"


def why_not_ask(state: JobState, why_begin_again: str) -> str:
    """Return why this node stays without being asked for more, as a sentence; "" if it is worth asking.

    ``why_begin_again`` says why the others could not go on in place without it; "" if they could.
    """
    if not state.policy.isolates:
        return "--unicron-on-fault is observe."
    if not is_anyone_elsewhere(state):
        return state.why_stay or "no other node has the training state yet."
    if why_begin_again:
        return "without it the others could not go on in place."
    return "" if state.recall is None else f"it cannot leave yet. {state.recall.reason}"


def ask_to_leave(
    state: JobState, cause: RootCause, rung: Rung, stays: Verdict, otherwise: Fault | None = None
) -> tuple[JobState, list[Command]]:
    """Have it found out whether this node may leave; ``stays`` is the verdict that holds if it must not.

    ``otherwise``: for this fault all begin again if it must stay.
    """
    leaves = replace(stays, restart=False, isolate=True, reason=f"{rung.reason} {LEAVES}".strip())
    is_broken = cause.fault.severity is Severity.SEV1 and otherwise is None
    why = rung.reason or cause.reason
    departure = Departure(cause=cause, reason=why, leaves=leaves, stays=stays, is_broken=is_broken, otherwise=otherwise)
    recall = Recall(reason=f"Node {state.host} leaves the job: {why}", stage=RecallStage.ASKS, departure=departure)
    asks = AskToLeave(reason=recall.reason, is_departure=True, have_state=nodes_elsewhere(state))
    return replace(state, recall=recall), [asks]


def ask_for(state: JobState, fault: Fault) -> tuple[JobState, list[Command]]:
    """Have it found out whether this node may leave for a fault that no restart of a worker helps."""
    cause = RootCause(fault=fault, consequences=(), reason=fault.reason)
    stays = Verdict(restart=True, restarts_used=state.restarts_used, reason="")
    rung = Rung(severity=Severity.SEV1, reason=fault.reason)
    return ask_to_leave(state, cause, rung, stays, otherwise=fault)


def must_stay(state: JobState, departure: Departure, why: str) -> tuple[JobState, list[Command]]:
    """Go on as it was decided before this node asked."""
    return replace(state, recall=None), [Tell(reason=f"{departure.reason} The node stays: {why}")]


def leave_alone(state: JobState, departure: Departure, at: float) -> tuple[JobState, list[Command]]:
    """Record that this node leaves; its workers' next step closes the incident no more."""
    commands: list[Command] = []
    if departure.otherwise is not None:  # of which nothing was told yet
        state, superseded = open_incident(state, departure.otherwise, at, SUPERVISION)
        commands += [] if superseded is None else [RecordIncident(incident=superseded)]
    assert state.incident is not None  # of the loss for which it asked
    incident = replace(state.incident, action=departure.leaves.action, decision=departure.leaves.reason)
    commands += [RecordIncident(incident=incident), Tell(reason=departure.leaves.reason)]
    return replace(state, incident=None), commands


def has_left_alone(state: JobState, departure: Departure) -> tuple[JobState, list[Command]]:
    """Take this node out of the job: its workers have ended."""
    state = replace(state, phase=Phase.FINISHED, incident=None, recall=None, leaving=None)
    return state, [leave_job(departure, f"{departure.reason} It has left the job.")]
