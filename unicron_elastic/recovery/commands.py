"""What the agent is to do. Imperative, frozen; each decision carries its reason as one sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from unicron_elastic.base.incident import Incident
from unicron_elastic.base.world import NO_END, EndOfSteps, Member
from unicron_elastic.faults import RootCause


@dataclass(frozen=True, slots=True, kw_only=True)
class StopWorkers:
    """Ask these workers to end (SIGTERM to each one's process group).

    ``is_anyone_gone``: some rank of the job is not there any more, so that what waits for it waits in vain.
    """

    local_ranks: tuple[int, ...]
    reason: str
    is_anyone_gone: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class KillWorkers:
    """End these workers now (SIGKILL to each one's process group)."""

    local_ranks: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherEvidence:
    """Find out what these workers are doing, and post ``EvidenceGathered``, also if nothing could be found."""

    local_ranks: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorkers:
    """Clear away what is left of the old generation, meet the other nodes and start a new one."""

    restarts_used: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishJob:
    """Every worker of this node ended well."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FailJob:
    """The job cannot go on."""

    cause: RootCause | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AskToLeave:
    """Find out whether the job can spare this node now, since others may leave as well, and post ``LeaveAnswered``.

    ``is_departure``: it is well, and if it may leave, the other nodes are to hear at the same time that it does.
    ``have_state``: the others that have the training state, of which one has to stay; empty: that does not matter.
    """

    reason: str
    is_departure: bool = False
    have_state: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitStep:
    """Post ``StepEnded`` when the workers have just completed an optimizer step, or after a few seconds or steps."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DepartWell:
    """Take this node, which is well, out of the job, which goes on elsewhere.

    ``is_drained``: whoever started it is to hear that it did not come to the job's end.
    """

    reason: str
    is_drained: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveJob:
    """Take this node out of the job, which goes on elsewhere, and into quarantine.

    ``quarantine_s`` is for how many seconds; None: until somebody lifts it.
    """

    cause: RootCause | None
    reason: str
    quarantine_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordIncident:
    """Write the incident as it now stands; a later record of the same number replaces this one."""

    incident: Incident


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """Let people know."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TellPeers:
    """Let the job's other nodes know of a fault here, so that nobody waits in a collective for a dead rank."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeWorld:
    """Have the agents agree on a next world, tell its members here, and post ``WorldChanged``.

    Without anybody ``lost`` (by name) or ``joined`` they hear that there is nobody to wait for, or that those who made
    their last steps in world number ``over`` have begun to end, or that all had come to the end ``parted``. ``of``:
    only if that is the number of the newest world, and all connect anew. ``lost_in``: the number of the world in which
    those who are ``lost`` trained, if they may have had something left to do.
    """

    lost: tuple[str, ...] = ()
    joined: tuple[Member, ...] = ()
    restarts_used: int = 0
    of: int | None = None
    over: int = 0
    parted: EndOfSteps = NO_END
    lost_in: int = 0
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TellWorld:
    """Tell this worker the present world."""

    local_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetNodes:
    """Meet the other nodes, and those that wait to join, while the workers go on."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldJoins:
    """Let people here, and nodes that wait to join, know why these are not let in now; "": they are."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InviteMember:
    """Have one of ``sources`` serve the training state to this newcomer."""

    local_rank: int
    sources: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceWorker:
    """Start a process in the place of one that has ended, and post ``WorkerReplaced``."""

    local_rank: int
    restarts_used: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeAt:
    """Post ``TimePassed`` at this monotonic time."""

    at: float


Command: TypeAlias = (
    StopWorkers
    | KillWorkers
    | GatherEvidence
    | StartWorkers
    | Tell
    | TellPeers
    | FinishJob
    | FailJob
    | AskToLeave
    | AwaitStep
    | DepartWell
    | LeaveJob
    | RecordIncident
    | ChangeWorld
    | TellWorld
    | InviteMember
    | HoldJoins
    | MeetNodes
    | ReplaceWorker
    | WakeAt
)
