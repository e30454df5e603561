"""A node that is sick: it leaves the job if the job can go on without it, and explains what fails on it if not."""

from __future__ import annotations

from dataclasses import replace

from unicron_elastic.faults import RootCause, Severity, Status
from unicron_elastic.incident import Incident
from unicron_elastic.recovery.commands import Command, LeaveJob, RecordIncident, TellPeers
from unicron_elastic.recovery.events import NodeUnhealthy
from unicron_elastic.recovery.ladder import Rung
from unicron_elastic.recovery.policy import Verdict
from unicron_elastic.recovery.records import EXPLAINS_S
from unicron_elastic.recovery.state import JobState, Phase

__all__ = ["explained", "leave", "left", "node_unhealthy", "recent", "weigh"]

METHOD = "node health"
LEAVES = "This node leaves the job."
COOL_DOWN_S = 3600.0  # in quarantine, of a node that is only suspected; a broken one waits for people

# What these say is less than what a GPU's own word says.
_VAGUE = frozenset({Status.CUDA_ERROR, Status.EXITED_ABNORMALLY, Status.KILLED_BY_SIGNAL, Status.TASK_HANG})


def _why_not_leave(state: JobState) -> str:
    """Why this node stays in the job whatever is found, as a sentence; "" if it may leave."""
    if not state.policy.isolates:
        return "The node stays: --unicron-on-fault is observe."
    return f"The node stays: {state.why_stay}" if state.why_stay else ""


def node_unhealthy(state: JobState, event: NodeUnhealthy) -> tuple[JobState, list[Command], bool]:
    """Books what was found. True: all workers are to stop now, and this node leaves the job when they have."""
    state = replace(state, findings=(*recent(state.findings, event.at), event))
    if event.severity is not Severity.SEV1 or state.phase is Phase.IDLE or state.leaving is not None:
        return state, [], False
    why = _why_not_leave(state)
    if state.faults:
        return state, [], False  # they are judged soon, with this in hand
    if not why:
        state, superseded = _open_incident(state, event)
        state = replace(state, leaving=event, summons=event.reason, counts_as_restart=True)
        closed = [] if superseded is None else [RecordIncident(incident=superseded)]
        return state, [TellPeers(reason=event.reason), *closed], True
    is_known = state.observed is not None and event.at - (state.observed.noticed_at or 0.0) <= EXPLAINS_S
    if is_known or state.phase is not Phase.RUNNING:
        return state, [], False
    state, commands = _observed(state, event, why)
    return state, commands, False


def left(state: JobState, at: float) -> tuple[JobState, list[Command]]:
    """What is done when the workers of a leaving node have ended."""
    assert state.leaving is not None
    assert state.incident is not None
    incident = replace(
        state.incident,
        stopped_at=at,
        action="isolate",
        decision=LEAVES,
        consequences=tuple(fault.reason for fault in state.faults),
    )
    state = replace(state, phase=Phase.FINISHED, incident=None, leaving=None)
    return state, [RecordIncident(incident=incident), leave(None, f"{incident.reason} {LEAVES}", is_broken=True)]


def _open_incident(state: JobState, event: NodeUnhealthy) -> tuple[JobState, Incident | None]:
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
        occurred_at=event.at,
        noticed_at=event.at,
    )
    superseded = None if state.incident is None else replace(state.incident, superseded_by=number)
    return replace(state, incident=incident, incidents=number), superseded


def _observed(state: JobState, event: NodeUnhealthy, why: str) -> tuple[JobState, list[Command]]:
    """Records the finding and lets the workers go on; a failure that follows soon is told in the same incident."""
    state, superseded = _open_incident(state, event)
    assert state.incident is not None
    incident = replace(state.incident, action="observe", decision=why)
    commands: list[Command] = [] if superseded is None else [RecordIncident(incident=superseded)]
    return replace(state, incident=None, observed=incident), [*commands, RecordIncident(incident=incident)]


def explained(cause: RootCause, findings: tuple[NodeUnhealthy, ...]) -> RootCause:
    """The root cause in the light of what was found on the node shortly before, if that is worse or says more."""
    found = recent(findings, cause.fault.failure.at)
    if not found:
        return cause
    fault, worst = cause.fault, min(found, key=lambda each: each.severity)
    if worst.severity > fault.severity or (worst.severity == fault.severity and fault.status not in _VAGUE):
        return cause
    reason = f"{worst.reason.rstrip('.')}; {cause.reason}"
    fault = replace(fault, status=worst.status, severity=worst.severity, is_consequence=False, reason=reason)
    return RootCause(fault=fault, consequences=cause.consequences, reason=reason)


def weigh(state: JobState, verdict: Verdict, rung: Rung) -> Verdict:
    """The verdict, to restart, as the ladder of severities changes it: from SEV1 on, the node leaves if it may."""
    if rung.severity is not Severity.SEV1:
        return replace(verdict, severity=rung.severity)
    why_not = _why_not_leave(state)
    if why_not:
        words = (verdict.reason, rung.reason, why_not)
        return replace(verdict, severity=rung.severity, reason=" ".join(filter(None, words)))
    return Verdict(
        restart=False,
        isolate=True,
        severity=rung.severity,
        restarts_used=state.restarts_used,
        reason=f"{rung.reason} {LEAVES}".strip(),
    )


def leave(cause: RootCause | None, why: str, *, is_broken: bool) -> LeaveJob:
    """This node leaves. A broken one stays in quarantine until somebody lifts it, a suspect one cools down."""
    return LeaveJob(cause=cause, reason=why, quarantine_s=None if is_broken else COOL_DOWN_S)


def recent(findings: tuple[NodeUnhealthy, ...], at: float) -> tuple[NodeUnhealthy, ...]:
    """Those that may still explain a failure."""
    return tuple(each for each in findings if at - each.at <= EXPLAINS_S)
