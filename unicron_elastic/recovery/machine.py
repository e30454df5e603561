"""The recovery state machine of one job on one node: ``handle(state, event) -> (state, commands)``.

    IDLE --workers started--> RUNNING --all ended well--> FINISHED
                                 |  fault, peer's fault, membership
                                 v
                              STOPPING --all ended--> IDLE (start again) or FINISHED (failed)

At this tier a fault stops every worker of the node and a new generation starts, as torchrun does it. The verdict is
passed when all workers have ended, because only then every report that tells the root cause from its consequences
is in.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from unicron_elastic.faults import Failure, Fault, RootCause, classify, root_cause
from unicron_elastic.incident import Incident
from unicron_elastic.recovery.commands import (
    Command,
    FailJob,
    FinishJob,
    KillWorkers,
    RecordIncident,
    StartWorkers,
    StopWorkers,
    TellPeers,
    WakeAt,
)
from unicron_elastic.recovery.events import (
    Event,
    FirstStepDone,
    MembershipChanged,
    PeerFailed,
    TimePassed,
    WorkerExited,
    WorkerRaised,
    WorkersStarted,
)
from unicron_elastic.recovery.policy import Policy, Repeats, count_repeats, judge

__all__ = ["JobState", "Phase", "Worker", "handle"]


class Phase(Enum):
    """Where the job stands on this node."""

    IDLE = "idle"  # no workers: before the first generation, or between two
    RUNNING = "running"
    STOPPING = "stopping"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One worker of the present generation."""

    local_rank: int
    rank: int
    pid: int
    exit_code: int | None = None  # None: running
    raised: Failure | None = None  # the exception it said it is ending with
    told_to_stop_at: float | None = None  # when SIGTERM was decided; what it does after that is no fault
    was_killed: bool = False  # we sent SIGKILL
    has_stepped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """Everything a decision depends on. ``JobState(policy=...)`` is a job about to start."""

    policy: Policy
    run_id: str = ""
    job: str = ""
    host: str = ""
    phase: Phase = Phase.IDLE
    generation: int = 0
    restarts_used: int = 0
    workers: tuple[Worker, ...] = ()
    faults: tuple[Fault, ...] = ()  # of the present generation, in the order in which they were noticed
    summons: str = ""  # why a generation without a fault of its own is being stopped
    counts_as_restart: bool = True  # False while stopping for a membership change
    teardown_at: float | None = None
    kill_at: float | None = None
    repeats: Repeats | None = None
    incident: Incident | None = None  # open until the first step after it
    incidents: int = 0

    def worker(self, local_rank: int) -> Worker:
        """The worker with this local rank; KeyError if the generation has none."""
        for worker in self.workers:
            if worker.local_rank == local_rank:
                return worker
        raise KeyError(f"no worker has local rank {local_rank}")

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken; tests call it after every event."""
        assert self.restarts_used >= 0, self
        assert len({w.local_rank for w in self.workers}) == len(self.workers), self
        running = [w for w in self.workers if w.exit_code is None]
        assert bool(running) == (self.phase in (Phase.RUNNING, Phase.STOPPING)), self
        assert (self.kill_at is not None) == (self.phase is Phase.STOPPING), self


def handle(state: JobState, event: Event) -> tuple[JobState, list[Command]]:
    """The state after ``event`` and what the agent is to do now. Events that come too late change nothing."""
    match event:
        case WorkersStarted():
            return _workers_started(state, event)
        case WorkerRaised():
            return _worker_raised(state, event)
        case WorkerExited():
            return _worker_exited(state, event)
        case FirstStepDone():
            return _first_step_done(state, event)
        case PeerFailed():
            return _summoned(state, event.at, event.reason, counts=True)
        case MembershipChanged():
            reason = f"{event.nodes_waiting} node(s) wait to join: all workers restart with the new membership."
            return _summoned(state, event.at, reason, counts=False)
        case TimePassed():
            return _time_passed(state, event)


def _workers_started(state: JobState, event: WorkersStarted) -> tuple[JobState, list[Command]]:
    workers = tuple(Worker(local_rank=w.local_rank, rank=w.rank, pid=w.pid) for w in event.workers)
    state = replace(
        state,
        phase=Phase.RUNNING,
        generation=state.generation + 1,
        restarts_used=event.restarts_used,
        workers=workers,
        faults=(),
        summons="",
    )
    if state.incident is None:
        return state, []
    incident = replace(state.incident, regrouped_at=event.at, restarts_used=event.restarts_used)
    return replace(state, incident=incident), [RecordIncident(incident=incident)]


def _worker_raised(state: JobState, event: WorkerRaised) -> tuple[JobState, list[Command]]:
    worker = _find(state, event.failure.local_rank, event.failure.pid)
    if worker is None or worker.exit_code is not None or worker.raised is not None:
        return state, []
    state = _with_worker(state, replace(worker, raised=event.failure))
    if not _came_before_stop(worker, event.failure.at):
        return state, []  # an exception on SIGTERM is how many scripts stop
    return _fault_noticed(state, classify(event.failure), event.at, "exception propagation")


def _worker_exited(state: JobState, event: WorkerExited) -> tuple[JobState, list[Command]]:
    worker = _find(state, event.local_rank, None)
    if worker is None or worker.exit_code is not None:
        return state, []
    state = _with_worker(state, replace(worker, exit_code=event.exit_code))
    commands: list[Command] = []
    if any(f.failure.local_rank == worker.local_rank for f in state.faults):
        state = _add_exit_code(state, worker.local_rank, event.exit_code)
    elif event.exit_code != 0 and _is_fault(state.phase, worker, event):
        fault = classify(_failure_at_exit(worker, event))
        was_stopping = state.phase is Phase.STOPPING
        state, commands = _fault_noticed(state, fault, event.at, "process supervision")
        if was_stopping:
            # Not its own end but a peer's: there is nothing left for it to tell, and it may take long to tear down.
            state, commands = _stop_raised(state, event.at, fault.reason)
    if any(w.exit_code is None for w in state.workers):
        return state, commands
    state, more = _all_ended(state, event.at)
    return state, commands + more


def _came_before_stop(worker: Worker, at: float) -> bool:
    return worker.told_to_stop_at is None or at < worker.told_to_stop_at


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
    return Failure(
        at=event.ended_at,
        rank=worker.rank,
        local_rank=worker.local_rank,
        pid=worker.pid,
        exit_code=event.exit_code,
        step=event.step,
    )


def _add_exit_code(state: JobState, local_rank: int, exit_code: int) -> JobState:
    """Adds the exit code to the fault that the same worker's exception made."""
    faults = tuple(
        classify(replace(f.failure, exit_code=exit_code)) if f.failure.local_rank == local_rank else f
        for f in state.faults
    )
    return replace(state, faults=faults)


def _fault_noticed(state: JobState, fault: Fault, at: float, method: str) -> tuple[JobState, list[Command]]:
    """Books the fault; the first one of a generation opens an incident and stops the other workers."""
    state = replace(state, faults=(*state.faults, fault))
    if state.phase is not Phase.RUNNING:
        return state, []
    state = _open_incident(state, fault, at, method)
    state, commands = _stop(state, at, fault.reason)
    return state, [TellPeers(reason=fault.reason), *commands]


def _summoned(state: JobState, at: float, reason: str, *, counts: bool) -> tuple[JobState, list[Command]]:
    """Stops a healthy generation because another node failed or wants to join."""
    if state.phase is not Phase.RUNNING:
        return state, []
    state = replace(state, summons=reason, counts_as_restart=counts)
    return _stop(state, at, reason)


def _stop(state: JobState, at: float, reason: str) -> tuple[JobState, list[Command]]:
    policy = state.policy
    running = tuple(w.local_rank for w in state.workers if w.exit_code is None and w.raised is None)
    kill_at = at + policy.stop_timeout_s
    ending = any(w.exit_code is None and w.raised is not None for w in state.workers)
    teardown_at = at + min(policy.teardown_timeout_s, policy.stop_timeout_s) if ending else None
    state = replace(_told_to_stop(state, running, at), phase=Phase.STOPPING, kill_at=kill_at, teardown_at=teardown_at)
    commands: list[Command] = [WakeAt(at=kill_at)]
    if teardown_at is not None:
        commands.append(WakeAt(at=teardown_at))
    return state, [StopWorkers(local_ranks=running, reason=reason), *commands]


def _time_passed(state: JobState, event: TimePassed) -> tuple[JobState, list[Command]]:
    left = tuple(w.local_rank for w in state.workers if w.exit_code is None)
    if state.phase is not Phase.STOPPING or not left:
        return state, []
    assert state.kill_at is not None
    if event.at >= state.kill_at:
        reason = f"{_workers(left)} did not end within {state.policy.stop_timeout_s:g} s of SIGTERM: SIGKILL."
        workers = tuple(replace(w, was_killed=True) if w.local_rank in left else w for w in state.workers)
        return replace(state, workers=workers), [KillWorkers(local_ranks=left, reason=reason)]
    if state.teardown_at is not None and event.at >= state.teardown_at:
        return _stop_raised(state, event.at, "An exception was raised long ago.")
    return state, []


def _stop_raised(state: JobState, at: float, why: str) -> tuple[JobState, list[Command]]:
    """Ends workers that raised an exception and were left to tear down by themselves."""
    raised = tuple(w.local_rank for w in state.workers if w.exit_code is None and w.told_to_stop_at is None)
    state = replace(_told_to_stop(state, raised, at), teardown_at=None)
    if not raised:
        return state, []
    return state, [StopWorkers(local_ranks=raised, reason=f"{why} {_workers(raised)} gets SIGTERM in its teardown.")]


def _all_ended(state: JobState, at: float) -> tuple[JobState, list[Command]]:
    state = replace(state, kill_at=None, teardown_at=None)
    if state.faults:
        return _judge_faults(state, at)
    if state.phase is Phase.RUNNING:
        return replace(state, phase=Phase.FINISHED), [FinishJob(reason="All workers of this node ended well.")]
    used = state.restarts_used + (1 if state.counts_as_restart else 0)
    if used > state.policy.max_restarts and state.counts_as_restart:
        reason = f"{state.summons} No restart: all {state.policy.max_restarts} restarts are used."
        return replace(state, phase=Phase.FINISHED), [FailJob(cause=None, reason=reason)]
    return replace(state, phase=Phase.IDLE), [StartWorkers(restarts_used=used, reason=state.summons)]


def _judge_faults(state: JobState, at: float) -> tuple[JobState, list[Command]]:
    cause = root_cause(state.faults)
    repeats = count_repeats(state.repeats, cause)
    verdict = judge(state.policy, state.restarts_used, repeats, tuple(f.failure for f in state.faults))
    was_told = state.incident is not None and state.incident.reason == cause.reason
    incident = _judged(state.incident, cause, at, "restart" if verdict.restart else "fail", verdict.reason)
    state = replace(state, repeats=repeats, incident=incident if verdict.restart else None)
    recorded: list[Command] = [] if incident is None else [RecordIncident(incident=incident)]
    reason = f"{cause.reason} {verdict.reason}"
    if verdict.restart:
        state = replace(state, phase=Phase.IDLE)
        said = verdict.reason if was_told else reason  # stopping the workers said the rest already
        return state, [*recorded, StartWorkers(restarts_used=verdict.restarts_used, reason=said)]
    return replace(state, phase=Phase.FINISHED), [*recorded, FailJob(cause=cause, reason=reason)]


def _first_step_done(state: JobState, event: FirstStepDone) -> tuple[JobState, list[Command]]:
    worker = _find(state, event.local_rank, None)
    if worker is None or state.phase is not Phase.RUNNING:
        return state, []
    state = _with_worker(state, replace(worker, has_stepped=True))
    if state.incident is None or not all(w.has_stepped or w.exit_code is not None for w in state.workers):
        return state, []
    incident = replace(state.incident, first_step_at=event.at)
    return replace(state, incident=None), [RecordIncident(incident=incident)]


def _open_incident(state: JobState, fault: Fault, at: float, method: str) -> JobState:
    number = state.incidents + 1
    incident = Incident(
        number=number,
        run_id=state.run_id,
        job=state.job,
        host=state.host,
        time="",  # the wall clock is the shell's: it fills this in when it writes the record
        generation=state.generation,
        method=method,
        action="",
        decision="",
        restarts_used=state.restarts_used,
        max_restarts=state.policy.max_restarts,
        occurred_at=fault.failure.at,
        noticed_at=at,
        **_of_root(fault),
    )
    return replace(state, incident=incident, incidents=number)


def _judged(incident: Incident | None, cause: RootCause, at: float, action: str, decision: str) -> Incident | None:
    if incident is None:
        return None
    others = tuple(fault.reason for fault in cause.consequences)
    return replace(
        incident, stopped_at=at, action=action, decision=decision, consequences=others, **_of_root(cause.fault)
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


def _find(state: JobState, local_rank: int, pid: int | None) -> Worker | None:
    """The worker an event speaks of; None if the event is of an older generation."""
    for worker in state.workers:
        if worker.local_rank == local_rank and pid in (None, worker.pid):
            return worker
    return None


def _with_worker(state: JobState, changed: Worker) -> JobState:
    return replace(state, workers=tuple(changed if w.local_rank == changed.local_rank else w for w in state.workers))


def _told_to_stop(state: JobState, local_ranks: tuple[int, ...], at: float) -> JobState:
    workers = tuple(replace(w, told_to_stop_at=at) if w.local_rank in local_ranks else w for w in state.workers)
    return replace(state, workers=workers)


def _workers(local_ranks: tuple[int, ...]) -> str:
    noun = "Worker" if len(local_ranks) == 1 else "Workers"
    return f"{noun} {', '.join(map(str, local_ranks))}"
