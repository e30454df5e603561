"""What the agent of a node does with its orders, decided purely: ``handle(state, event) -> (state, commands)``.

A node has at most one job, and runs it as one *child*, an ``unicron-run`` of its own. An order is refused before the
old job is left, if the new one cannot run here; what fails later makes the node idle, with a refusal that keeps the
same order from coming again at once. A node leaves a job that goes on by being *recalled*, which costs nobody a
restart; from a job that ends or waits it is stopped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from signal import SIGKILL, SIGTERM

from unicron_elastic.base.text import failed_text
from unicron_elastic.planning.coordinate.node_status import REFUSED_S, NodeState, NodeStatus, Refusal, is_within
from unicron_elastic.planning.coordinate.snapshot import JobPhase
from unicron_elastic.planning.model.jobs import JobSpec

RECALL_S = 60.0  # so long a job may take to let a node go
STOP_S = 10.0  # ... when its agent is to end
END_S = 60.0  # ... and a finished one to end by itself
MOST_S = max(RECALL_S, END_S) + 1.0  # that any wait takes
_UNUSED = "the plan takes it out of the job."


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordered:
    """The coordinator wants this node to work for ``target``; "" for none, whatever it does now.

    ``why_not`` says why ``target`` cannot run here, as a sentence; "": it can, as far as can be told. ``why_out`` says
    of a node that is drained or in quarantine that it is, as a clause.
    """

    at_unix_s: float
    target: str
    reason: str
    why_not: str = ""
    why_out: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """This node, idle, has claimed a place in a job that nobody plans, and is to run its part of it.

    If that is right, ``is_claimed`` is true of the state then.
    """

    at_unix_s: float
    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSeen:
    """How the job is that this node has or goes to. ``start``: number of its latest start.

    ``signal``: with which it is to be stopped, if it is. No ``spec``: it is gone, or nobody can read it. No ``phase``:
    nobody knows, as the store has lost its data; what runs goes on, and only a word that says so ends it.
    """

    at_unix_s: float
    job: str
    spec: JobSpec | None
    phase: JobPhase | None = JobPhase.SUBMITTED
    start: int = 0
    nodes: int = 0
    signal: int = SIGTERM


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildWorks:
    """The workers of this node train with those of the others."""

    at_unix_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildEnded:
    """The child is gone, or could not be started: ``exit_code`` None, and ``why``. ``verdict``: how the job ended.

    ``verdict`` is "" while the job goes on, else "well" or "failed", and ``why_failed`` a sentence or "".
    ``is_kept_out``: the node is drained, or in quarantine, which is why it left.
    """

    at_unix_s: float
    exit_code: int | None
    verdict: str = ""
    why_failed: str = ""
    why: str = ""
    is_kept_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotsKept:
    """This node's memory has the newest state of these jobs, of which none runs here now."""

    at_unix_s: float
    jobs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """This agent is to end."""

    at_unix_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTick:
    """Some time has passed."""

    at_unix_s: float


Event = Ordered | Claimed | JobSeen | ChildWorks | ChildEnded | SnapshotsKept | Stopped | NodeTick


@dataclass(frozen=True, slots=True)
class SayStatus:
    """Write what this node does into the store."""

    status: NodeStatus


@dataclass(frozen=True, slots=True)
class WatchJob:
    """Post ``JobSeen`` of this job, now and whenever it changes; "" for none any more."""

    job: str


@dataclass(frozen=True, slots=True)
class StartChild:
    """Run this node's part of the job: its start number ``start``, for which ``nodes`` wait."""

    spec: JobSpec
    start: int
    nodes: int


@dataclass(frozen=True, slots=True)
class RecallChild:
    """Have the child leave its job, which goes on."""

    reason: str


@dataclass(frozen=True, slots=True)
class StopChild:
    """Stop the child by this signal, as torchrun is stopped; SIGKILL is the last word.

    ``saves_first``: its job is to wait for nodes, and goes on from what it keeps.
    """

    signal: int = SIGTERM
    saves_first: bool = False


@dataclass(frozen=True, slots=True)
class EndJob:
    """Write that the job is finished, unless somebody has."""

    job: str
    start: int
    exit_code: int
    reason: str


@dataclass(frozen=True, slots=True)
class TellPeople:
    """Let people know."""

    reason: str


@dataclass(frozen=True, slots=True)
class TellJob:
    """Let people know, those who wait for the job as well, why it cannot run here."""

    job: str
    reason: str


Command = SayStatus | WatchJob | StartChild | RecallChild | StopChild | EndJob | TellPeople | TellJob


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentState:
    """What the agent knows. ``start``: of the child's job; 0: there is no child. ``is_claimed``: nobody plans that job.

    ``stops_at_unix_s``: when the child is to be stopped if it has not ended by then, ``kills_at_unix_s`` likewise.
    """

    status: NodeStatus
    start: int = 0
    seen: JobSeen | None = None
    stops_at_unix_s: float | None = None
    kills_at_unix_s: float | None = None
    is_stopping: bool = False
    is_claimed: bool = False

    @property
    def has_child(self) -> bool:
        """Whether a child runs."""
        return self.start > 0


Outcome = tuple[AgentState, tuple[Command, ...]]


def handle(state: AgentState, event: Event) -> Outcome:
    """The state after ``event``, and what is to be done."""
    before = state.status
    match event:
        case Ordered():
            state, commands = _ordered(state, event)
        case Claimed():
            state, commands = _claimed(state, event)
        case JobSeen():
            state, commands = _job_seen(state, event)
        case ChildWorks():
            state, commands = _child_works(state)
        case ChildEnded():
            state, commands = _child_ended(state, event)
        case SnapshotsKept():
            state, commands = replace(state, status=replace(state.status, keeps=event.jobs)), ()
        case Stopped():
            state, commands = _stopped(state, event)
        case NodeTick():
            state, commands = _time_passed(state, event)
    said: tuple[Command, ...] = (SayStatus(state.status),) if state.status != before else ()
    # One that has left a job for the same job has forgotten how that is.
    has_news = state.status.job != before.job or (isinstance(event, ChildEnded) and state.status.job != "")
    watched = (WatchJob(state.status.job),) if has_news else ()
    # How a job has ended is written before this node offers itself, or it would be sent back to that job.
    ends = tuple(each for each in commands if isinstance(each, EndJob))
    return state, (*ends, *said, *watched, *(each for each in commands if each not in ends))


def _ordered(state: AgentState, event: Ordered) -> Outcome:
    status = state.status
    is_elsewhere = state.is_claimed and status.state is not NodeState.LEAVING  # in a job that may be called the same
    if state.is_stopping or (event.target == status.heads_for and not is_elsewhere):
        return state, ()
    if event.target and event.why_not:
        refused = _refusing(status, event.target, event.at_unix_s)
        reason = f"{status.host} refuses {event.target}: {event.why_not}"
        return replace(state, status=refused), (TellJob(event.target, reason),)
    told = TellPeople(event.reason)
    if not state.has_child:
        return replace(state, status=_joining(status, event.target), seen=None), (told,)
    if status.state is NodeState.LEAVING:
        return replace(state, status=replace(status, towards=event.target)), (told,)
    state, commands = _leave(state, event.target, event.at_unix_s, event.why_out)
    return state, (told, *commands)


def _claimed(state: AgentState, event: Claimed) -> Outcome:
    if state.status.state is not NodeState.IDLE or state.is_stopping:
        return state, ()  # it has something else to do by now
    return replace(state, status=_joining(state.status, event.job), start=1, is_claimed=True), ()


def _job_seen(state: AgentState, event: JobSeen) -> Outcome:
    status = state.status
    if event.job != status.job or state.is_claimed or (state.has_child and event.phase is None):
        return state, ()
    state = replace(state, seen=event)
    is_running = event.phase is JobPhase.RUNNING
    if not state.has_child:
        if event.spec is None or event.phase in (JobPhase.FINISHED, JobPhase.CANCELLED):
            return replace(state, status=_joining(status, "")), ()
        if is_running and not state.is_stopping:
            return replace(state, start=event.start), (StartChild(event.spec, event.start, event.nodes),)
        return state, ()
    if is_running and event.start == state.start:
        return state, ()
    if _ends_by_itself(event):
        return _await_end(state, event.at_unix_s)
    if status.state is NodeState.LEAVING:
        return _stop(state, event.at_unix_s)
    return _leave(state, "", event.at_unix_s)


def _child_works(state: AgentState) -> Outcome:
    if not state.has_child or state.status.state is not NodeState.JOINING:
        return state, ()
    return replace(state, status=replace(state.status, state=NodeState.WORKING)), ()


def _child_ended(state: AgentState, event: ChildEnded) -> Outcome:
    """On to the next job, or idle; what the end says of the job is written down."""
    status, job, start = state.status, state.status.job, state.start
    commands: list[Command] = []
    was_leaving = status.state is NodeState.LEAVING
    code = event.exit_code
    target = status.towards
    if state.is_claimed:
        then = f"it goes to {target}" if target else "its agent ends" if state.is_stopping else "it is a spare again"
        commands.append(TellPeople(f"This node's part of the job {job!r} has ended with {_code_of(event)}: {then}."))
        if code != 0 and not target and not event.is_kept_out:  # else it was stopped to go there
            status = _refusing(status, job, event.at_unix_s)
    elif event.verdict or (code == 0 and not was_leaving):
        failed = event.verdict == "failed"
        reason = f"{job} has ended well, as {status.host} says."
        if failed:
            reason = failed_text(job, status.host, event.why_failed)
        exit_code = 0 if not failed else code if code is not None and code > 0 else 1  # < 0: by a signal
        commands.append(EndJob(job, start, exit_code, reason))
    elif not was_leaving and not (state.seen is not None and state.seen.phase is JobPhase.FINISHED):
        status = status if event.is_kept_out else _refusing(status, job, event.at_unix_s)
        why = event.why or f"its part of it ended with {_code_of(event)} while the job goes on"
        commands.append(TellJob(job, f"{status.host} leaves {job}: {why}."))
    state = AgentState(status=_joining(status, target), is_stopping=state.is_stopping)
    return state, tuple(commands)


def _code_of(event: ChildEnded) -> str:
    """How the child ended, in words."""
    return event.why if event.exit_code is None else f"exit code {event.exit_code}"


def _stopped(state: AgentState, event: Stopped) -> Outcome:
    """The first time the job is asked to let the node go, which costs nobody a restart; the second time it must."""
    is_first, state = not state.is_stopping, replace(state, is_stopping=True)
    if not state.has_child:
        return replace(state, status=_joining(state.status, "")), ()
    if is_first and state.status.state is not NodeState.LEAVING:
        state, commands = _leave(state, "", event.at_unix_s)
        if state.stops_at_unix_s is not None:
            state = replace(state, stops_at_unix_s=min(state.stops_at_unix_s, event.at_unix_s + STOP_S))
        return state, commands
    return _stop(replace(state, status=replace(state.status, state=NodeState.LEAVING, towards="")), event.at_unix_s)


def _time_passed(state: AgentState, event: NodeTick) -> Outcome:
    if not state.has_child:
        return state, ()
    if _is_due(state.kills_at_unix_s, event.at_unix_s):
        return replace(state, kills_at_unix_s=None), (StopChild(SIGKILL),)
    if _is_due(state.stops_at_unix_s, event.at_unix_s):
        return _stop(state, event.at_unix_s)
    return state, ()


def _is_due(moment_unix_s: float | None, at_unix_s: float) -> bool:
    """Also if the clock was set back since that moment was chosen: then a wait ends early, and is not made longer."""
    return moment_unix_s is not None and not moment_unix_s - MOST_S <= at_unix_s < moment_unix_s


def _leave(state: AgentState, target: str, at_unix_s: float, why_out: str = "") -> Outcome:
    """A job that goes on lets the node go; else there is nothing to wait for."""
    status, seen = state.status, state.seen
    state = replace(state, status=replace(status, state=NodeState.LEAVING, towards=target))
    if _ends_by_itself(seen) and not state.is_claimed:
        return _await_end(state, at_unix_s)
    goes_on = seen is not None and seen.phase is JobPhase.RUNNING and seen.start == state.start
    if not goes_on or state.is_claimed or status.state is not NodeState.WORKING:
        return _stop(state, at_unix_s)
    if target:
        reason = f"{target} gets it by the plan."
    elif state.is_stopping:
        reason = "its agent ends."
    else:
        reason = f"it {why_out}." if why_out else _UNUSED
    return replace(state, stops_at_unix_s=at_unix_s + RECALL_S), (RecallChild(reason),)


def _ends_by_itself(seen: JobSeen | None) -> bool:
    """Whether the job has finished, of which another node may have told before the child here is done."""
    return seen is not None and seen.phase is JobPhase.FINISHED


def _await_end(state: AgentState, at_unix_s: float) -> Outcome:
    return replace(state, stops_at_unix_s=state.stops_at_unix_s or at_unix_s + END_S), ()


def _stop(state: AgentState, at_unix_s: float) -> Outcome:
    seen = state.seen
    if state.kills_at_unix_s is not None:
        return state, ()  # it was told
    return replace(state, stops_at_unix_s=None, kills_at_unix_s=at_unix_s + END_S), (
        StopChild(SIGTERM if seen is None else seen.signal, saves_first=_is_to_wait(seen)),
    )


def _is_to_wait(seen: JobSeen | None) -> bool:
    return seen is not None and seen.spec is not None and seen.phase is JobPhase.SUBMITTED


def _joining(status: NodeStatus, job: str) -> NodeStatus:
    """Without a child: on the way to ``job``, or idle."""
    state = NodeState.JOINING if job else NodeState.IDLE
    return replace(status, state=state, job=job, towards="")


def _refusing(status: NodeStatus, job: str, at_unix_s: float) -> NodeStatus:
    """Return the state with one refusal more, and without those that are over."""
    kept = [each for each in status.refusals if each.job != job and is_within(at_unix_s, each.at_unix_s, REFUSED_S)]
    return replace(status, refusals=(*kept, Refusal(job, at_unix_s)))
