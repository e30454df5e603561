"""What a replica is to do, each with the reason as one sentence. All seats do it, and say so each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from unicron_elastic.engine.protocol.replica_layout import ReplicaLayout


@dataclass(frozen=True, slots=True)
class ReplicaCommand:
    """`ReplicaCommand` is the base of all that a replica is told to do."""

    reason: str = field(default="", kw_only=True, compare=False)


@dataclass(frozen=True, slots=True)
class AskAgent(ReplicaCommand):
    """`AskAgent`: ask the agent to be a member, later if ``is_again``; it will answer."""

    is_again: bool = False


@dataclass(frozen=True, slots=True)
class CopyState(ReplicaCommand):
    """`CopyState`: copy the state from a source that the agent named, while the source computes."""


@dataclass(frozen=True, slots=True)
class ReleaseSource(ReplicaCommand):
    """`ReleaseSource`: let the source of the copied state go on."""


@dataclass(frozen=True, slots=True)
class TellReady(ReplicaCommand):
    """`TellReady`: tell the agent that this newcomer waits for a world with it."""


@dataclass(frozen=True, slots=True)
class TellLeft(ReplicaCommand):
    """`TellLeft`: tell the agent that this newcomer is no member of its world any more."""


@dataclass(frozen=True, slots=True)
class TellBroke(ReplicaCommand):
    """`TellBroke`: break the connections of the world ``number``, and tell the agent."""

    number: int


@dataclass(frozen=True, slots=True)
class TellParted(ReplicaCommand):
    """`TellParted`: tell the agent that all had come to the end of the call up to ``total`` in the world ``number``."""

    number: int
    total: int


@dataclass(frozen=True, slots=True)
class TellEntered(ReplicaCommand):
    """`TellEntered`: tell the agent that the script makes one more call."""


@dataclass(frozen=True, slots=True)
class Say(ReplicaCommand):
    """`Say`: speak in the next round of the meeting of the world ``number``, and hear all.

    ``is_copy``: its state was copied while others trained, who are to compare it with what they have.
    """

    number: int
    said: Any  # `Said`, or `MemberSaid` where a replica has several members
    is_copy: bool = False


@dataclass(frozen=True, slots=True)
class AwaitWorld(ReplicaCommand):
    """`AwaitWorld`: wait for a newer world; ``is_patient``: for as long as agents may need, else for a newcomer."""

    is_patient: bool = True


@dataclass(frozen=True, slots=True)
class MakeGroup(ReplicaCommand):
    """`MakeGroup`: make the process groups of the world ``number``, in each seat that of this seat.

    ``layout``: who trains with whom, where members agree on that.
    """

    number: int
    layout: ReplicaLayout | None = None


@dataclass(frozen=True, slots=True)
class HandOver(ReplicaCommand):
    """`HandOver`: rank ``source`` gives a reduced ``bucket`` to rank ``to``, or to all if that is None.

    None as a bucket is the result of its latest mean.
    """

    bucket: int | None
    source: int
    to: int | None


@dataclass(frozen=True, slots=True)
class MoveState(ReplicaCommand):
    """`MoveState`: rank ``source`` gives its state to the ranks ``to``, all or nothing.

    ``begins``: only the model is given, which nobody has trained yet. ``behind``: so many steps less the script of this
    rank has made than are in the state, and goes on as behind the first of them; 0: it goes on where the state is.
    """

    source: int
    to: tuple[int, ...]
    begins: bool
    behind: int = 0


@dataclass(frozen=True, slots=True)
class Clear(ReplicaCommand):
    """`Clear`: forget what was summed up for the present step."""


@dataclass(frozen=True, slots=True)
class Compute(ReplicaCommand):
    """`Compute`: give the script these micro-batches.

    ``may_reduce``: what Megatron-Core begins to reduce in their passes is whole then.
    """

    indices: tuple[int, ...]
    may_reduce: bool = True


@dataclass(frozen=True, slots=True)
class BeginReduce(ReplicaCommand):
    """`BeginReduce`: begin to sum this bucket over all ranks, out of place, while the backward pass goes on."""

    bucket: int


@dataclass(frozen=True, slots=True)
class Reduce(ReplicaCommand):
    """`Reduce`: sum these buckets over all ranks, out of place, all but the last at once.

    The last one is not summed, but as ``source`` has it; the others tell how large it is. None: all are summed.
    ``is_awaited``: this rank knows of a newcomer, or somebody copies its state.
    """

    buckets: tuple[int, ...]
    source: int | None = None
    is_awaited: bool = False


@dataclass(frozen=True, slots=True)
class NoteMeeting(ReplicaCommand):
    """`NoteMeeting`: all members are in one step with one state; ``dealt`` is what each computes of what was lost."""

    dealt: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Compare(ReplicaCommand):
    """`Compare`: compare the states of all ranks, of which the notes say that they differ."""


@dataclass(frozen=True, slots=True)
class Average(ReplicaCommand):
    """`Average`: sum the shares of a mean over all ranks."""


@dataclass(frozen=True, slots=True)
class ReturnMean(ReplicaCommand):
    """`ReturnMean`: return the mean to the script, if it ``is_own`` that of what this rank has itself."""

    is_own: bool


@dataclass(frozen=True, slots=True)
class Gather(ReplicaCommand):
    """`Gather`: wait for all members at the end of the call."""

    is_awaited: bool


@dataclass(frozen=True, slots=True)
class AwaitHolders(ReplicaCommand):
    """`AwaitHolders`: wait until nobody copies the state, but not for ever."""


@dataclass(frozen=True, slots=True)
class BreakOff(ReplicaCommand):
    """`BreakOff`: end the copying of the state, which is about to change."""


@dataclass(frozen=True, slots=True)
class Commit(ReplicaCommand):
    """`Commit`: put the reduced gradients of step ``step`` in place, and let the script go on behind its inner loop."""

    step: int


@dataclass(frozen=True, slots=True)
class LetGo(ReplicaCommand):
    """`LetGo`: let the script go on with the next step of its call, or behind the call if that ``is_over``."""

    is_over: bool


@dataclass(frozen=True, slots=True)
class Raise(ReplicaCommand):
    """`Raise`: raise an error of this ``kind`` in the script, with the reason; the process ends."""

    kind: str
