"""How the record of an incident grows from the first notice of a fault to the first step after it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from unicron_elastic.base.incident import Incident
from unicron_elastic.faults import Fault, RootCause
from unicron_elastic.recovery.policy import Verdict
from unicron_elastic.recovery.state import JobState

EXPLAINS_S = 30.0  # a worker's failure so long after a finding on its node is taken for its effect


def open_incident(state: JobState, fault: Fault, at: float, method: str) -> tuple[JobState, Incident | None]:
    """The state with a new incident for ``fault``, and the incident that was open before, closed by the new one.

    What its record says stays true; only a first step after it will not come.
    """
    told = _told_before(state, at)
    number = state.incidents + 1 if told is None else told.number
    incident = Incident(
        number=number,
        run_id=state.run_id,
        job=state.job,
        host=state.host,
        time="",  # the wall clock is the shell's: it fills this in when it writes the record
        generation=state.generation,
        method=method if told is None else told.method,
        action="",
        decision="",
        restarts_used=state.restarts_used,
        max_restarts=state.policy.max_restarts,
        workers=len(state.workers),
        occurred_at=fault.failure.at if told is None else told.occurred_at,
        noticed_at=at if told is None else told.noticed_at,
        **_of_root(fault),
    )
    superseded = None if state.incident is None else replace(state.incident, superseded_by=number)
    return replace(state, incident=incident, incidents=number, observed=None), superseded


def _told_before(state: JobState, at: float) -> Incident | None:
    """The incident of a finding on this node that explains a failure now: both are one."""
    told = state.observed
    return told if told is not None and at - (told.noticed_at or at) <= EXPLAINS_S else None


def judged(incident: Incident, cause: RootCause, at: float, verdict: Verdict) -> Incident:
    """The record once every report is in and the verdict is passed.

    It began with its root cause where that happened before what was noticed first. The kernel may also tell of the
    root cause's end after its peers' errors: then it began no later than the first of those that was noticed.
    """
    occurred_at = cause.fault.failure.at
    if incident.occurred_at is not None:
        occurred_at = min(occurred_at, incident.occurred_at)
    found = _of_root(cause.fault)
    if verdict.severity is not None:
        found["severity"] = int(verdict.severity)
    return replace(
        incident,
        occurred_at=occurred_at,
        stopped_at=at,
        action=verdict.action,
        decision=verdict.reason,
        consequences=tuple(fault.reason for fault in cause.consequences),
        **found,
    )


def _of_root(fault: Fault) -> dict[str, Any]:
    """The fields of an incident that say what its root cause is."""
    failure = fault.failure
    return {
        "rank": failure.rank,
        "status": fault.status.value,
        "severity": int(fault.severity),
        "reason": fault.reason,
        "exit_code": failure.exit_code,
        "exception_type": failure.exception_type,
        "message": failure.message,
        "location": failure.location,
        "stack": failure.stack,
        "step": failure.step,
    }
