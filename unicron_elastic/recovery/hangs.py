"""Workers that hang: first the evidence, then the end of those who hang, as pure functions on the job's state."""

from __future__ import annotations

from dataclasses import replace

from unicron_elastic.faults import SEVERITY_OF, Failure, Fault, Status
from unicron_elastic.recovery.commands import Command, GatherEvidence, KillWorkers, RecordIncident, WakeAt
from unicron_elastic.recovery.events import WorkersHung
from unicron_elastic.recovery.records import open_incident
from unicron_elastic.recovery.state import Hang, JobState, Phase

__all__ = ["METHOD", "hang_fault", "kill_hung", "observed", "why_act", "workers_hung"]

METHOD = "online statistics"


def workers_hung(state: JobState, event: WorkersHung) -> tuple[JobState, list[Command]]:
    """Asks for evidence at once; nothing is done before it is there, or its time is up, and the hang has lasted."""
    running = tuple(worker.local_rank for worker in state.running)
    hung = tuple(local_rank for local_rank in event.local_ranks if local_rank in running)
    if state.phase is not Phase.RUNNING or state.hang is not None or not hung:
        return state, []
    policy = state.policy
    hang = Hang(
        at=event.at,
        since=event.since,
        local_ranks=hung,
        reason=event.reason,
        evidence_at=event.at + policy.evidence_timeout_s,
        act_at=event.at if event.is_certain or not policy.acts_on_hangs else event.at + policy.hang_patience_s,
    )
    gather = GatherEvidence(local_ranks=running, reason=event.reason)
    return replace(state, hang=hang), [gather, WakeAt(at=hang.evidence_at), WakeAt(at=hang.act_at)]


def hang_fault(state: JobState, hang: Hang) -> Fault | None:
    """One fault for all who hang, since it has one reason: that of the first of them who still runs."""
    worker = next((worker for worker in state.running if worker.local_rank in hang.local_ranks), None)
    if worker is None:
        return None
    stacks = dict(hang.evidence.stacks) if hang.evidence is not None else {}
    failure = Failure(
        at=hang.since,
        rank=worker.rank,
        local_rank=worker.local_rank,
        pid=worker.pid,
        stack=stacks.get(worker.local_rank),
    )
    return Fault(
        failure=failure,
        status=Status.TASK_HANG,
        severity=SEVERITY_OF[Status.TASK_HANG],
        is_consequence=False,
        reason=hang.reason,
    )


def why_act(hang: Hang, at: float) -> str:
    """Why all workers are stopped now, as a sentence; that and how some hang was said when it was noticed."""
    if hang.act_at == hang.at:
        return "A stopped process does not go on by itself: all workers stop."
    return f"Nothing has moved for {at - hang.since:.0f} s: all workers stop."


def kill_hung(state: JobState) -> tuple[JobState, list[Command]]:
    """Ends those who hang at once: a stopped process, or one in a system call, does not hear SIGTERM."""
    if state.hang is None:
        return state, []
    hung = tuple(worker.local_rank for worker in state.running if worker.local_rank in state.hang.local_ranks)
    workers = tuple(replace(w, was_killed=True) if w.local_rank in hung else w for w in state.workers)
    state = replace(state, workers=workers, hang=None)
    if not hung:
        return state, []
    noun = "Worker" if len(hung) == 1 else "Workers"
    who = f"{noun} {', '.join(map(str, hung))}"
    return state, [KillWorkers(local_ranks=hung, reason=f"{who} may not hear SIGTERM: SIGKILL at once.")]


def observed(state: JobState, fault: Fault, hang: Hang) -> tuple[JobState, list[Command]]:
    """Records the hang and lets it be."""
    state, superseded = open_incident(replace(state, hang=None), fault, hang.at, METHOD)
    assert state.incident is not None
    incident = replace(
        state.incident,
        action="observe",
        decision="Nothing was done: --unicron-on-hang is observe.",
        evidence=None if hang.evidence is None else hang.evidence.report,
    )
    commands: list[Command] = [] if superseded is None else [RecordIncident(incident=superseded)]
    return replace(state, incident=None), [*commands, RecordIncident(incident=incident)]
