"""What is known of one job on one node: a value that every decision depends on and nothing else."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import Enum

from unicron_elastic.base.incident import Incident
from unicron_elastic.base.world import Member, World
from unicron_elastic.faults import Failure, Fault, HangKind, RootCause
from unicron_elastic.recovery.commands import StartWorkers
from unicron_elastic.recovery.events import EvidenceGathered, NodesSilent, NodeUnhealthy, WorldBroke
from unicron_elastic.recovery.policy import Attempt, Policy, Repeats, Verdict


class Phase(Enum):
    """Where the job stands on this node."""

    IDLE = "idle"  # no workers: before the first generation, or between two
    RUNNING = "running"
    STOPPING = "stopping"
    LEAVING = "leaving"  # no workers, and not known yet whether this node may leave
    FINISHED = "finished"


class Part(Enum):
    """What part a worker has in the world of those who train together and can go on without one another."""

    NONE = "none"  # it has not asked for one
    NEWCOMER = "newcomer"  # it has asked, and gets the state from a member
    MEMBER = "member"
    PARTED = "parted"  # it has made its last step
    LOST = "lost"  # the others go on without it; its process may still have to end
    REPLACING = "replacing"  # another process is being started in its place


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One worker of the present generation."""

    local_rank: int
    rank: int
    pid: int
    exit_code: int | None = None  # None: running
    raised: Failure | None = None  # the exception it said it is ending with
    ending_at: float | None = None  # when it was seen to end by itself
    told_to_stop_at: float | None = None  # when SIGTERM was decided; what it does after that is no fault
    was_killed: bool = False  # we sent SIGKILL
    has_stepped: bool = False
    step: int | None = None  # optimizer steps it had done when it ended
    left_at: float | None = None  # when it ended by itself with exit code 0
    has_saved: bool | None = None  # it wrote a checkpoint; None: unknown
    has_restored: bool | None = None  # it began from one
    part: Part = Part.NONE
    is_ready: bool = False  # it has the state, and waits for its mates to have it
    is_given_up: bool = False  # the others train on without it to the end, as no replacement comes to train
    takes_place: int = 0  # of how many that were lost, or left as they were not where the others are
    since: int = 0  # the number of the world that took it in
    lost_in: int = 0  # the number of the world in which it, or whose place it takes, trained when it was lost
    parted_in: int | None = None  # ... of that in which it made its last step; None: it does not train once more
    parted_at: int = 0  # the total of the call that ended there
    went_on_in: int = 0  # the number of the latest world in which it has made a step
    reused: int | None = None  # micro-batches of that step that it had computed before; None: it was not there
    recomputed: int | None = None  # ... and that others had held

    @property
    def is_lost(self) -> bool:
        """Whether the others go on without it."""
        return self.part is Part.LOST


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """Workers said to hang, of whom nothing was done yet."""

    at: float
    since: float
    local_ranks: tuple[int, ...]
    reason: str
    reason_at: float  # the moment of which it tells
    kind: HangKind
    tell_at: float
    act_at: float | None  # None: never
    evidence_at: float  # when it is no longer waited for
    is_told: bool = False
    evidence: EvidenceGathered | None = None
    number: int | None = None  # of the incident in which it was only observed
    is_in_doubt: bool = False  # the watch began anew, and has not seen it since

    def is_due(self, at: float) -> bool:
        """Whether it is time to act."""
        has_evidence = self.evidence is not None or at >= self.evidence_at
        return self.act_at is not None and at >= self.act_at and has_evidence and not self.is_in_doubt


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """A node that would leave, and the verdicts for when it may and when it may not."""

    cause: RootCause | None
    reason: str  # what happened
    leaves: Verdict
    stays: Verdict
    is_broken: bool  # else it is only suspected
    otherwise: Fault | None = None  # for which all begin again if it must stay


class RecallStage(Enum):
    """How far a node that is wanted elsewhere has come on its way out."""

    STAYS = "stays"  # the job cannot do without it now
    STEPS = "steps"  # it waits for the end of a step
    ASKS = "asks"  # ... whether it may leave
    LEAVES = "leaves"  # it may, and the others have been told


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """That this node is wanted elsewhere, or drained; with a ``departure``, that it is suspected or broken."""

    reason: str
    is_drained: bool = False
    departure: Departure | None = None
    stage: RecallStage = RecallStage.STAYS
    why_stay: str = ""  # as people were told
    act_at: float | None = None  # when it asks again, or ends its workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """That a process of a worker was started."""

    at: float
    local_rank: int
    is_fruitful: bool = False  # the worker has made a step since then


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """That nodes wait to join, or depart: how many ``more``, and why the nodes are to meet, as words for people."""

    more: int
    why: str
    at: float | None = None  # when they are to; None: when all workers here train again


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
    summons: str = ""  # why this generation is being stopped, if not for a fault of its own
    lost: str = ""  # that nodes are lost, as a sentence, if this generation is being stopped for that
    join: Join | None = None  # for which the nodes are to meet, and this generation may have to stop
    started_on: int = 1  # nodes, of which this generation's configuration is
    began_at: float = 0.0  # when this generation was started
    counts_as_restart: bool = True  # False while stopping for a membership change
    teardown_at: float | None = None
    kill_at: float | None = None
    hang: Hang | None = None
    repeats: Repeats | None = None
    attempts: tuple[Attempt, ...] = ()  # what this node's workers failed of lately
    why_stay: str = ""  # why the job cannot go on without this node; "": it can
    findings: tuple[NodeUnhealthy, ...] = ()  # on this node, of late
    broken: NodeUnhealthy | None = None  # for which it would have left, if it could
    leaving: NodeUnhealthy | None = None  # for which the workers are being stopped
    departure: Departure | None = None
    recall: Recall | None = None
    observed: Incident | None = None  # of a finding, of which nothing was done
    node: str = "here"  # what this node is called in the worlds of this generation
    replica_size: int = 1  # how many workers of this node, in their order, make one replica
    world: World | None = None  # of those who can go on without one another; None: nobody asked for one
    unbroken_since: int = 0  # the number of the world since which others have joined, and nothing else has happened
    came_late: bool = False  # to that world: no worker of this generation has a state of its own to begin with
    is_left_out: bool = False  # the others go on without this node: its workers are being ended, and it joins again
    gone: frozenset[str] = frozenset()  # nodes of this round that were lost or have left
    silent: NodesSilent | None = None  # nodes of this round of which it is not known whether they are lost
    broke: WorldBroke | None = None  # and nobody is known to be gone
    reattempts: int = 0  # since the world last went on
    answered: tuple[str, int | None] | None = None  # signature and step of the failure that it has to go on from
    starts: tuple[Start, ...] = ()  # of workers, the latest of each
    start: StartWorkers | None = None  # of all workers, which is put off, as there were many
    start_at: float | None = None  # ... until then
    replace_at: float | None = None  # when lost workers are replaced, if the others have not gone on before
    incident: Incident | None = None  # open until the first step after it
    incidents: int = 0

    @property
    def running(self) -> tuple[Worker, ...]:
        """The workers that have not ended."""
        return tuple(worker for worker in self.workers if worker.exit_code is None)

    @property
    def awaits_replacements(self) -> bool:
        """Whether workers were lost that will be replaced, while others, perhaps of other nodes, go on."""
        parts = {worker.part for worker in self.workers} if self.phase is Phase.RUNNING else set()
        return Part.REPLACING in parts or (Part.LOST in parts and self.replace_at is not None)

    @property
    def leaves(self) -> bool:
        """Whether this node may leave the job, which goes on, and the others know that it does."""
        return self.recall is not None and self.recall.stage is RecallStage.LEAVES

    def find(self, local_rank: int, pid: int | None = None) -> Worker | None:
        """The worker an event speaks of; None if this generation has no such worker."""
        for worker in self.workers:
            if worker.local_rank == local_rank and pid in (None, worker.pid):
                return worker
        return None

    def with_worker(self, changed: Worker) -> JobState:
        """The state in which ``changed`` stands for the worker of its local rank."""
        workers = (changed if w.local_rank == changed.local_rank else w for w in self.workers)
        return replace(self, workers=tuple(workers))

    def told_to_stop(self, local_ranks: tuple[int, ...], at: float) -> JobState:
        """The state in which SIGTERM was decided for these workers."""
        workers = (replace(w, told_to_stop_at=at) if w.local_rank in local_ranks else w for w in self.workers)
        return replace(self, workers=tuple(workers))

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken; tests call it after every event."""
        assert self.restarts_used >= 0, self
        assert self.replica_size >= 1, self
        assert len({w.local_rank for w in self.workers}) == len(self.workers), self
        is_under_way = bool(self.running) or self.awaits_replacements
        assert is_under_way == (self.phase in (Phase.RUNNING, Phase.STOPPING)), self
        assert self.phase is Phase.RUNNING or (self.broke is None and self.replace_at is None), self
        assert self.start is None or self.phase is Phase.IDLE, self
        assert (self.kill_at is not None) == (self.phase is Phase.STOPPING), self
        assert self.hang is None or self.phase is Phase.RUNNING, self
        assert self.leaving is None or self.phase is Phase.STOPPING, self
        assert (self.departure is not None) == (self.phase is Phase.LEAVING), self
        if self.phase is Phase.RUNNING:
            assert not self.faults, self
            assert not self.summons, self
        if self.phase is Phase.STOPPING:
            self._validate_stop()
        if self.incident is not None:
            assert self.incident.number == self.incidents, self
            assert self.incident.superseded_by is None, self

    def _validate_stop(self) -> None:
        assert self.faults or self.summons, self
        for worker in self.running:
            if worker.told_to_stop_at is None:  # only who was ending may do so by itself, and not for ever
                assert worker.raised is not None or worker.ending_at is not None, self
                assert self.teardown_at is not None, self
        if self.faults or self.leaving is not None:
            assert self.incident is not None, self
            assert self.incident.generation == self.generation, self


def name_of(state: JobState, worker: Worker) -> str:
    """Name the member that a worker is or will be; nobody else in this job has it, as nodes' names differ."""
    return f"{worker.rank}.{worker.takes_place}#{state.node.rpartition('#')[2]}"


def member_of(state: JobState, worker: Worker) -> Member:
    return Member(name=name_of(state, worker), node=state.node, local_rank=worker.local_rank)


def first_members(state: JobState) -> tuple[Member, ...]:
    """What the workers of a new generation on this node will be."""
    return tuple(member_of(state, worker) for worker in state.workers)


def is_over(state: JobState) -> bool:
    """Whether members that have made their last steps have begun to end."""
    return state.world is not None and state.world.over > 0


def living_members(state: JobState) -> tuple[str, ...]:
    """What those workers are called in a world that run, and that the others do not go on without."""
    return tuple(name_of(state, worker) for worker in state.running if not worker.is_lost)


def trains_here(state: JobState, worker: Worker) -> bool:
    """Whether a worker is one of those who train together: no newcomer, and not lost."""
    if state.world is None:
        return not worker.takes_place
    return state.world.rank_of(name_of(state, worker)) is not None


def is_newcomer(state: JobState, worker: Worker) -> bool:
    """Whether a worker is on its way into a world in which others train already."""
    if state.world is None or not (worker.takes_place or state.came_late):
        return False
    return worker.part in (Part.NONE, Part.NEWCOMER) and not trains_here(state, worker)


def members_here(state: JobState) -> list[Worker]:
    return [worker for worker in state.running if worker.part is Part.MEMBER]


def is_anyone_elsewhere(state: JobState) -> bool:
    return state.world is not None and any(member.node != state.node for member in state.world.members)


def nodes_elsewhere(state: JobState) -> tuple[str, ...]:
    """The other nodes whose workers are members of the world, as the rendezvous calls them."""
    members = () if state.world is None else state.world.members
    return tuple(sorted({member.node.rpartition("#")[0] for member in members if member.node != state.node}))


def members_of(world: World, nodes: Collection[str]) -> tuple[str, ...]:
    """Return the names of the members on these nodes, as the worlds or the rendezvous call them."""
    of = ((member.name, member.node) for member in world.members)
    return tuple(name for name, node in of if node in nodes or node.rpartition("#")[0] in nodes)


def has_anyone_parted(state: JobState) -> bool:
    return any(worker.part is Part.PARTED for worker in state.workers)


def has_anyone_a_part(state: JobState) -> bool:
    """Whether a worker here trains with the others, or has made its last step with them."""
    return any(worker.part in (Part.MEMBER, Part.PARTED) for worker in state.workers)


def named(local_ranks: tuple[int, ...]) -> str:
    """Return what people read, such as "Workers 0, 2"."""
    return f"{'Worker' if len(local_ranks) == 1 else 'Workers'} {', '.join(map(str, local_ranks))}"
