"""What a member of a replica of several processes is to do, besides what any replica does."""

from __future__ import annotations

from dataclasses import dataclass

from unicron_elastic.engine.protocol.replica_command import ReplicaCommand
from unicron_elastic.engine.protocol.replica_layout import Cut


@dataclass(frozen=True, slots=True)
class MemberCommand(ReplicaCommand):
    """`MemberCommand` is the base of all that a member is told to do, and no other replica."""


@dataclass(frozen=True, slots=True)
class CountTokens(MemberCommand):
    """`CountTokens`: sum up the tokens of what each has computed, over all who train."""


@dataclass(frozen=True, slots=True)
class SumWithin(MemberCommand):
    """`SumWithin`: sum up what the members of a replica share; ``keeps``: the reduced gradients as they were, before.

    With the optimizer's state in parts, each also gives its guardian the gradients of its own.
    """

    keeps: bool


@dataclass(frozen=True, slots=True)
class Confirm(MemberCommand):
    """`Confirm`: tell all who train that this one has all gradients, and hear that all have."""


@dataclass(frozen=True, slots=True)
class MakeStep(MemberCommand):
    """`MakeStep`: let the optimizer make its step; ``is_apart``: others have made it, or make it by themselves."""

    is_apart: bool


@dataclass(frozen=True, slots=True)
class FindNorm(MemberCommand):
    """`FindNorm`: find, with all who train, the norm of gradients of which some have made no step yet.

    ``cuts`` are the parts of the optimizer's state that each member has. ``is_scaled``: they are divided already.
    """

    cuts: tuple[tuple[Cut, ...], ...]
    is_scaled: bool


@dataclass(frozen=True, slots=True)
class Settle(MemberCommand):
    """`Settle`: take, with all who train, the part of the optimizer's state that belongs to this replica now."""

    cuts: tuple[tuple[Cut, ...], ...]


@dataclass(frozen=True, slots=True)
class Restore(MemberCommand):
    """`Restore`: take back the sums of what broke; ``is_within``: also those that were summed up within the replica."""

    is_within: bool


@dataclass(frozen=True, slots=True)
class Drop(MemberCommand):
    """`Drop`: forget what was summed up, but not what is reduced."""


@dataclass(frozen=True, slots=True)
class Evaluate(MemberCommand):
    """`Evaluate`: let the script make its passes."""


@dataclass(frozen=True, slots=True)
class Disconnect(MemberCommand):
    """`Disconnect`: break the connections of the world ``number``, which a newer one has ended."""

    number: int


@dataclass(frozen=True, slots=True)
class SitOut(MemberCommand):
    """`SitOut`: wait as a spare, without any part of the state, for a newer world or the end of the training."""


@dataclass(frozen=True, slots=True)
class AskEnd(MemberCommand):
    """`AskEnd`: find out whether the others have made the last step."""


@dataclass(frozen=True, slots=True)
class EndProcess(MemberCommand):
    """`EndProcess`: end this process, whose script must not go on with what it has."""
