"""Workers that hang: first the evidence, then the end of those who hang, as pure functions on the job's state.

A worker that is out of step with the others is told and recorded, and nothing is done: from outside, a collective that
was left out looks like a step of an optimizer beside the training. Only people who know the script can tell.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from unicron_elastic.faults import SEVERITY_OF, Failure, Fault, HangKind, Status
from unicron_elastic.recovery.commands import Command, GatherEvidence, KillWorkers, RecordIncident, Tell, WakeAt
from unicron_elastic.recovery.events import WatchBegan, WorkerOutOfStep, WorkersGoOn, WorkersHung
from unicron_elastic.recovery.policy import Policy
from unicron_elastic.recovery.records import open_incident
from unicron_elastic.recovery.state import Hang, JobState, Phase, Worker

METHOD = "online statistics"
DATA_FACTOR = 10.0  # so much longer may workers make others wait that may themselves wait, for data


def about_hang(state: JobState, event: WorkersHung | WorkersGoOn | WatchBegan) -> tuple[JobState, list[Command]]:
    """Books what the watch over the workers' pace has to say."""
    match event:
        case WorkersHung():
            return _workers_hung(state, event)
        case WorkersGoOn():
            return _workers_go_on(state, event)
        case WatchBegan():  # nothing healthy may be killed: in a new world who hung may have gone on
            return replace(state, hang=state.hang and replace(state.hang, is_in_doubt=True)), []


def _workers_hung(state: JobState, event: WorkersHung) -> tuple[JobState, list[Command]]:
    """Asks for evidence at once. People hear of it, and something is done, when it is sure or has lasted."""
    running = tuple(worker.local_rank for worker in state.running)
    hung = tuple(local_rank for local_rank in event.local_ranks if local_rank in running)
    before = state.hang
    if before is not None and before.is_in_doubt and not _is_same(before, event):
        before = None
    is_known = before is not None and not before.is_in_doubt and event.kind <= before.kind
    if state.phase is not Phase.RUNNING or not hung or is_known:
        return state, []
    hang = Hang(
        at=event.at if before is None else before.at,
        since=event.since,
        local_ranks=hung,
        reason=" ".join((event.reason, *_who_left(state))),
        reason_at=event.at,
        kind=event.kind,
        tell_at=event.at + _tell_after_s(state.policy, event.kind),
        act_at=_act_at(state.policy, event, before),
        evidence_at=event.at + state.policy.evidence_timeout_s,
        is_told=before is not None and before.is_told,
        evidence=None if before is None else before.evidence,
        number=None if before is None else before.number,
    )
    times = sorted({hang.tell_at, hang.evidence_at, hang.act_at or 0.0})
    commands: list[Command] = [
        WakeAt(at=at) for at in times if at > event.at or (before is not None and at == event.at)
    ]
    if before is None:
        commands.insert(0, GatherEvidence(local_ranks=running, reason=event.reason))
    state, told = told_if_due(replace(state, hang=hang), event.at)
    return state, [*told, *commands]


def _who_left(state: JobState) -> list[str]:
    """Those for whom the others wait in vain, a sentence for each."""
    return [f"rank {each.rank} has left with exit code 0." for each in state.workers if each.left_at is not None]


def _is_same(before: Hang, event: WorkersHung) -> bool:
    """Whether there was no step since, and some of those hang who did."""
    return event.since <= before.at and not set(before.local_ranks).isdisjoint(event.local_ranks)


def hang_after(state: JobState, lost: Iterable[Worker]) -> JobState:
    """The state after a loss that the others survive: who hung and was not lost is to be seen again."""
    hang = state.hang
    if hang is None or any(worker.local_rank in hang.local_ranks for worker in lost):
        return replace(state, hang=None)
    return replace(state, hang=replace(hang, is_in_doubt=True))


def went_on(state: JobState, worker: Worker) -> tuple[JobState, list[Command]]:
    """A member has made a step in a new world: if it was in doubt whether it still hangs, it does not."""
    hang = state.hang
    if hang is None or not hang.is_in_doubt or worker.local_rank not in hang.local_ranks:
        return state, []
    told: list[Command] = [Tell(reason=f"rank {worker.rank} goes on in the new world.")] if hang.is_told else []
    return replace(state, hang=None), told


def _tell_after_s(policy: Policy, kind: HangKind) -> float:
    if kind is HangKind.STOPPED:
        return 0.0
    return policy.idle_tell_s if kind is HangKind.UNCLEAR else min(policy.hang_tell_s, policy.hang_patience_s)


def _act_at(policy: Policy, event: WorkersHung, before: Hang | None) -> float | None:
    """When it is time, which does not begin anew with each world that comes meanwhile."""
    act_at = _patient_until(policy, event)
    if act_at is None or before is None or before.act_at is None or event.kind < before.kind:
        return act_at
    return min(act_at, max(before.act_at, event.at))


def _patient_until(policy: Policy, event: WorkersHung) -> float | None:
    """Nothing healthy may be killed: the less sure it is that workers will not go on, the longer they have."""
    if not policy.acts_on_hangs and event.kind is not HangKind.UNCLEAR:
        return event.at + _tell_after_s(policy, event.kind)  # to record it is all there is to do
    patience_s = {
        HangKind.STOPPED: 0.0,
        HangKind.DEADLOCKED: policy.hang_patience_s,
        HangKind.AWAITED: DATA_FACTOR * policy.hang_patience_s,
    }.get(event.kind)
    return None if patience_s is None else event.at + patience_s


def told_if_due(state: JobState, at: float) -> tuple[JobState, list[Command]]:
    """Says what hangs, once it is time."""
    hang = state.hang
    if hang is None or hang.is_told or hang.is_in_doubt or at < hang.tell_at:
        return state, []
    reason = hang.reason
    if at - hang.reason_at >= 1.0:  # the sentence is of the moment when it was noticed
        reason = f"{reason} By now there has been no step for {at - hang.since:.1f} s."
    reason = " ".join(filter(None, (reason, _what_follows(state.policy, hang, at))))
    return replace(state, hang=replace(hang, is_told=True)), [Tell(reason=reason)]


def _what_follows(policy: Policy, hang: Hang, at: float) -> str:
    """Say until when it is waited for who hangs; "" if something is done now, or never is anything."""
    if not policy.acts_on_hangs:
        return ""
    if hang.act_at is None:
        return "Nothing is done, as nobody is seen to wait for that."
    if hang.act_at <= at:
        return ""
    are_ended = "it is ended" if len(hang.local_ranks) == 1 else "they are ended"
    return f"If that lasts, {are_ended} in {hang.act_at - at:.0f} s (--unicron-hang-patience)."


def _workers_go_on(state: JobState, event: WorkersGoOn) -> tuple[JobState, list[Command]]:
    """Drop a hang that was none. Who has heard of it hears that, too."""
    commands: list[Command] = [Tell(reason=event.reason)] if state.hang is not None and state.hang.is_told else []
    return replace(state, hang=None), commands


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
        blames_worker=hang.kind is not HangKind.DEADLOCKED,  # in that, nobody is missing
        reason=hang.reason,
    )


def why_act(hang: Hang, at: float) -> str:
    """Why all workers are stopped now, as a sentence; that and how some hang was said when it was noticed."""
    if hang.kind is HangKind.STOPPED:
        return "A stopped process does not go on by itself: all workers stop."
    return f"Nothing has moved for {at - hang.since:.0f} s: all workers stop."


def kill_hung(state: JobState) -> tuple[JobState, list[Command]]:
    """Ends those who hang at once: a stopped process, or one in a system call, does not hear SIGTERM."""
    if state.hang is None:
        return state, []
    hung = tuple(worker.local_rank for worker in state.running if worker.local_rank in state.hang.local_ranks)
    if state.hang.is_in_doubt:
        hung = ()
    workers = tuple(replace(w, was_killed=True) if w.local_rank in hung else w for w in state.workers)
    state = replace(state, workers=workers, hang=None)
    if not hung:
        return state, []
    noun = "Worker" if len(hung) == 1 else "Workers"
    who = f"{noun} {', '.join(map(str, hung))}"
    return state, [KillWorkers(local_ranks=hung, reason=f"{who} may not hear SIGTERM: SIGKILL at once.")]


def observed(state: JobState, fault: Fault) -> tuple[JobState, list[Command]]:
    """Records the hang and lets it be."""
    hang = state.hang
    assert hang is not None
    before = state.incidents
    state, superseded = open_incident(state, fault, hang.at, METHOD)
    opened = state.incident
    assert opened is not None
    incident = replace(
        opened,
        number=opened.number if hang.number is None else hang.number,  # one hang is one incident
        action="observe",
        decision="Nothing was done: hangs are only observed (--unicron-on-hang, --unicron-on-fault).",
        evidence=None if hang.evidence is None else hang.evidence.report,
    )
    incidents = state.incidents if hang.number is None else before
    state = replace(state, incidents=incidents, hang=replace(hang, act_at=None, number=incident.number))
    commands: list[Command] = [] if superseded is None else [RecordIncident(incident=superseded)]
    return replace(state, incident=None), [*commands, RecordIncident(incident=incident)]


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
