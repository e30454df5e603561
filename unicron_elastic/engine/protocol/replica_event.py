"""What happens to a replica: its script's calls, the agent's words, and how what it does with others ends."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from unicron_elastic.base.world import World


@dataclass(frozen=True, slots=True)
class ReplicaEvent:
    """`ReplicaEvent` is the base of all that happens to a replica."""


@dataclass(frozen=True, slots=True)
class CallBegun(ReplicaEvent):
    """`CallBegun`: the script calls ``run.steps()`` with the total ``until``."""

    until: int


@dataclass(frozen=True, slots=True)
class CallEnded(ReplicaEvent):
    """`CallEnded`: the script has made all steps of its call."""


@dataclass(frozen=True, slots=True)
class StepBegun(ReplicaEvent):
    """`StepBegun`: the script asks for the first micro-batch of a step."""


@dataclass(frozen=True, slots=True)
class Computed(ReplicaEvent):
    """`Computed`: the script has added the gradients of a micro-batch."""

    index: int


@dataclass(frozen=True, slots=True)
class BucketReady(ReplicaEvent):
    """`BucketReady`: in the backward pass of the present micro-batch all gradients of a bucket have come.

    Those of the buckets before it have, too.
    """

    bucket: int


@dataclass(frozen=True, slots=True)
class MoreAsked(ReplicaEvent):
    """`MoreAsked`: the script asks for the next micro-batch, and has computed all that it was dealt."""


@dataclass(frozen=True, slots=True)
class StepMade(ReplicaEvent):
    """`StepMade`: the script has made the optimizer's step, and its loop has come round."""


@dataclass(frozen=True, slots=True)
class MeanAsked(ReplicaEvent):
    """`MeanAsked`: the script asks for a mean over all ranks, between two steps or behind a call.

    Or for something else that all ranks do there together.
    """


@dataclass(frozen=True, slots=True)
class Answered(ReplicaEvent):
    """`Answered`: the agent says what this process is in the job.

    ``is_member``: the first world is there, with this process. Else others train already, and it is invited to copy
    their state, if ``has_source``. ``where`` are the total and the step that a source is in, if that is known.
    """

    is_member: bool = False
    has_source: bool = False
    where: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Copied(ReplicaEvent):
    """`Copied`: this newcomer has a copy of the state that a source had in step ``step`` of its call ``until``."""

    until: int
    step: int


@dataclass(frozen=True, slots=True)
class NotCopied(ReplicaEvent):
    """`NotCopied`: no source held its state until this newcomer had all of it; ``is_refused``: it cannot be sent."""

    is_refused: bool = False


@dataclass(frozen=True, slots=True)
class LaidOut(ReplicaEvent):
    """`LaidOut`: the script trains other parameters, in so many ``buckets``; what was reduced in others is gone."""

    buckets: int


@dataclass(frozen=True, slots=True)
class WorldHeard(ReplicaEvent):
    """`WorldHeard`: the agent tells of a newer world, in which this process has this ``rank``, or none."""

    world: World
    rank: int | None


@dataclass(frozen=True, slots=True)
class AllSaid(ReplicaEvent):
    """`AllSaid`: all members have spoken in this round of the meeting; what they ``said``, by rank."""

    said: tuple[Any, ...]  # of `Said`, or of `MemberSaid` where a replica has several members


@dataclass(frozen=True, slots=True)
class RoundLeft(ReplicaEvent):
    """`RoundLeft`: a member has left this round of the meeting for a newer world, and so all do."""


@dataclass(frozen=True, slots=True)
class Connected(ReplicaEvent):
    """`Connected`: the process group of this ``seat`` stands."""

    seat: int = 0


@dataclass(frozen=True, slots=True)
class Handed(ReplicaEvent):
    """`Handed`: the reduced bucket, or mean, that was handed over is here, or there, for this ``seat``."""

    seat: int = 0


@dataclass(frozen=True, slots=True)
class Moved(ReplicaEvent):
    """`Moved`: the state was given or taken by this ``seat``."""

    seat: int = 0


@dataclass(frozen=True, slots=True)
class StateRefused(ReplicaEvent):
    """`StateRefused`: this newcomer is not given the state, which cannot be sent."""


@dataclass(frozen=True, slots=True)
class Reduced(ReplicaEvent):
    """`Reduced`: the sum of a bucket is whole for this ``seat``.

    ``is_awaited``: some rank has said, in the notes behind the gradients, that a newcomer is on its way.
    ``differs``: the notes say that the states of the ranks differ. ``must_repeat``: they say that some rank has begun a
    bucket before all of it was there.
    """

    bucket: int
    seat: int = 0
    is_awaited: bool = False
    differs: bool = False
    must_repeat: bool = False


class WhoIsWrong(Enum):
    """`WhoIsWrong` is what a comparison of all states has found."""

    NOBODY = "nobody"  # they may differ
    THIS = "this"
    OTHERS = "others"


@dataclass(frozen=True, slots=True)
class Judged(ReplicaEvent):
    """`Judged`: all states are compared, and each rank knows ``who`` is wrong."""

    who: WhoIsWrong


@dataclass(frozen=True, slots=True)
class Averaged(ReplicaEvent):
    """`Averaged`: this ``seat`` has the mean for which the script asked."""

    seat: int = 0


@dataclass(frozen=True, slots=True)
class Gathered(ReplicaEvent):
    """`Gathered`: all members have come to the end of the call, as this ``seat`` hears.

    ``is_awaited`` as in `Reduced`.
    """

    seat: int = 0
    is_awaited: bool = False


@dataclass(frozen=True, slots=True)
class GroupBroke(ReplicaEvent):
    """`GroupBroke`: what this replica does with others has broken, and none of it writes to memory any more."""

    why: str


@dataclass(frozen=True, slots=True)
class Outgrown(ReplicaEvent):
    """`Outgrown`: a member has gone on to a larger world, of which this one has not heard."""


@dataclass(frozen=True, slots=True)
class HoldBegan(ReplicaEvent):
    """`HoldBegan`: somebody copies this replica's state."""


@dataclass(frozen=True, slots=True)
class HoldEnded(ReplicaEvent):
    """`HoldEnded`: somebody copies it no more."""


@dataclass(frozen=True, slots=True)
class PatienceOver(ReplicaEvent):
    """`PatienceOver`: what a command waits for at most so long has not come."""
