"""A worker that is out of step with the others, as pure functions on the job's state.

Its job does not stop by itself and may even come to an end, with wrong numbers: so it is restarted if a restart is
left, and else goes on, for torchrun would let it.
"""

from __future__ import annotations

from dataclasses import replace

from unicron_elastic.faults import SEVERITY_OF, Failure, Fault, Status
from unicron_elastic.recovery.commands import Command, RecordIncident, Tell
from unicron_elastic.recovery.events import WorkerOutOfStep
from unicron_elastic.recovery.policy import why_none_left
from unicron_elastic.recovery.records import open_incident
from unicron_elastic.recovery.state import JobState, Worker

__all__ = ["left_alone", "out_of_step_fault", "why_go_on"]


def out_of_step_fault(worker: Worker, event: WorkerOutOfStep) -> Fault:
    """What the event means: software that does not do the same on all ranks."""
    status = Status.OTHER_SOFTWARE_ERROR
    failure = Failure(at=event.since, rank=worker.rank, local_rank=worker.local_rank, pid=worker.pid)
    return Fault(
        failure=failure, status=status, severity=SEVERITY_OF[status], is_consequence=False, reason=event.reason
    )


def why_go_on(state: JobState) -> str:
    """Why nothing is done about it, as a sentence; "" if the workers are to be restarted."""
    if not state.policy.acts_on_hangs:
        return "Nothing was done: it is only observed (--unicron-on-hang, --unicron-on-fault)."
    none_left = why_none_left(state.policy, state.restarts_used)
    return f"{none_left} The job goes on, and its numbers are not to be trusted." if none_left else ""


def left_alone(state: JobState, fault: Fault, at: float, method: str, why: str) -> tuple[JobState, list[Command]]:
    """Tells and records it, and lets the workers go on."""
    state, superseded = open_incident(state, fault, at, method)
    assert state.incident is not None
    incident = replace(state.incident, action="observe", decision=why)
    closed: list[Command] = [] if superseded is None else [RecordIncident(incident=superseded)]
    told = Tell(reason=f"{fault.reason} {why}")
    return replace(state, incident=None), [told, *closed, RecordIncident(incident=incident)]
