"""Where one member of a replica of several processes is. It shares what phases it can with a replica of one.

What is done of a step is kept through meetings: so it stands beside the phase, as one of few states of the gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, NamedTuple, TypeAlias

from unicron_elastic.base.world import World
from unicron_elastic.engine.protocol.replica_layout import ReplicaLayout, ReplicaShape
from unicron_elastic.engine.protocol.replica_phase import (
    Arriving,
    Averaging,
    Computing,
    Ended,
    Finished,
    Handing,
    InMeeting,
    Moving,
    Outside,
    Parting,
    Reducing,
    ReplicaPhase,
    Standing,
    Stepping,
)


class Progress(Enum):
    """`Progress` says how far the gradients of the present step have come, on this member."""

    SPOILED = "spoiled"  # passes broke on the way: nobody knows what is in the sums
    OPEN = "open"  # what was computed is summed up, and buckets may be reduced
    WITHIN = "within"  # what is summed up within a replica is being added to the reduced ones
    WHOLE = "whole"  # all are here, also what is summed up within a replica
    COMMITTED = "committed"  # and all members have them


@dataclass(frozen=True, slots=True)
class CountingTokens:
    """`CountingTokens`: the tokens of all micro-batches are summed up, before any bucket is."""

    phase: ClassVar = ReplicaPhase.REDUCING


@dataclass(frozen=True, slots=True)
class SummingWithin:
    """`SummingWithin`: the members of a replica sum up what they share."""

    phase: ClassVar = ReplicaPhase.REDUCING


@dataclass(frozen=True, slots=True)
class Confirming:
    """`Confirming`: all who train tell each other that they have all gradients."""

    phase: ClassVar = ReplicaPhase.REDUCING


@dataclass(frozen=True, slots=True)
class Making:
    """`Making`: the optimizer's step is made, with others who may be lost. The ``standing`` is that before."""

    standing: Standing

    phase: ClassVar = ReplicaPhase.MAKING


@dataclass(frozen=True, slots=True)
class FindingNorm:
    """`FindingNorm`: in a meeting, all who train find the norm with which some of them make the step before."""

    meeting: InMeeting

    phase: ClassVar = ReplicaPhase.MEETING


@dataclass(frozen=True, slots=True)
class Settling:
    """`Settling`: in a meeting, each takes the part of the optimizer's state that is its own in this world."""

    meeting: InMeeting

    phase: ClassVar = ReplicaPhase.MEETING


@dataclass(frozen=True, slots=True)
class SittingOut:
    """`SittingOut`: a spare, until a newer world comes, or the others have made the last step."""

    meeting: InMeeting

    phase: ClassVar = ReplicaPhase.SPARE


@dataclass(frozen=True, slots=True)
class Stranded:
    """`Stranded`: the state is not to be had any more, ``why``; unless the others have ended."""

    why: str

    phase: ClassVar = ReplicaPhase.MEETING


@dataclass(frozen=True, slots=True)
class Evaluating:
    """`Evaluating`: the script makes passes that change nothing; then it goes ``back``."""

    back: Stepping | Finished

    phase: ClassVar = ReplicaPhase.EVALUATING


MemberRecord: TypeAlias = (
    Outside
    | Arriving
    | InMeeting
    | Handing
    | Moving
    | FindingNorm
    | Settling
    | SittingOut
    | Stranded
    | Computing
    | CountingTokens
    | Reducing
    | SummingWithin
    | Confirming
    | Stepping
    | Making
    | Averaging
    | Evaluating
    | Parting
    | Finished
    | Ended
)


class StepWork(NamedTuple):
    """`StepWork` is what is done of the present step by one member.

    ``assigned`` are the micro-batches of its replica, ``held`` those whose gradients it has summed up. ``done`` are the
    buckets that it has, reduced over all replicas. ``tokens`` are those of all micro-batches, once they are counted.
    ``norm`` is that of the gradients of the step that was committed last, once it is known, and ``confirmed_in`` the
    world in which all told each other last that they have all gradients of a step.
    """

    assigned: frozenset[int] = frozenset()
    held: frozenset[int] = frozenset()
    done: frozenset[int] = frozenset()
    progress: Progress = Progress.OPEN
    tokens: int | None = None
    norm: float | None = None
    confirmed_in: int = 0


class ReplicaMember(NamedTuple):
    """`ReplicaMember` is what one process knows that has a ``seat`` in a replica of this ``shape``, for life.

    Steps have so many ``micro_batches``, dealt in units of ``unit``, and their gradients are in so many ``buckets``.
    ``is_sharded``: a replica has one part of the optimizer's state, and of what is reduced. ``step`` counts the
    optimizer steps behind its parameters, and the run ends with step ``until``. ``replica`` is the name of the one in
    which it trains, None: it waits, or is new. Of worlds it knows what a `Replica` does, with ``rank`` as its place
    among the members; the ``layout`` is that of the world to which it is connected, or was last.
    """

    shape: ReplicaShape
    seat: int
    micro_batches: int
    layout: ReplicaLayout
    rank: int
    replica: str | None
    buckets: int = 1
    unit: int = 1
    is_sharded: bool = False
    record: MemberRecord = Outside()
    until: int = 0
    step: int = 0
    work: StepWork = StepWork()
    heard: World | None = None
    heard_rank: int | None = None
    met: World | None = None
    is_connected: bool = False

    @property
    def phase(self) -> ReplicaPhase:
        """Return where it is."""
        return self.record.phase

    @property
    def number(self) -> int | None:
        """Return that of its replica among those who train; None: it waits."""
        return self.layout.replica_of(self.rank)

    @property
    def met_number(self) -> int:
        """Return that of the world in which it met last; 0 for none."""
        return 0 if self.met is None else self.met.number

    @property
    def has_state(self) -> bool:
        """Tell whether others may rely on its parameters."""
        match self.record:
            case Stepping(standing=standing) | Making(standing=standing) | Finished(standing=standing):
                return standing is not Standing.NEW
            case InMeeting(has_state=has_state):
                return has_state
            case Handing() | Moving() | FindingNorm() | Settling() | SittingOut():
                return self.record.meeting.has_state
        return not isinstance(self.record, Outside | Arriving | Stranded | Ended)

    @property
    def knows_newer(self) -> bool:
        """Tell whether it has heard of a newer world than that in which it met last: what goes on there ends."""
        return self.heard is not None and (self.met is None or self.heard.number > self.met.number)

    @property
    def needs_meeting(self) -> bool:
        """Tell whether it has to meet the others before it does anything with them."""
        return not self.is_connected or self.knows_newer

    @property
    def adds_within(self) -> bool:
        """Tell whether reduced gradients change when the members of a replica sum up what they share."""
        return self.shape.seats > 1 and not self.is_sharded

    def may_go_on(self, world: World) -> bool:
        """Tell whether what it does now may end before it goes on to the newer ``world``.

        So it is with passes, as long as all of its replica are there and nobody's connections broke: they need nobody
        else. What is true of a world is true of all later ones if it is false.
        """
        if not isinstance(self.record, Computing | Evaluating) or self.met is None or self.shape.seats == 1:
            return False
        number = self.number
        if number is None or world.anew > self.met.number:
            return False
        names = {member.name for member in world.members}
        return all(self.met.members[index].name in names for index in self.layout.replicas[number])
