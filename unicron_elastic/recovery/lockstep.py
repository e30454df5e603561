"""A worker that is out of step with the others, as pure functions on the job's state.

It is told and recorded, and nothing is done: from outside, a collective that was left out looks like a step of an
optimizer beside the training, as torch's own `get_state_dict` makes one. Only people who know the script can tell.
"""

from __future__ import annotations

from dataclasses import replace

from unicron_elastic.faults import SEVERITY_OF, Failure, Fault, Status
from unicron_elastic.recovery.commands import Command, RecordIncident, Tell
from unicron_elastic.recovery.events import WorkerOutOfStep
from unicron_elastic.recovery.records import open_incident
from unicron_elastic.recovery.state import JobState, Worker

DECISION = "Nothing was done: only the script knows whether it was meant."


def out_of_step_fault(worker: Worker, event: WorkerOutOfStep) -> Fault:
    """What the event means: software that may not do the same on all ranks."""
    status = Status.OTHER_SOFTWARE_ERROR
    failure = Failure(at=event.since, rank=worker.rank, local_rank=worker.local_rank, pid=worker.pid, step=event.step)
    return Fault(
        failure=failure, status=status, severity=SEVERITY_OF[status], is_consequence=False, reason=event.reason
    )


def left_alone(state: JobState, fault: Fault, at: float, method: str) -> tuple[JobState, list[Command]]:
    """Tells and records it, and lets the workers go on."""
    state, superseded = open_incident(state, fault, at, method)
    assert state.incident is not None
    incident = replace(state.incident, action="observe", decision=DECISION)
    closed: list[Command] = [] if superseded is None else [RecordIncident(incident=superseded)]
    return replace(state, incident=None), [Tell(reason=fault.reason), *closed, RecordIncident(incident=incident)]
