"""What can happen to a job on one node. Past tense, frozen; ``at`` is monotonic seconds.

``generation`` counts the generations of this node from 1 and says of which one an event speaks, because what was
heard of one may be delivered in the next; None: of the present one. A worker that raised is known by its pid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from unicron_elastic.base.world import World
from unicron_elastic.faults import Failure, HangKind, Severity, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedWorker:
    """A worker process of the new generation."""

    local_rank: int
    rank: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersStarted:
    """All workers of a generation run on this node. ``restarts_used`` is the job's count, not this agent's.

    ``why_stay`` says why the job cannot go on without this node, as a sentence; "": it can. ``node`` is what this node
    is called in the worlds of this generation. ``nodes``: how many the job has. ``do_others_train``: workers of other
    nodes train on in place, in a world that comes to be known here. ``why_lost``: why nodes that trained with this one
    before are lost, as a sentence, if they are.
    """

    at: float
    restarts_used: int
    workers: tuple[StartedWorker, ...]
    why_stay: str = "it is the only node of the job."
    node: str = "here"
    nodes: int = 1
    do_others_train: bool = False
    why_lost: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRaised:
    """A worker is about to end with an exception. The process may still be up."""

    at: float
    failure: Failure
    has_saved: bool | None = None  # a checkpoint of what it had learned; None: unknown
    has_restored: bool | None = None  # it began from one


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnding:
    """A worker ends by itself: its interpreter shuts down, or the kernel is about to. Its exit code is to come."""

    at: float
    local_rank: int
    generation: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExited:
    """A worker process ended; ``exit_code`` is negative for a signal. ``ended_at`` is when the kernel said so."""

    at: float
    ended_at: float
    local_rank: int
    exit_code: int
    step: int | None = None  # optimizer steps it had done, from its pulse page; None: unknown
    has_saved: bool | None = None  # a checkpoint of what it had learned; None: unknown
    has_restored: bool | None = None  # it began from one
    generation: int | None = None
    why_killed: str = ""  # why the kernel killed it, as far as it is known, such as "out of memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStepDone:
    """A worker finished its first optimizer step since it started."""

    at: float
    local_rank: int
    generation: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersHung:
    """The statistics of the job's pace say that these workers hang. ``since`` is when they last stepped."""

    at: float
    since: float
    local_ranks: tuple[int, ...]
    reason: str
    kind: HangKind
    generation: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchBegan:
    """The workers' pace is watched from the beginning, as in a new world: whether any still hang is not known."""

    at: float
    generation: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersGoOn:
    """Workers that were said to hang step or work again."""

    at: float
    reason: str
    generation: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOutOfStep:
    """A worker has begun fewer collectives than the others since ``step``, which ended at ``since``."""

    at: float
    since: float
    step: int
    local_rank: int
    reason: str
    generation: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceGathered:
    """What ``GatherEvidence`` asked for: where the report is, and the stacks of workers, by local rank."""

    at: float
    report: str | None
    stacks: tuple[tuple[int, str], ...]
    generation: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUnhealthy:
    """No work can rely on this node: a probe's finding."""

    at: float
    status: Status
    severity: Severity
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecalled:
    """This node, which runs, is wanted elsewhere, or drained; "" as the reason: not any more.

    ``why_stay``: why the job cannot do without it now, as a sentence; "": it can. ``is_drained``: it is to work in no
    job, and not in another one.
    """

    at: float
    reason: str
    why_stay: str = ""
    is_drained: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnded:
    """The workers have just completed an optimizer step, or that was waited for long enough."""

    at: float
    generation: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveAnswered:
    """Whether this node may leave the job; ``why_not`` says why it must stay, "": it may leave."""

    at: float
    why_not: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFailed:
    """Another node of the job reported a fault."""

    at: float
    reason: str
    generation: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherNodesLost:
    """Other nodes of the job are gone; ``nodes`` is what they are called in its worlds."""

    at: float
    nodes: tuple[str, ...]
    reason: str
    generation: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesSilent:
    """These ``nodes``, and no others, give no sign of life now; their workers may train all the same."""

    at: float
    nodes: tuple[str, ...]
    generation: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenForLost:
    """The others took this node, which lives, for lost."""

    at: float
    reason: str
    generation: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesDepart:
    """Other nodes of the job, which are well, are about to leave; ``nodes`` is what they are called in its worlds."""

    at: float
    nodes: tuple[str, ...]
    reason: str
    generation: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipChanged:
    """Nodes wait to join the job."""

    at: float
    nodes_waiting: int
    generation: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReplaced:
    """A process was started in the place of a lost one; ``restarts_used`` is the job's count."""

    at: float
    worker: StartedWorker
    restarts_used: int
    generation: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberEntered:
    """A worker can go on in its process when others are lost, and asks which world it belongs to.

    ``replica_size`` workers of its node, in their order, make one replica: if one of them is lost, all are.
    """

    at: float
    local_rank: int
    replica_size: int = 1
    generation: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFetched:
    """A newcomer has the training state after ``state`` optimizer steps."""

    at: float
    local_rank: int
    state: int
    generation: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldChanged:
    """The agents have agreed on this world."""

    at: float
    world: World
    generation: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldBroke:
    """The collectives of world number ``world`` failed in a worker, which goes on when there is another.

    ``outlives_joins``: that is one that breaks this world; else any newer one.
    """

    at: float
    world: int
    failure: Failure
    outlives_joins: bool = True
    generation: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberWentOn:
    """A worker has made its first optimizer step in world number ``world``.

    Of the micro-batches of that step it ``reused`` those that it had computed before; all members together have
    ``recomputed`` some that others had held.
    """

    at: float
    local_rank: int
    world: int
    reused: int
    recomputed: int
    regrouped_at: float | None = None  # when the members had met and connected
    generation: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberLeft:
    """A newcomer leaves the world that took it in: it will ask again, when it is where the others are."""

    at: float
    local_rank: int
    generation: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberParted:
    """A worker has made its last step, and nobody needs it any more.

    It did so in world number ``world``, by a call up to ``total``, and may ask for a part once more; None: it will not.
    """

    at: float
    local_rank: int
    world: int | None = None
    total: int = 0
    generation: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """The time asked for by ``WakeAt`` has come."""

    at: float


Event: TypeAlias = (
    WorkersStarted
    | WorkerRaised
    | WorkerEnding
    | WorkerExited
    | WorkersHung
    | WorkerOutOfStep
    | WatchBegan
    | WorkersGoOn
    | EvidenceGathered
    | FirstStepDone
    | NodeUnhealthy
    | NodeRecalled
    | StepEnded
    | LeaveAnswered
    | PeerFailed
    | OtherNodesLost
    | NodesSilent
    | TakenForLost
    | NodesDepart
    | MembershipChanged
    | WorkerReplaced
    | MemberEntered
    | MemberLeft
    | StateFetched
    | WorldChanged
    | WorldBroke
    | MemberWentOn
    | MemberParted
    | TimePassed
)
