"""The ranks that train with Megatron-Core, in each world anew: they meet, agree, and make their process groups."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from unicron_elastic.base.world import World
from unicron_elastic.engine.protocol.agreement import NoStateLeft
from unicron_elastic.engine.protocol.said import MismatchError
from unicron_elastic.engine.protocol.shares import from_ranges, to_ranges
from unicron_elastic.engine.transport.references import count_references, wait_let_go
from unicron_elastic.engine.transport.superseded import Superseded
from unicron_elastic.engine.transport.waiter import AbandonedError, Waiter
from unicron_elastic.megatron.agreement import MemberSaid, ReplicaAgreement, agree
from unicron_elastic.megatron.groups import Groups
from unicron_elastic.megatron.layout import ReplicaLayout
from unicron_elastic.training.group.assembly import BROKEN
from unicron_elastic.training.group.meeting import Meeting
from unicron_elastic.training.group.membership import Membership
from unicron_elastic.worker.collectives.broken import break_collectives
from unicron_elastic.worker.notices import Notice
from unicron_elastic.worker.phases import phase
from unicron_elastic.worker.pulse import MEET, SPARE

SPARE_LOOK_S = 0.2
_OVER = "over"


class Members:
    """Of one process, which has the same ``seat`` for life. ``replica`` is the name of the one that it trains in."""

    def __init__(self, membership: Membership, groups: Groups, micro_batches: int) -> None:
        self._membership = membership
        self._groups = groups
        self._micro_batches = micro_batches
        self.unit = groups.unit
        self._is_broken = False  # the connections of this world
        self.waiter = Waiter(lambda: self._is_broken or membership.is_newer(), looks_up="gloo" in groups.backend)
        rank, size = dist.get_rank(), dist.get_world_size()
        self.seat, number = groups.shape.seat_of(rank, size)
        self.replica: str | None = f"0/{number}"
        self.replicas = size // groups.shape.seats
        self.number = number  # of its replica among them
        self.world: World | None = None
        self.index = rank
        self._meeting: Meeting | None = None
        self._is_connected = True
        self._layout: ReplicaLayout | None = None
        self._lock = threading.Lock()
        self._is_computing = False
        self._owes_a_break = False
        self.is_alone = False  # it has process groups without peers
        self._was_broken = False  # collectives that end may have ended without their result, on NCCL

    def begin(self) -> bool:
        """Becomes a member of the job; false for a newcomer, which has no state yet."""
        if self._membership.enter() is None:
            if self._membership.is_fixed:
                return True
            self._adopt()
            assert self.world is not None
            self._is_connected = self.world.number == 1
            return True
        self.replica, self._is_connected = None, False
        self._membership.is_ready(0)
        return False

    @property
    def is_spare(self) -> bool:
        """Whether it waits for others of whom a replica could be made."""
        return self._layout is not None and self._layout.replica_of(self.index) is None

    def needs_meeting(self) -> bool:
        """Whether there is a world that has not met, or has not connected."""
        return not self._is_connected or self._membership.is_newer()

    def wait_as_spare(self) -> bool:
        """Until the next world; false if the others have made the last step."""
        with phase(SPARE):
            while not self._membership.wait_for_newer(SPARE_LOOK_S):
                if self.is_over():
                    self.be_alone()
                    return False
        return True

    def is_over(self) -> bool:
        """Whether somebody has made the last step and knows that all have who trained with it."""
        return self._meeting is not None and self._meeting.is_announced(_OVER)

    def be_alone(self) -> None:
        """Use process groups without peers: the script may go on."""
        self.is_alone = True
        self._groups.leave()
        self._groups.be_alone()

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

    def meet(self, say: Callable[[], MemberSaid]) -> ReplicaAgreement:
        """Meets the members of the newest world; ``say`` tells where this one is. Afterwards the groups are made.

        Raises NoStateLeft, MismatchError, or what broke a world after which none came.
        """
        while True:
            try:
                return self._meet(say())
            except Superseded:
                continue
            except (NoStateLeft, MismatchError):
                raise
            except BROKEN as error:
                self.broke(error)

    def _meet(self, said: MemberSaid) -> ReplicaAgreement:
        if self._meeting is None or self._membership.is_newer():
            self._adopt()
            self._is_connected = False
        assert self._meeting is not None
        with phase(MEET):
            heard = self._meeting.exchange(_written(said, self._terms), self._groups.timeout_s)
        everybody = [_read(text, self._terms, self._micro_batches, index) for index, text in enumerate(heard)]
        agreement = agree(
            everybody,
            shape=self._groups.shape,
            micro_batches=self._micro_batches,
            unit=self.unit,
            layout=self._layout if self._is_connected else None,
            nodes=[] if self.world is None else [member.node for member in self.world.members],
        )
        if not self._is_connected:
            self._connect(agreement.layout, self._meeting)
        return agreement

    def _adopt(self) -> None:
        self.world, self.index, store = self._membership.adopt()
        self._meeting = Meeting(store, self.world, self.index, self._membership.is_newer)

    def _connect(self, layout: ReplicaLayout, meeting: Meeting) -> None:
        assert self.world is not None
        self._was_broken = False
        self._groups.leave()  # not before all have met: until then a pipeline of theirs may need this member
        self._is_broken = False
        self.waiter.begin()
        self._layout, self.replicas = layout, len(layout.replicas)
        number = layout.replica_of(self.index)
        if number is None:
            self.replica = None
        else:
            self.number = number
            self.replica = layout.names[number] or f"{self.world.number}/{number}"
            rank = layout.rank_of(self.index)
            assert rank is not None
            try:
                with phase(MEET):
                    self._groups.enter(meeting, rank, layout.size)
            except BaseException:  # others may have made groups with this one, and would wait in them
                break_collectives("the groups of a world were not made", is_quiet=True)
                raise
        self._is_connected = True

    @property
    def _terms(self) -> str:
        shape = self._groups.shape
        return f"{self._micro_batches} micro-batches, tensor {shape.tensor}, pipeline {shape.pipeline}"

    # -- connections that break ---------------------------------------------------------------------------------------

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Forward and backward passes: the loss of another replica breaks nothing that they need."""
        with self._lock:
            self._is_computing = True
        try:
            yield
        finally:
            with self._lock:
                self._is_computing = False
                owes, self._owes_a_break = self._owes_a_break, False
            if owes:
                break_collectives("a newer world has come", is_quiet=True)
        if self._was_broken and self._groups.shape.seats > 1:
            raise _broken_off()

    def must_break(self, world: World) -> bool:
        """Whether a newer world ends what goes on now. Called from the thread that hears the agent."""
        with self._lock:
            self._owes_a_break = self._may_wait(world)
            self._was_broken = self._was_broken or not self._owes_a_break
            return not self._owes_a_break

    def _may_wait(self, world: World) -> bool:
        if not self._is_computing or self.world is None or self._groups.shape.seats == 1:
            return False
        names = {member.name for member in world.members}
        if names == {member.name for member in self.world.members}:
            return False  # somebody's connections broke, and whose is not said
        return self._peers() <= names

    def _peers(self) -> set[str]:
        """The members of this one's replica."""
        assert self.world is not None
        if self._layout is None:
            shape, size = self._groups.shape, self.world.size
            indices = tuple(i for i in range(size) if shape.seat_of(i, size)[1] == self.number)
        else:
            indices = self._layout.replicas[self.number]
        return {self.world.members[index].name for index in indices}

    def broke(self, error: Exception) -> None:
        """Breaks with this world; returns when a newer one has come, else raises ``error``."""
        self._membership.broke(error)
        self._is_broken = True
        if isinstance(error, AbandonedError):
            self._groups.keep()

    # -- what they do together ----------------------------------------------------------------------------------------

    def sum(self, tensor: Tensor) -> Tensor:
        """Sums it over all ranks that train, in place. Raises what a collective raises."""
        self.waiter.wait(dist.all_reduce(tensor, async_op=True))
        if self._groups.backend == "nccl":
            torch.cuda.synchronize(tensor.device)
            if self._was_broken:
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
        if self._layout is not None:
            return self._layout.in_seat(self.seat)
        shape, size = self._groups.shape, self.replicas * self._groups.shape.seats
        return tuple(shape.rank_of(self.seat, number, self.replicas) for number in range(size // shape.seats))

    def spread(self, tensor: Tensor, *, source: int, takes: bool) -> None:
        """Gives all who have this seat what ``source`` has, in place if this one ``takes`` it."""
        target = tensor if takes or source == self.index else torch.empty_like(tensor)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.waiter.wait(dist.broadcast(target, self._rank(source), group=group, async_op=True))

    def _rank(self, member: int) -> int:
        if self._layout is None:  # the script's own groups
            return member
        rank = self._layout.rank_of(member)
        assert rank is not None
        return rank

    def drop_former(self) -> None:
        """Lets go of the groups of earlier worlds."""
        self._groups.drop_former()


def _broken_off() -> Exception:
    error: Exception = dist.DistNetworkError("Connection closed by peer: a newer world has come")
    return error


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
    )


def device_of(chunks: list[Any]) -> torch.device:
    """Where the model is."""
    return next((parameter.device for chunk in chunks for parameter in chunk.parameters()), torch.device("cpu"))
