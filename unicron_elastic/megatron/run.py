"""What goes on in one process that trains with Megatron-Core, as the shell of the protocol of a member.

It posts what the script does, and carries out each command; neither keeps anything by which it would decide itself.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unicron_elastic.engine.protocol.agreement import NoStateLeft
from unicron_elastic.engine.protocol.member_command import (
    AskEnd,
    Confirm,
    CountTokens,
    Disconnect,
    Drop,
    EndProcess,
    Evaluate,
    FindNorm,
    MakeStep,
    Restore,
    Settle,
    SitOut,
    SumWithin,
)
from unicron_elastic.engine.protocol.member_event import (
    Confirmed,
    Evaluated,
    EvaluationAsked,
    NormFound,
    Settled,
    StepAsked,
    SummedWithin,
    TokensCounted,
)
from unicron_elastic.engine.protocol.replica_agreement import MemberSaid
from unicron_elastic.engine.protocol.replica_command import (
    AskAgent,
    Average,
    AwaitWorld,
    Clear,
    Compute,
    Gather,
    HandOver,
    MakeGroup,
    MoveState,
    NoteMeeting,
    Raise,
    Reduce,
    ReplicaCommand,
    ReturnMean,
    Say,
    TellBroke,
    TellParted,
    TellReady,
)
from unicron_elastic.engine.protocol.replica_event import (
    Averaged,
    CallBegun,
    Computed,
    Gathered,
    Handed,
    MeanAsked,
    MoreAsked,
    Moved,
    Reduced,
    ReplicaEvent,
    StepBegun,
    StepMade,
)
from unicron_elastic.engine.protocol.replica_member import ReplicaMember
from unicron_elastic.engine.protocol.replica_phase import Finished, Moving, Standing, Stepping
from unicron_elastic.megatron.buckets import Buckets
from unicron_elastic.megatron.members import Members
from unicron_elastic.megatron.sharded import Sharded
from unicron_elastic.megatron.state import State
from unicron_elastic.training.group.give_state import about_taken, give_state, receive_state
from unicron_elastic.training.group.regrouping import Regrouping
from unicron_elastic.training.replica_driver import Result
from unicron_elastic.worker.notices import Parted
from unicron_elastic.worker.step_count import made_before

Call = Callable[[list[int]], tuple[list[Any], int]]  # passes for these micro-batches: what they gave, and their tokens
_ERRORS = {"no state left": NoStateLeft}


class MegatronRun:
    """`MegatronRun` is one process's part in the training.

    ``finish`` sums up the gradients over the members of a replica, once they are reduced. ``counts_tokens``: whether
    the tokens of this rank are those of its replica.
    """

    def __init__(
        self,
        *,
        members: Members,
        buckets: Buckets,
        state: State,
        finish: Callable[[], None],
        counts_tokens: bool,
        step: int,
        steps: int,
        device: torch.device,
        sharded: Sharded | None = None,
        is_reproducible: bool = False,
    ) -> None:
        self._members = members
        self._buckets = buckets
        self._state = state
        self._finish_replica = finish
        self._counts_tokens = counts_tokens
        self._device = device
        self._sharded = sharded
        self._is_reproducible = is_reproducible
        self._tokens = 0  # of what is summed up
        self._given: list[Any] = []  # by its passes
        self._shared: Callable[[], object] = lambda: None  # what all ranks do together between two steps
        self._latest = ReturnMean(is_own=False)  # how the latest ``total`` ended
        self._regrouping = Regrouping()
        self._driver = members.driver
        self._driver.act = self._carry_out
        self._driver.replica = self._driver.replica._replace(
            step=step, buckets=buckets.count, is_sharded=sharded is not None
        )
        if sharded is not None:
            sharded.on_rebuilt = buckets.install
        self._driver.post(CallBegun(steps))
        if self._member.met is not None:
            self._regrouping.meet(self._member.met, step, 0, ())
        if sharded is not None:
            sharded.begin() if self.has_state else sharded.begin_anew()

    @property
    def _member(self) -> ReplicaMember:
        return self._driver.replica

    @property
    def step(self) -> int:
        """Return how many optimizer steps the parameters have behind them."""
        return self._member.step

    @property
    def is_over(self) -> bool:
        """Whether the last step is made."""
        return isinstance(self._member.record, Finished) or self.step >= self._member.until

    @property
    def has_state(self) -> bool:
        """Whether others may rely on its parameters."""
        return self._member.has_state

    @property
    def is_partial(self) -> bool:
        """Whether the latest ``total`` is not that of all ranks."""
        return self._latest.is_own

    # -- what the script does -----------------------------------------------------------------------------------------

    def train(self, call: Call) -> list[Any]:
        """Passes and reductions of one step, until it is committed; returns what the passes of this rank gave.

        ``call`` is called again for micro-batches of lost replicas.
        """
        self._state.load_rest()
        command = self._driver.post(StepBegun())
        while isinstance(command, Compute):
            broke = self._members.attempt(partial(self._compute, call, command))
            command = self._driver.post(broke or MoreAsked())
        return self._given

    def _compute(self, call: Call, command: Compute) -> None:
        with nullcontext() if command.may_reduce else self._buckets.held_back():
            found, tokens = call(list(command.indices))
        self._given += found
        self._tokens += tokens
        for index in command.indices:
            self._driver.post(Computed(index))

    def scale(self, buffers: Sequence[Any]) -> None:
        """Divides gradients by the tokens of the step, as ``finalize_model_grads`` does (megatron-core 0.16.1)."""
        if (factor := self._factor()) is not None:
            for buffer in buffers:
                buffer.scale_gradients(factor)
            if self._sharded is not None:
                self._sharded.scale(factor)
        self._buckets.round()

    def _factor(self) -> Tensor | None:
        """Return by what gradients are multiplied, if anything was counted."""
        if not self._member.work.tokens:
            return None
        factor: Tensor = 1.0 / torch.tensor(self._member.work.tokens, dtype=torch.int, device=self._device)
        return factor

    def make_step(self, make: Callable[[], Any]) -> Any:
        """Makes the optimizer step, again if it breaks; what it gives, or None if the state of others was taken."""
        if self.is_over:
            return None
        made: list[Any] = []
        command = self._driver.post(StepAsked())
        while isinstance(command, MakeStep):
            broke = self._members.attempt(partial(self._make, make, made, is_apart=command.is_apart))
            command = self._driver.post(broke or StepMade())
        self._members.drop_former()
        record = self._member.record
        if isinstance(record, Stepping) and record.standing is Standing.EVEN:
            self._tell_news()
        return made[0] if made else None

    def _make(self, make: Callable[[], Any], made: list[Any], *, is_apart: bool) -> None:
        if self._sharded is None:
            made.append(make())
            return
        if not is_apart:
            made.append(make())
        else:
            with self._sharded.parameters_held():  # the optimizer is still cut for the world before
                if not self._sharded.has_stepped:
                    made.append(make())
        norm = self._member.work.norm
        assert norm is not None
        self._sharded.step_copy(norm)

    def norm(self, find: Callable[[], float]) -> float:
        """The norm of the gradients of the step that is committed; ``find`` finds it, with others."""
        known = self._member.work.norm
        if known is None:
            own = self._sharded if self._is_reproducible else None  # Megatron's depends on how many parts there are
            known = self._found(find) if own is None else own.norm()
            self._driver.post(NormFound(known))
        return known

    @property
    def known_norm(self) -> float:
        """Return that of the gradients of the latest step, nan if it is not known here."""
        known = self._member.work.norm
        return math.nan if known is None else known

    def _found(self, find: Callable[[], float]) -> float:
        norms: list[float] = []
        self._members.waiter.call(_without_gradients(lambda: norms.append(float(find()))))
        return norms[0]

    def evaluate(self, passes: Callable[[], list[Any]]) -> list[Any]:
        """What forward ``passes`` of this replica give; nothing if they break on the way: the next step meets."""
        given: list[Any] = []
        if isinstance(self._driver.post(EvaluationAsked()), Evaluate):
            broke = self._members.attempt(lambda: given.extend(passes()))
            self._driver.post(broke or Evaluated())
        return given

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks that train; or what this one has if the world breaks: then ``is_partial``."""
        summed = tensor.detach().clone()
        self._latest = self._do_together(lambda: self._members.sum(summed))
        return tensor.detach().clone() if self._latest.is_own else summed

    def together(self, part: Callable[[Members], Any]) -> bool:
        """Does something with all ranks that train, between steps; false if the world is changing, or breaks."""
        return not self._do_together(lambda: part(self._members)).is_own

    def _do_together(self, part: Callable[[], object]) -> ReturnMean:
        self._shared = part
        ended = self._driver.post(MeanAsked())
        assert isinstance(ended, ReturnMean)
        return ended

    # -- what the protocol decides ------------------------------------------------------------------------------------

    def _carry_out(self, command: ReplicaCommand) -> Iterable[Result]:
        """Do it; return how it ended. Raises what the script is to be told."""
        members = self._members
        match command:
            case Say(number=number, said=MemberSaid() as said):
                return [members.say(number, self._in_full(said))]
            case MakeGroup(layout=layout):
                assert layout is not None
                return [members.connect(layout)]
            case AskAgent():
                return [members.enter()]
            case TellReady():
                return [members.get_ready()]
            case AwaitWorld():
                members.await_next()
                return [None]
            case SitOut():
                return [self._sit_out()]
            case AskEnd():
                return [members.ask_end()]
            case EndProcess(reason=reason):
                sys.stderr.write(f"unicron: this process ends in step {self.step}: {reason}.\n")
                sys.exit(0)
            case Raise(kind=kind, reason=reason):
                raise _ERRORS.get(kind, RuntimeError)(reason)
        return self._do_with_others(command) or self._note(command)

    def _in_full(self, said: MemberSaid) -> MemberSaid:
        """Return what it says, and which parts it has of the optimizer's state, of which the protocol knows nothing."""
        return said if self._sharded is None else replace(said, cuts=self._sharded.cuts)

    def _do_with_others(self, command: ReplicaCommand) -> list[Result]:
        members = self._members
        match command:
            case CountTokens():
                return [self._count()]
            case Reduce():
                return self._reduce()
            case SumWithin(keeps=keeps):
                if keeps:
                    self._buckets.keep_reduced()
                return [members.together(self._sum_within) or SummedWithin()]
            case Confirm():
                return [members.together(lambda: members.sum(self._nothing())) or Confirmed()]
            case FindNorm():
                return [self._find_norm(command)]
            case Settle(cuts=cuts):
                assert self._sharded is not None
                return [members.together(partial(self._sharded.settle, cuts)) or Settled(self._buckets.count)]
            case HandOver(bucket=int(bucket), source=source):
                return [members.together(partial(self._fill, bucket, source)) or Handed()]
            case MoveState():
                return [members.together(partial(self._move_state, command)) or Moved()]
            case Average():
                return [members.together(self._shared) or Averaged()]
            case Gather():
                return [members.together(lambda: members.part(self._nothing())) or Gathered()]
        return []

    def _nothing(self) -> Tensor:
        """Return what is summed up where only the coming of all counts."""
        return torch.zeros(1, device=self._device)

    def _note(self, command: ReplicaCommand) -> list[Result]:
        """Carry out what is done at once."""
        match command:
            case Clear():
                self._buckets.begin()
                self._tokens, self._given = 0, []
            case Drop():
                self._buckets.drop()
                self._tokens, self._given = 0, []
            case Restore(is_within=is_within):
                self._restore(is_within=is_within)
            case NoteMeeting(dealt=dealt):
                assert self._member.met is not None
                self._regrouping.meet(self._member.met, self.step, len(self._member.work.held), dealt)
            case Disconnect():
                self._members.disconnect()
            case TellBroke():
                self._members.tell_broken()
            case TellParted():
                self._tell_news()
                self._members.tell(Parted())
        return []

    def _tell_news(self) -> None:
        if (news := self._regrouping.take()) is not None:
            self._members.tell(news)

    def _sit_out(self) -> Result:
        if self._sharded is not None:
            self._sharded.begin_anew()
        self._tell_news()
        return self._members.sit_out()

    # -- gradients ----------------------------------------------------------------------------------------------------

    def _count(self) -> ReplicaEvent:
        tokens = torch.tensor([self._tokens if self._counts_tokens else 0], dtype=torch.int64, device=self._device)
        return self._members.together(lambda: self._members.sum(tokens)) or TokensCounted(int(tokens))

    def _reduce(self) -> list[Result]:
        before = set(self._buckets.done)
        broke = self._members.together(self._buckets.reduce)
        events: list[Result] = [Reduced(bucket) for bucket in sorted(self._buckets.done - before)]
        return [*events, broke] if broke else events

    def _sum_within(self) -> None:
        self._buckets.change_reduced(_without_gradients(self._finish_replica))
        if self._sharded is not None:
            self._sharded.exchange_gradients()

    def _restore(self, *, is_within: bool) -> None:
        """Put the gradients in order that a fault left in disorder."""
        if is_within:
            self._buckets.restore_reduced()
        if self._sharded is not None:
            self._buckets.reopen()
        self._buckets.restore()

    def _fill(self, bucket: int, source: int) -> None:
        has_it = bucket in self._buckets.done
        transfer = partial(self._members.spread, source=source, takes=not has_it)
        self._buckets.fill(bucket, transfer, has_it=has_it)

    def _find_norm(self, command: FindNorm) -> ReplicaEvent:
        assert self._sharded is not None
        found: list[float] = []
        factor = None if command.is_scaled else self._factor()
        find = partial(self._sharded.norm, command.cuts, factor)
        return self._members.together(lambda: found.append(find())) or NormFound(found[0])

    # -- the state ----------------------------------------------------------------------------------------------------

    def _move_state(self, command: MoveState) -> None:
        """Give the state to those who have none, or take it."""
        if self._members.index == command.source:
            give_state(self._state, self._members, command.to, self._device)
            return
        began = time.monotonic()
        state, taken_bytes = receive_state(self._members, command.source, self._device)
        self._state.load_state_dict(state, command.behind)
        self._members.tell(about_taken(taken_bytes, time.monotonic() - began))
        moving = self._member.record
        assert isinstance(moving, Moving)
        assert moving.meeting.agreement is not None
        made_before(moving.meeting.agreement.step)


def _without_gradients(call: Callable[[], object]) -> Callable[[], None]:
    """For a thread of its own, which does not know what is off in this one."""

    def called() -> None:
        with torch.no_grad():
            call()

    return called
