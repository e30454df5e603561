"""What goes on in one process that trains with Megatron-Core: micro-batches, reductions, meetings in each new world.

A step is: forward and backward passes through this process's part of the model; the reduction of the gradients over all
replicas, and of the tokens; what Megatron sums up over the members of a replica (embeddings, layer norms); and one sum
over all ranks, with which every rank knows that all have all gradients: the step is committed. What breaks before that
is made again with the members of the next world. After it, each replica makes its optimizer step by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import Enum, IntEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unicron_elastic.base.fault import Failure, Severity
from unicron_elastic.engine.protocol.agreement import NoStateLeft
from unicron_elastic.engine.transport.of_script import is_of_script
from unicron_elastic.engine.transport.waiter import AbandonedError
from unicron_elastic.faults.classify import classify
from unicron_elastic.megatron.agreement import MemberSaid, ReplicaAgreement
from unicron_elastic.megatron.buckets import Buckets
from unicron_elastic.megatron.members import Members
from unicron_elastic.megatron.sharded import Sharded
from unicron_elastic.megatron.state import State
from unicron_elastic.training.group.assembly import BROKEN
from unicron_elastic.training.group.give_state import about_taken, give_state, take_state
from unicron_elastic.worker.notices import Parted, WentOn
from unicron_elastic.worker.step_count import made_before

Call = Callable[[list[int]], tuple[list[Any], int]]  # passes for these micro-batches: what they gave, and their tokens


class Progress(IntEnum):
    """`Progress` is how far the gradients of a step have come; each has come to all that is smaller, but `SPOILED`."""

    SPOILED = -1  # passes broke on the way: nobody knows what is in the sums
    OPEN = 0  # what was computed is summed up, and buckets may be reduced
    SUMMED_WITHIN = 1  # what is summed within a replica is being summed, into the reduced gradients
    FINISHED = 2  # all gradients of this step are here, also what is summed within a replica
    COMMITTED = 3  # and everybody has them
    SCALED = 4  # and they are divided by the tokens


class Footing(Enum):
    """`Footing` is what a process must do before it does anything with others."""

    NEW = "new"  # meet them, and take their state
    APART = "apart"  # meet them
    EVEN = "even"  # nothing: it has met them in its world
    PARTED = "parted"  # nothing any more: nobody needs it


class MegatronRun:
    """One process's part in the training. ``step`` counts the optimizer steps that its parameters have behind them.

    ``is_partial``: the latest ``total`` is not that of all ranks. ``finish`` sums up the gradients over the members of
    a replica, once they are reduced; ``changes_reduced`` says whether it changes them. ``counts_tokens``: whether the
    tokens of this rank are those of its replica.
    """

    def __init__(
        self,
        *,
        members: Members,
        buckets: Buckets,
        state: State,
        finish: Callable[[], None],
        changes_reduced: bool,
        counts_tokens: bool,
        step: int,
        steps: int,
        micro_batches: int,
        device: torch.device,
        sharded: Sharded | None = None,
        is_reproducible: bool = False,
    ) -> None:
        self._members = members
        self._buckets = buckets
        self._state = state
        self._finish_replica = finish
        self._changes_reduced = changes_reduced and sharded is None  # with it, buckets are reopened
        self._counts_tokens = counts_tokens
        self.step = step
        self.is_partial = False
        self._steps = steps
        self._micro_batches = micro_batches
        self._device = device
        self._sharded = sharded
        self._is_reproducible = is_reproducible
        self._held: frozenset[int] = frozenset()  # micro-batches of this step whose gradients are summed up
        self._assigned: frozenset[int] = frozenset()
        self._tokens = 0  # of those that are held
        self._given: list[Any] = []  # by their passes
        self._all_tokens: int | None = None  # of all micro-batches of this step
        self._norm: float | None = None  # of the gradients of the step that was committed last
        self._progress = Progress.OPEN
        self._news: WentOn | None = None  # of a new world, to be told after the step
        is_member = members.begin()
        self._footing = Footing.EVEN if is_member else Footing.NEW
        if sharded is not None:
            sharded.on_rebuilt = buckets.install
            sharded.begin() if is_member else sharded.begin_anew()

    @property
    def is_over(self) -> bool:
        """Whether the last step is made."""
        return self._footing is Footing.PARTED or self.step >= self._steps

    @property
    def has_state(self) -> bool:
        """Whether others may rely on its parameters."""
        return self._footing is not Footing.NEW

    def _needs_meeting(self) -> bool:
        return self._footing in {Footing.NEW, Footing.APART} or self._members.needs_meeting()

    # -- a step -------------------------------------------------------------------------------------------------------

    def train(self, call: Call) -> list[Any]:
        """Passes and reductions of one step, until it is committed; returns what the passes of this rank gave.

        ``call`` is called again for micro-batches of lost replicas.
        """
        self._state.load_again()
        self._clear()
        if not self._needs_meeting():
            self._assigned = self._share()
        while not (self._progress >= Progress.COMMITTED or self.is_over):
            if self._needs_meeting():
                self._meet()
            elif to_do := sorted(self._assigned - self._held):
                self._attempt(partial(self._compute, call, to_do))
            else:
                self._attempt(self._reduce)
        if self.is_over:
            self._part()
        return self._given

    def _share(self) -> frozenset[int]:
        """The micro-batches of this replica, as Megatron deals them: in turns."""
        unit = self._members.unit
        units = range(self._members.number, self._micro_batches // unit, self._members.replicas)
        return frozenset(each * unit + index for each in units for index in range(unit))

    def _clear(self) -> None:
        self._buckets.begin()
        self._held = self._assigned = frozenset()
        self._tokens, self._given, self._all_tokens = 0, [], None
        self._progress = Progress.OPEN

    def _compute(self, call: Call, indices: list[int]) -> None:
        self._progress = Progress.SPOILED
        with self._members.computing():
            if self._held or self._buckets.done:
                with self._buckets.held_back():
                    found, tokens = call(indices)
            else:
                found, tokens = call(indices)
        self._progress = Progress.OPEN
        self._given += found
        self._held |= frozenset(indices)
        self._tokens += tokens

    def _reduce(self) -> None:
        if self._all_tokens is None:  # before any bucket is done: who has one knows the tokens
            tokens = torch.tensor([self._tokens if self._counts_tokens else 0], dtype=torch.int64, device=self._device)
            self._all_tokens = int(self._members.sum(tokens))
        self._buckets.reduce()
        if self._changes_reduced:
            self._buckets.keep_reduced()
            self._progress = Progress.SUMMED_WITHIN
        self._members.waiter.call(_without_gradients(self._finish_replica))  # Megatron-Core waits without a time-out
        if self._sharded is not None:
            self._sharded.exchange_gradients()
        self._progress = Progress.FINISHED
        self._members.sum(torch.zeros(1, device=self._device))
        self._norm = None
        self._progress = Progress.COMMITTED

    def _attempt(self, part: Callable[[], None]) -> bool:
        """Does a part of a step; false if the world broke on the way, and a newer one has come."""
        try:
            part()
        except BROKEN as error:
            if not _is_of_connections(error):
                raise
            self._members.broke(error)
            return False
        return True

    # -- the optimizer step -------------------------------------------------------------------------------------------

    def make_step(self, make: Callable[[], Any]) -> Any:
        """Makes the optimizer step, again if it breaks; what it gives, or None if the state of others was taken."""
        if self.is_over:
            return None
        made: list[Any] = []
        before = self.step
        while not self._attempt(partial(self._make, make, made)):
            self._meet(leaves_after_taking=True)
            if self._footing is Footing.PARTED:
                return None
            if self.step != before:  # of others
                self._state.load_again_later()
                break
        else:
            if self._sharded is not None:
                assert self._norm is not None
                self._sharded.step_copy(self._norm)
            self.step += 1
        self._clear()
        self._members.drop_former()
        if self._footing is Footing.EVEN:
            self._tell_news()
        if self.step >= self._steps:
            self._part()
        return made[0] if made else None

    def _make(self, make: Callable[[], Any], made: list[Any]) -> None:
        if self._sharded is None or self._footing is Footing.EVEN:
            made.append(make())
            return
        with self._sharded.parameters_held():  # the optimizer is still cut for the world before
            if not self._sharded.has_stepped:
                made.append(make())

    def norm(self, find: Callable[[], float]) -> float:
        """The norm of the gradients of the step that is committed; ``find`` finds it, with others."""
        if self._norm is None:
            own = self._sharded if self._is_reproducible else None  # Megatron's depends on how many parts there are
            self._norm = self._found(find) if own is None else own.norm()
        return self._norm

    def _found(self, find: Callable[[], float]) -> float:
        norms: list[float] = []
        self._members.waiter.call(_without_gradients(lambda: norms.append(float(find()))))
        return norms[0]

    def scale(self, buffers: Sequence[Any]) -> None:
        """Divides gradients by the tokens of the step, as ``finalize_model_grads`` does (megatron-core 0.16.1)."""
        if self._all_tokens:
            factor = self._factor()
            for buffer in buffers:
                buffer.scale_gradients(factor)
            if self._sharded is not None:
                self._sharded.scale(factor)
        self._progress = Progress.SCALED
        self._buckets.round()

    def _factor(self) -> Tensor:
        tokens = torch.tensor(self._all_tokens, dtype=torch.int, device=self._device)
        factor: Tensor = 1.0 / tokens
        return factor

    def evaluate(self, passes: Callable[[], list[Any]]) -> list[Any]:
        """What forward ``passes`` of this replica give; nothing if they break on the way: the next step meets."""
        given: list[Any] = []

        def attempt() -> None:
            with self._members.computing():
                given.extend(passes())

        if self._footing is Footing.PARTED:
            return [] if self._members.is_alone else passes()
        if not self._needs_meeting():
            self._attempt(attempt)
        return given

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks that train; or what this one has if the world breaks: then ``is_partial``."""
        summed = tensor.detach().clone()
        self.is_partial = True
        if self.is_alone or self._needs_meeting():
            return summed
        try:
            summed = self._members.sum(summed)
            self.is_partial = False
            return summed
        except BROKEN as error:
            if is_of_script(error):
                raise
            if self._footing is not Footing.PARTED:  # else nobody needs this rank any more
                self._members.broke(error)
            return tensor.detach().clone()

    @property
    def is_alone(self) -> bool:
        """Whether the others have ended the training without this rank."""
        return self._members.is_alone

    def together(self, part: Callable[[Members], Any]) -> bool:
        """Does something with all ranks that train, between steps; false if the world is changing, or breaks."""
        if self.is_alone or self._needs_meeting():
            return False
        try:
            part(self._members)
        except BROKEN as error:
            if not _is_of_connections(error):
                raise
            if self._footing is not Footing.PARTED:  # else nobody needs this rank any more
                self._members.broke(error)
            return False
        return True

    def _tell_news(self) -> None:
        if self._news is not None:
            self._members.tell(self._news)
            self._news = None

    def _part(self) -> None:
        """Stays until nobody needs this rank any more."""
        while self._footing is not Footing.PARTED:
            if self._needs_meeting():
                self._meet()
            elif self._attempt(lambda: self._members.part(torch.zeros(1, device=self._device))):
                self._have_parted()

    def _have_parted(self) -> None:
        self._footing = Footing.PARTED
        self._tell_news()
        self._members.tell(Parted())

    # -- the world ----------------------------------------------------------------------------------------------------

    def _meet(self, *, leaves_after_taking: bool = False) -> None:
        """Agrees with the members of the newest world on where they are, until all are even or this rank is late.

        ``leaves_after_taking``: who has taken the state of others is not in the step any more that it was in.
        """
        if self._footing is Footing.EVEN:
            self._footing = Footing.APART
        self._mend()
        while True:
            try:
                agreement = self._members.meet(self._said)
            except NoStateLeft:
                if not self._members.is_over():
                    raise
                self._members.be_alone()
                self._have_parted()
                return
            if self._members.is_spare:
                if agreement.is_even and not self._wait_as_spare():
                    return
            elif agreement.advance:
                if self._attempt(partial(self._learn, agreement)) and self._members.index in agreement.advance:
                    return
            elif agreement.pull:
                has_taken = self._attempt(partial(self._give_or_take, agreement))
                if has_taken and leaves_after_taking and self._members.index in agreement.pull:
                    return
            elif self._attempt(partial(self._take_part, agreement)):
                break
            self._mend()
        self._footing = Footing.EVEN

    def _learn(self, agreement: ReplicaAgreement) -> None:
        """What those who make the step before have to know, before it is said that this one will make it."""
        norm = agreement.norm
        if norm is None and self._sharded is not None:
            is_scaled = self._progress is Progress.SCALED or not self._all_tokens
            norm = self._sharded.norm(agreement.cuts, None if is_scaled else self._factor())
        if self._members.index in agreement.advance:
            self._norm = norm
            self._progress = max(self._progress, Progress.COMMITTED)

    def _mend(self) -> None:
        """Puts the gradients in order that a fault left in disorder."""
        if self._progress >= Progress.FINISHED:  # if anybody has committed the step, the gradients are as they must be
            return
        self._restore_reduced()
        if self._sharded is not None:
            self._buckets.reopen()
        self._buckets.restore()
        if self._progress is Progress.SPOILED:
            self._drop()

    def _restore_reduced(self) -> None:
        if self._progress is Progress.SUMMED_WITHIN:
            self._buckets.restore_reduced()
            self._progress = Progress.OPEN

    def _drop(self) -> None:
        self._buckets.drop()
        self._held, self._tokens, self._given = frozenset(), 0, []
        self._progress = Progress.OPEN

    def _said(self) -> MemberSaid:
        return MemberSaid(
            seat=self._members.seat,
            replica=self._members.replica,
            state=self.step if self.has_state else None,
            buckets=self._buckets.count,
            held=self._held,
            done=frozenset() if self._sharded is not None else frozenset(self._buckets.done),
            is_finished=self._progress >= Progress.FINISHED,
            is_committed=self._progress >= Progress.COMMITTED,
            tokens=self._all_tokens,
            norm=self._norm,
            cuts=() if self._sharded is None else self._sharded.cuts,
        )

    def _take_part(self, agreement: ReplicaAgreement) -> None:
        """All are in the same step: takes over what this rank is to do of it."""
        number = self._members.number
        if self._progress is Progress.FINISHED:  # and nobody has committed it
            self._progress = Progress.SUMMED_WITHIN if self._changes_reduced else Progress.OPEN
            self._mend()
        if agreement.held[number] != self._held:
            self._drop()
        if self._sharded is not None:
            self._sharded.settle(agreement.cuts)
        for seat, bucket, source in agreement.fill:
            if seat == self._members.seat:
                has_it = bucket in self._buckets.done
                transfer = partial(self._members.spread, source=source, takes=not has_it)
                self._buckets.fill(bucket, transfer, has_it=has_it)
        self._all_tokens = agreement.tokens
        self._assigned = self._held | frozenset(agreement.dealt[number])
        self._hear_news(reused=len(self._held), recomputed=sum(map(len, agreement.dealt)) if self._held else 0)

    def _hear_news(self, *, reused: int, recomputed: int) -> None:
        world = self._members.world
        assert world is not None
        if world.number > 1:
            self._news = WentOn(
                reused=self._news.reused if self._news else reused,
                recomputed=recomputed,
                world=world.number,
                regrouped_ns=time.monotonic_ns(),
            )

    def _wait_as_spare(self) -> bool:
        """Until there is a newer world; false if the training is over."""
        if self._sharded is not None:
            self._sharded.begin_anew()
        self._clear()
        self._drop()
        self._hear_news(reused=0, recomputed=0)
        self._tell_news()
        if self._members.wait_as_spare():
            return True
        self._have_parted()
        return False

    def _give_or_take(self, agreement: ReplicaAgreement) -> None:
        """Gives the state to those who have none, or takes it."""
        me = self._members.index
        for destination, source in zip(agreement.pull, agreement.sources, strict=True):
            if me == source:
                give_state(self._state, self._members, [destination], self._device)
            elif me == destination:
                began = time.monotonic()
                taken_bytes = take_state(self._state, self._members, source, self._device)
                self._members.tell(about_taken(taken_bytes, time.monotonic() - began))
                self.step = agreement.step
                made_before(self.step)
                self._footing = Footing.APART
                self._norm = None
                self._clear()
                self._drop()


def _without_gradients(call: Callable[[], object]) -> Callable[[], None]:
    """For a thread of its own, which does not know what is off in this one."""

    def called() -> None:
        with torch.no_grad():
            call()

    return called


def _is_of_connections(error: BaseException) -> bool:
    """Whether it is about the connections between ranks, and not the script's own."""
    if isinstance(error, AbandonedError):
        return True
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    failure = Failure(at=0.0, rank=0, local_rank=0, pid=0, exception_type=name, message=str(error))
    return classify(failure).severity is Severity.SEV3
