"""The ranks that train with Megatron-Core, in each world anew: they meet, and make their process groups.

Each method does one thing that the protocol has decided, and returns the event that it ended with; if it broke, that.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from unicron_elastic.base.fault import Failure, Severity
from unicron_elastic.base.world import World
from unicron_elastic.engine.protocol.handle_member import handle_member
from unicron_elastic.engine.protocol.member_event import OthersEnded, OthersTrain
from unicron_elastic.engine.protocol.replica_agreement import MemberSaid
from unicron_elastic.engine.protocol.replica_event import (
    AllSaid,
    Answered,
    Connected,
    GroupBroke,
    ReplicaEvent,
    RoundLeft,
    WorldHeard,
)
from unicron_elastic.engine.protocol.replica_layout import ReplicaLayout, first_layout, name_of
from unicron_elastic.engine.protocol.replica_member import ReplicaMember
from unicron_elastic.engine.protocol.said import MismatchError
from unicron_elastic.engine.protocol.shares import from_ranges, to_ranges
from unicron_elastic.engine.transport.of_script import is_of_script
from unicron_elastic.engine.transport.references import count_references, wait_let_go
from unicron_elastic.engine.transport.superseded import Superseded
from unicron_elastic.engine.transport.waiter import AbandonedError, Waiter
from unicron_elastic.faults.classify import classify
from unicron_elastic.megatron.groups import Groups
from unicron_elastic.training.group.assembly import BROKEN
from unicron_elastic.training.group.meeting import Meeting
from unicron_elastic.training.group.membership import Membership
from unicron_elastic.training.replica_driver import Driver
from unicron_elastic.worker.collectives.broken import break_collectives
from unicron_elastic.worker.notices import Notice
from unicron_elastic.worker.phases import phase
from unicron_elastic.worker.pulse import MEET, SPARE

SPARE_LOOK_S = 0.2
_OVER = "over"


class Members:
    """`Members` is the world as one process sees it. ``driver`` knows where the process is in it."""

    def __init__(self, membership: Membership, groups: Groups, micro_batches: int) -> None:
        self._membership = membership
        self._groups = groups
        rank, size = dist.get_rank(), dist.get_world_size()
        seat, number = groups.shape.seat_of(rank, size)
        member = ReplicaMember(
            shape=groups.shape,
            seat=seat,
            micro_batches=micro_batches,
            layout=first_layout(groups.shape, size),
            rank=rank,
            replica=name_of(0, number),
            unit=groups.unit,
        )
        self.driver = Driver(membership, member, handle_member)
        self.waiter = Waiter(
            lambda: not self._member.is_connected or membership.is_newer(), looks_up="gloo" in groups.backend
        )
        self.world: World | None = None
        self._meeting: Meeting | None = None
        self._error: Exception | None = None  # which broke the latest world

    @property
    def _member(self) -> ReplicaMember:
        return self.driver.replica

    @property
    def index(self) -> int:
        """Return the place of this one among the members of its world."""
        return self._member.rank

    @property
    def replicas(self) -> int:
        """Return how many replicas train."""
        return len(self._member.layout.replicas)

    @property
    def number(self) -> int:
        """Return that of this one's replica among them."""
        number = self._member.number
        assert number is not None
        return number

    # -- how it comes in, and goes ------------------------------------------------------------------------------------

    def enter(self) -> Answered:
        """Become a member of the job; a newcomer has no state yet."""
        if self._membership.enter() is not None:
            return Answered()
        if not self._membership.is_fixed:
            self._adopt()
        return Answered(is_member=True)

    def get_ready(self) -> WorldHeard:
        """Tell the agent that this newcomer waits for a world with it; return that. Raises TimeoutError."""
        self._membership.is_ready(0)
        newest = self._membership.newer_than(0)
        assert newest is not None
        return WorldHeard(*newest)

    def sit_out(self) -> OthersEnded | None:
        """Wait for the next world, or until the others have made the last step."""
        with phase(SPARE):
            while not self._membership.wait_for_newer(SPARE_LOOK_S):
                if self._is_over():
                    return OthersEnded()
        return None

    def ask_end(self) -> ReplicaEvent:
        """Find out whether somebody has made the last step and knows that all have who trained with it."""
        return OthersEnded() if self._is_over() else OthersTrain()

    def _is_over(self) -> bool:
        return self._meeting is not None and self._meeting.is_announced(_OVER)

    def part(self, nothing: Tensor) -> None:
        """End with all others who train, after the last step. Raises what a collective raises."""
        held = [nothing]
        references = count_references(held)
        self.sum(nothing)
        wait_let_go(held, references)
        if self._meeting is not None:
            self._meeting.announce(_OVER)

    def tell(self, said: Notice) -> None:
        """Says something to the agent."""
        self._membership.tell(said)

    # -- meetings -----------------------------------------------------------------------------------------------------

    def say(self, number: int, said: MemberSaid) -> ReplicaEvent:
        """Speak in the next round of the meeting of the world ``number``, and hear all.

        Raises MismatchError, MissingError, and what broke a world without another one.
        """
        try:
            if self.world is None or self.world.number < number:
                self._adopt(number)
            assert self._meeting is not None
            with phase(MEET):
                heard = self._meeting.exchange(_written(said, self._terms), self._groups.timeout_s)
        except Superseded:
            return RoundLeft()
        except BROKEN as error:
            return self._broke(error)
        micro_batches = self._member.micro_batches
        return AllSaid(tuple(_read(text, self._terms, micro_batches, index) for index, text in enumerate(heard)))

    def _adopt(self, number: int | None = None) -> None:
        self.world, index, store = self._membership.adopt(number)
        self._meeting = Meeting(store, self.world, index, self._membership.is_newer)

    def connect(self, layout: ReplicaLayout) -> ReplicaEvent:
        """Make the process groups of this world, if this one trains in it."""
        assert self._meeting is not None
        self._groups.leave()  # not before all have met: until then a pipeline of theirs may need this member
        self.waiter.begin()
        rank = layout.rank_of(self.index)
        if rank is None:
            return Connected()
        try:
            with phase(MEET):
                self._groups.enter(self._meeting, rank, layout.size)
        except BaseException as error:  # others may have made groups with this one, and would wait in them
            break_collectives("the groups of a world were not made", is_quiet=True)
            if isinstance(error, Superseded):
                return RoundLeft()
            if isinstance(error, BROKEN):
                return self._broke(error)
            raise
        return Connected()

    @property
    def _terms(self) -> str:
        shape = self._groups.shape
        micro_batches = self._member.micro_batches
        return f"{micro_batches} micro-batches, tensor {shape.tensor}, pipeline {shape.pipeline}"

    # -- connections that break ---------------------------------------------------------------------------------------

    def must_break(self, world: World) -> bool:
        """Whether a newer world ends what goes on now. Called from the thread that hears the agent.

        Where it does not, the protocol hears of the world when that has ended, or ``together`` before it begins more.
        """
        return not self._member.may_go_on(world)

    def disconnect(self) -> None:
        """Break the connections of this world, which a newer one has left for a while."""
        break_collectives("a newer world has come", is_quiet=True)

    def tell_broken(self) -> None:
        """Break the connections of this world, and tell the agent why."""
        assert self._error is not None
        self._membership.tell_broken(self._error, outlives_joins=False)

    def await_next(self) -> None:
        """Wait for the world after one that broke. Raises what broke it if none comes."""
        if not self._membership.wait_for_agreed(self._membership.next_world_timeout_s):
            assert self._error is not None
            raise self._error

    def together(self, part: Callable[[], object]) -> GroupBroke | None:
        """Do a part of what all who train do; return how it broke, or None. Raises the script's own errors."""
        if self._membership.is_newer():
            return GroupBroke("a newer world has come")
        return self.attempt(part)

    def attempt(self, part: Callable[[], object]) -> GroupBroke | None:
        """Do what the members of a replica do; return how it broke, or None. Raises the script's own errors."""
        try:
            part()
        except BROKEN as error:
            if not _is_of_connections(error):
                raise
            return self._broke(error)
        return None

    def _broke(self, error: Exception) -> GroupBroke:
        """Return that it broke. Raises the error if no other world ever comes after this one."""
        if self._membership.is_fixed or is_of_script(error):
            raise error
        self._error = error
        _end_calls(error)
        if isinstance(error, AbandonedError):
            self._groups.keep()
        return GroupBroke(f"{type(error).__name__}: {error}")

    # -- what they do together ----------------------------------------------------------------------------------------

    def sum(self, tensor: Tensor) -> Tensor:
        """Sums it over all ranks that train, in place. Raises what a collective raises."""
        self.waiter.wait(dist.all_reduce(tensor, async_op=True))
        if self._groups.backend == "nccl":
            torch.cuda.synchronize(tensor.device)
            if self._membership.is_newer():  # then it may have ended without its result
                raise _broken_off()
        return tensor

    def send(self, tensor: Tensor, destination: int) -> None:
        """Send to one member, by index. Raises what a collective raises."""
        self.waiter.wait_one_to_one(dist.isend(tensor, self._rank(destination)))

    def receive(self, tensor: Tensor, source: int) -> None:
        """Receive from one member, by index. Raises what a collective raises."""
        self.waiter.wait_one_to_one(dist.irecv(tensor, self._rank(source)))

    def swap(self, tensor: Tensor, destination: int, into: Tensor, source: int) -> None:
        """Sends to one member while it receives from another. Raises what a collective raises."""
        sent = dist.isend(tensor, self._rank(destination))
        self.receive(into, source)
        self.waiter.wait_one_to_one(sent)

    def in_seat(self) -> tuple[int, ...]:
        """Return who has this one's seat, by replica."""
        return self._member.layout.in_seat(self._member.seat)

    def spread(self, tensor: Tensor, *, source: int, takes: bool) -> None:
        """Gives all who have this seat what ``source`` has, in place if this one ``takes`` it."""
        target = tensor if takes or source == self.index else torch.empty_like(tensor)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.waiter.wait(dist.broadcast(target, self._rank(source), group=group, async_op=True))

    def _rank(self, member: int) -> int:
        rank = self._member.layout.rank_of(member)
        assert rank is not None
        return rank

    def drop_former(self) -> None:
        """Lets go of the groups of earlier worlds."""
        self._groups.drop_former()


def _broken_off() -> Exception:
    error: Exception = dist.DistNetworkError("Connection closed by peer: a newer world has come")
    return error


def _is_of_connections(error: BaseException) -> bool:
    """Whether it is about the connections between ranks, and not the script's own."""
    if isinstance(error, AbandonedError):
        return True
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    failure = Failure(at=0.0, rank=0, local_rank=0, pid=0, exception_type=name, message=str(error))
    return classify(failure).severity is Severity.SEV3


def _end_calls(error: BaseException) -> None:
    """Have what broken passes have left to end with their functions end now, and not when somebody finds it as garbage.

    Schedules of pipelines enter ``no_sync()`` by hand (megatron-core 0.16.1), and later passes may be under way then.
    """
    broke: BaseException | None = error
    while broke is not None:
        traceback.clear_frames(broke.__traceback__)
        for frame, _line in traceback.walk_tb(broke.__traceback__):
            _ = frame.f_locals  # before Python 3.13 a copy that somebody has read before is brought up to date so
        broke = broke.__context__


def _written(said: MemberSaid, terms: str) -> str:
    message = {
        "terms": terms,
        "seat": said.seat,
        "replica": said.replica,
        "state": said.state,
        "buckets": said.buckets,
        "held": to_ranges(said.held),
        "done": to_ranges(said.done),
        "is_finished": said.is_finished,
        "is_committed": said.is_committed,
        "tokens": said.tokens,
        "norm": said.norm,
        "cuts": said.cuts,
        "is_between": said.is_between,
    }
    return json.dumps(message, separators=(",", ":"))


def _read(text: str, terms: str, micro_batches: int, index: int) -> MemberSaid:
    """Raises MismatchError if that member trains something else."""
    message = json.loads(text)
    if message["terms"] != terms:
        raise MismatchError(f"member {index} trains something else: {message['terms']}, and this one {terms}")
    return MemberSaid(
        seat=message["seat"],
        replica=message["replica"],
        state=message["state"],
        buckets=message["buckets"],
        held=from_ranges(message["held"], micro_batches),
        done=from_ranges(message["done"], message["buckets"]),
        is_finished=bool(message["is_finished"]),
        is_committed=bool(message["is_committed"]),
        tokens=message["tokens"],
        norm=message["norm"],
        cuts=tuple((parts, number) for parts, number in message["cuts"]),
        is_between=bool(message["is_between"]),
    )


def device_of(chunks: list[Any]) -> torch.device:
    """Where the model is."""
    return next((parameter.device for chunk in chunks for parameter in chunk.parameters()), torch.device("cpu"))
