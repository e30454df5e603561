"""What happens to a member of a replica of several processes, besides what happens to any replica."""

from __future__ import annotations

from dataclasses import dataclass

from unicron_elastic.engine.protocol.replica_event import ReplicaEvent


@dataclass(frozen=True, slots=True)
class MemberEvent(ReplicaEvent):
    """`MemberEvent` is the base of all that happens to a member, and to no other replica."""


@dataclass(frozen=True, slots=True)
class TokensCounted(MemberEvent):
    """`TokensCounted`: the ``tokens`` of all micro-batches of the step are summed up."""

    tokens: int


@dataclass(frozen=True, slots=True)
class SummedWithin(MemberEvent):
    """`SummedWithin`: what the members of a replica share is summed up, and this member has all gradients."""


@dataclass(frozen=True, slots=True)
class Confirmed(MemberEvent):
    """`Confirmed`: all who train have all gradients of the step."""


@dataclass(frozen=True, slots=True)
class StepAsked(MemberEvent):
    """`StepAsked`: the script calls the optimizer."""


@dataclass(frozen=True, slots=True)
class NormFound(MemberEvent):
    """`NormFound`: the ``norm`` of the gradients of the step that is committed, or is about to be made."""

    norm: float


@dataclass(frozen=True, slots=True)
class Settled(MemberEvent):
    """`Settled`: it has its part of the optimizer's state in this world, and gradients are in so many ``buckets``."""

    buckets: int


@dataclass(frozen=True, slots=True)
class OthersEnded(MemberEvent):
    """`OthersEnded`: the others have made the last step, and all of them know that all have."""


@dataclass(frozen=True, slots=True)
class OthersTrain(MemberEvent):
    """`OthersTrain`: nobody has said that the training is over."""


@dataclass(frozen=True, slots=True)
class EvaluationAsked(MemberEvent):
    """`EvaluationAsked`: the script makes passes that change nothing, between two steps or behind the last one."""


@dataclass(frozen=True, slots=True)
class Evaluated(MemberEvent):
    """`Evaluated`: these passes have ended."""
