"""What goes on inside a run: it tells the protocol what its script does, and does what that decides."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unicron_elastic.compat.loaded import compiled_graphs
from unicron_elastic.compat.tensors import copy_each, has_unreduced, local_of, reshard
from unicron_elastic.engine.protocol.agreement import NoStateLeft
from unicron_elastic.engine.protocol.replica_command import (
    AskAgent,
    Average,
    AwaitHolders,
    AwaitWorld,
    BeginReduce,
    BreakOff,
    Clear,
    Compare,
    Compute,
    CopyState,
    Gather,
    HandOver,
    LetGo,
    MakeGroup,
    MoveState,
    NoteMeeting,
    Raise,
    Reduce,
    ReleaseSource,
    ReplicaCommand,
    ReturnMean,
    Say,
    TellBroke,
    TellEntered,
    TellLeft,
    TellParted,
    TellReady,
)
from unicron_elastic.engine.protocol.replica_event import (
    Averaged,
    BucketReady,
    CallBegun,
    CallEnded,
    Computed,
    GroupBroke,
    Judged,
    MeanAsked,
    MoreAsked,
    Moved,
    PatienceOver,
    ReplicaEvent,
    StateRefused,
    StepBegun,
    StepMade,
    WhoIsWrong,
    WorldHeard,
)
from unicron_elastic.engine.protocol.replica_phase import Computing, Finished, Passing, Standing, Stepping
from unicron_elastic.engine.protocol.said import MismatchError, Said
from unicron_elastic.engine.transport.carrier import Carrier
from unicron_elastic.engine.transport.transport import Transport
from unicron_elastic.training.group.arrival import Arrival
from unicron_elastic.training.group.assembly import Assembly, OverError, TextsHeard
from unicron_elastic.training.group.give_state import about_taken, give_state, receive_state, share_state
from unicron_elastic.training.group.handover import Handover, NotTakenError
from unicron_elastic.training.group.mean_share import MEAN, SUM, MeanShare, check_same
from unicron_elastic.training.group.membership import Membership, membership
from unicron_elastic.training.group.regrouping import Regrouping
from unicron_elastic.training.group.reports import Reports
from unicron_elastic.training.group.sendable import Stateful, check_sendable
from unicron_elastic.training.group.servant import NotGivenError, Servant
from unicron_elastic.training.group.signs import Effort, Signs
from unicron_elastic.training.inner_changes import InnerChanges
from unicron_elastic.training.micro_batch_counts import MicroBatchCounts
from unicron_elastic.training.object_share import OBJECT, ObjectShare
from unicron_elastic.training.of_launcher import of_launcher
from unicron_elastic.training.registered import MODEL, Registered, ValuesOfScript, about_unlike, to_tell
from unicron_elastic.training.replica_driver import ReplicaDriver, Result
from unicron_elastic.training.replicas import Replicas
from unicron_elastic.training.shard.in_shards import InShards, not_served
from unicron_elastic.training.shard.mates import Mates
from unicron_elastic.training.shard.tensor_ranks import check_alike
from unicron_elastic.training.shard.unison import Unison
from unicron_elastic.training.snapshot.gate import StateGate
from unicron_elastic.training.step.buffers import Buffers, device_of, named_buffers
from unicron_elastic.training.step.comparison import (
    OddReplicaError,
    ReplicasDifferError,
    Told,
    in_place,
    judge,
    written,
)
from unicron_elastic.training.step.gradients import Gradients
from unicron_elastic.training.step.guard import Guard
from unicron_elastic.training.step.module_values import ModuleValues
from unicron_elastic.training.step.randomness import Randomness
from unicron_elastic.training.step.suitable import check_shards, check_suitable
from unicron_elastic.training.step.trainable import Trainable
from unicron_elastic.training.step.tree_gradients import TreeGradients
from unicron_elastic.training.step.wrong_use import WrongUseError
from unicron_elastic.worker.notices import Left, Parted
from unicron_elastic.worker.step_count import count_as_step, made_before

DIFFERENT_GOES_S = 120.0  # so long a rank whose state is wrong has to end
_WITH_OTHERS = (  # what has an end that all of a replica must agree on
    *(AskAgent, AwaitHolders, AwaitWorld, Average, Compare, CopyState, Gather, HandOver, MakeGroup, MoveState, Reduce),
    *(Say, TellReady),
)
_COMPILED = (
    "torch.compile makes other code for the shapes that a process has seen first: what it makes has the same bits on "
    "any number of ranks only where all micro-batches have one shape, or with torch.compile(..., dynamic=True)"
)
_ORDER = ""  # among what micro-batch 0 has made: in which order it has used what is trained; no buffer is called so


class MissedStepError(RuntimeError):
    """The others have made the step that this rank is in, and nobody has its gradients any more."""


_ERRORS = {
    "no state left": NoStateLeft,
    "over": OverError,
    "mismatch": MismatchError,
    "missed step": MissedStepError,
    "differs": ReplicasDifferError,
}


class Engine:
    """`Engine` is one process's part in the training, as the shell of the protocol.

    It posts what its script does, and carries out each command; ``state`` counts the optimizer steps that its
    parameters have behind them, and ``until`` is the total of its call of ``run.steps()``.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        scaler: Any,
        state: Stateful,
        registered: Registered,
        randomness: Randomness,
        is_reproducible: bool,
        backend: str,
        timeout_s: float,
        join_patience_s: float,
        on_regroup: Callable[[], None],
        replicas: Replicas,
        mates: Mates | None = None,
    ) -> None:
        """``mates``: the processes of this one's replica, if they are several."""
        self._model = model
        self._mates = mates
        self._seats = 1 if mates is None else mates.seats
        self._trainable = Trainable(model)
        self._scaler = scaler
        self._objects = registered
        self._optimizers = [each for each in registered.objects.values() if isinstance(each, Optimizer)]
        modules = {name: each for name, each in registered.objects.items() if isinstance(each, nn.Module)}
        self._values = ModuleValues(modules)
        self._inner_changes = InnerChanges(registered.objects, ValuesOfScript)
        self._registered = Handover(
            state if mates is None else InShards(state, model),
            self._trainable,
            self._values,
            self._optimizers,
            lambda: self.until,
            randomness=randomness,
            schedulers=[each for each in registered.objects.values() if isinstance(each, LRScheduler)],
            others={name: Trainable(each, f"{name}.") for name, each in modules.items() if each is not model},
        )
        self._randomness = randomness
        self._is_reproducible = is_reproducible
        self._has_told_compiled = False
        self._timeout_s = timeout_s
        self._join_patience_s = join_patience_s
        self._on_regroup = on_regroup
        self._replicas = replicas
        self._gate = StateGate()
        self._membership, carrier, self._unison = self._places(mates, backend)
        self._driver = ReplicaDriver(self._membership, self._gate, self._act, self._seats)
        self._arrival = Arrival(self._membership, self._registered)
        self._signs = Signs(timeout_s, Effort().look)
        self._transport = Transport(backend, self._membership.is_left, self._signs, carrier)
        self.reports = Reports(self._seats)
        self._regrouping = Regrouping()
        self._share: MeanShare | ObjectShare | None = None  # of that for which the script asks
        self._found: tuple[Tensor, Iterable[int]] | None = None  # its result, and whose shares that lacks
        self.guard = Guard()
        self._counts = MicroBatchCounts(1)
        self._counted: int | None = None  # the step whose number of micro-batches was asked for last
        self._buffers: Buffers | None = None
        self._gradients: Gradients | None = None
        self._assembly: Assembly | None = None

    def _places(self, mates: Mates | None, backend: str) -> tuple[Membership, Carrier | None, Unison | None]:
        """Return this process's in its job; and what it needs in a seat of a replica of several."""
        servant = Servant(self._registered, self._gate, lambda: (self.until, self.state), self._registered.is_whole)
        if mates is None:
            return membership(servant.serve, backend), None, None
        from unicron_elastic.engine.group.register import around
        from unicron_elastic.training.shard.seat_carrier import SeatCarrier
        from unicron_elastic.training.shard.seat_membership import SeatMembership

        carrier = SeatCarrier(mates.seat, around(backend)[1])
        own = membership(not_served, backend, replica_size=mates.seats, break_off=carrier.break_off)
        of_seat = SeatMembership(own, mates.seats)
        return of_seat, carrier, Unison(mates, of_seat, self._break_too)

    @property
    def state(self) -> int:
        """Return how many optimizer steps the parameters have behind them."""
        return self._driver.replica.step

    @state.setter
    def state(self, steps: int) -> None:
        self._driver.count(steps)

    @property
    def until(self) -> int:
        """Return the total of the steps that it is in."""
        return self._driver.replica.until

    @property
    def is_member(self) -> bool:
        """Whether it trains step by step, and counts them itself."""
        return self._gradients is not None

    def has_made(self, total: int) -> bool:
        """Whether it has made so many steps, and all others know."""
        return isinstance(self._driver.replica.record, Finished) and self.state >= total

    @property
    def was_newcomer(self) -> bool:
        """Whether this rank was given the state of others."""
        return self._arrival.was_newcomer

    @property
    def steps_made(self) -> int:
        """How many optimizer steps the state has behind it, the one that the script makes now included."""
        record = self._driver.replica.record
        return self.state + (isinstance(record, Stepping) and record.is_behind and not self.guard.is_inside)

    @property
    def is_passing(self) -> bool:
        """Whether the others have the call of run.steps() behind them that this newcomer has just left."""
        return isinstance(self._driver.replica.record, Passing)

    @property
    def rank(self) -> int:
        """Return the rank in the present world; behind all others while it passes them by."""
        if self.is_passing:
            return of_launcher("WORLD_SIZE", 1)
        if self._driver.replica.met is not None:
            return self._driver.replica.rank * self._seats + (0 if self._mates is None else self._mates.seat)
        return of_launcher("RANK", 0)

    @property
    def world_size(self) -> int:
        """Return the size of the present world."""
        met = self._driver.replica.met
        if met is not None and not self.is_passing:
            return met.size * self._seats
        return of_launcher("WORLD_SIZE", 1) + self.is_passing

    # -- a step -------------------------------------------------------------------------------------------------------

    def note_yield(self) -> None:
        """The script is about to get the next step, in which a newcomer's does what it does itself."""
        self._registered.note_yield()
        self._let_optimizers_step(is_summed=False)

    def begin_step(self) -> list[int]:
        """The micro-batches with which this rank begins the step."""
        self._have_shards()
        self._values.begin_step()
        count_as_step(self.state + 1)
        self.guard.drop(self.state - 1, self._trainable.trained)
        self.guard.begin()
        self._load_again()
        self._lay_out()
        self._count_micro_batches()
        self.guard.look(self._trainable.parameters)
        self._randomness.keep()
        command = self._driver.post(StepBegun())
        if self._mates is not None and self.world_size > self._seats:
            self._replicas.share_digest(self._mates.share)
        self._inner_changes.begin()  # in a newcomer that may have brought the others' state once more
        return self._indices(command) or []

    def _count_micro_batches(self) -> None:
        """Asks the script, once, how many the step has that it is in, if its call has one more: others may ask it too.

        Raises what that raises, and MismatchError if the processes of this replica have not got the same.
        """
        step = self.state
        if not self._counts.are_by_step or step >= self.until or step == self._counted:
            return
        number = self._counts.of(step)
        self._check_in_replica(number, lambda each: f"has {each} micro-batches in step {step}")
        self._counted = step
        gradients, _ = self._parts()
        assert self._buffers is not None
        if number != gradients.micro_batches:
            gradients.take_count(number)
            self._buffers.take_count(number)
            self._driver.begin(number)

    def _check_in_replica(self, number: int, words: Callable[[int], str]) -> None:
        """Raises MismatchError if another process of this replica has not the same, of which one speaks for all."""
        if self._mates is None:
            return
        for seat, other in enumerate(map(int, self._mates.share(str(number)))):
            if other != number:
                own = f"seat {self._mates.seat} {words(number)}"
                raise MismatchError(f"seat {seat} of this replica {words(other)}, and {own}")

    def _compare_counts(self) -> None:
        """Raises MismatchError if other ranks have another number of micro-batches in this step."""
        gradients, assembly = self._parts()
        assembly.compare(f"the gradients of step {self.state}, of {gradients.micro_batches} micro-batches")

    def _load_again(self) -> None:
        """Takes over once more what it has taken before it met the others in the step that begins."""
        record = self._driver.replica.record
        if isinstance(record, Stepping) and record.standing in {Standing.MET, Standing.AMONG}:
            self._registered.load_again()

    def _indices(self, command: ReplicaCommand | None) -> list[int] | None:
        """Return the micro-batches that are to be computed; None if the step is over."""
        return list(command.indices) if isinstance(command, Compute) else None

    def begin_micro_batch(self, index: int) -> None:
        """Right before the script computes it."""
        self._randomness.seed(self.state, index)
        if self._buffers is not None:
            self._buffers.begin_micro_batch()

    def backward(self, index: int, loss: Tensor, weight: float | None) -> None:
        """Adds the gradients of a micro-batch, whose ``loss`` is a sum if it has a ``weight``, and else a mean."""
        gradients, _ = self._parts()
        gradients.check()
        self.guard.backward(loss / gradients.micro_batches if weight is None else loss)
        gradients.take_added()
        if self._mates is not None and has_unreduced(self._model):
            raise WrongUseError(
                "FSDP2 has not reduced the gradients of this micro-batch: leave set_requires_gradient_sync(False) out, "
                "as the run sums up each micro-batch by itself, and nobody knows which is a replica's last one"
            )
        self._take_buffers(index)
        gradients.add(index, loss.detach(), weight)
        self._driver.post(Computed(index))

    def _begin_bucket(self, bucket: int) -> bool:
        """All gradients of a bucket are there, in the middle of a backward pass; return whether it is reduced now."""
        _, assembly = self._parts()
        begins = isinstance(self._driver.post(BucketReady(bucket)), BeginReduce)
        if begins:
            assembly.begin_reduce(bucket, self._driver.replica.work.holdings)
        return begins

    def _take_buffers(self, index: int) -> None:
        """What a micro-batch has made of them."""
        gradients, _ = self._parts()
        if self._buffers is not None:
            self._buffers.end_micro_batch()
            if index == 0:
                made = self._buffers.made()
                if not self._trainable.knows_order:
                    made[_ORDER] = self._trainable.order_of(gradients.came)
                gradients.take_made(made, self._device)

    def reduce(self) -> list[int] | None:
        """Reduces the gradients. None when that is complete, else more micro-batches that this rank is to compute."""
        gradients, _ = self._parts()
        self.guard.check()
        gradients.check_places()
        record = self._driver.replica.record
        if not isinstance(record, Computing):  # there was nothing to compute, and the step was over when it began
            return None
        if record.left:
            wrong = ", ".join(map(str, sorted(record.left)))
            raise WrongUseError(
                f"what this rank has computed is not what it was dealt: they differ in micro-batch {wrong}"
            )
        self._hear_news()
        return self._indices(self._driver.post(MoreAsked()))

    def end_step(self) -> tuple[Tensor, float | None]:
        """Puts the reduced gradients in place; returns the losses of all micro-batches, (micro_batches,).

        And the sum of their weights, None if they have none.
        """
        gradients, assembly = self._parts()
        gradients.settle()
        self._let_optimizers_step(is_summed=True)
        made = gradients.shared()
        if (order := made.pop(_ORDER, None)) is not None:
            self._trainable.take_order(order)
        if self._buffers is not None:
            self._buffers.settle(made)
        self._replicas.end(is_compared=gradients.digests()[0] >= self.world_size // self._seats > 1)
        self._values.end_step()
        if why := self._inner_changes.end():
            self._tell_people(why)
        if self._is_reproducible and not self._has_told_compiled and compiled_graphs():
            self._has_told_compiled = True
            self._tell_people(_COMPILED)
        self._randomness.give_back()
        self.guard.is_reduced(self._trainable.trained)
        self.reports.begin_shares(assembly.world, (self.until, self.state))
        seats = 1 if gradients.weight is None else self._seats  # sums, of all, if they have weights
        return gradients.losses() * seats, None if gradients.weight is None else gradients.weight * seats

    def _let_optimizers_step(self, *, is_summed: bool) -> None:
        """Have those of a replica of shards step by gradients of all replicas, and by no others."""
        if self._mates is not None:
            self._mates.are_summed = is_summed

    def _of_all_seats(self, losses: Tensor, weight: float | None) -> tuple[Tensor, float | None]:
        """Return the means over the seats, as ``fully_shard`` has made it of their gradients.

        Raises WrongUseError if some have a weight and others have not.
        """
        if self._mates is None:
            return losses, weight
        weights = torch.tensor([0.0 if weight is None else weight, weight is not None], dtype=torch.float64)
        means = self._mates.mean(torch.cat([losses.double(), weights]))
        if 0 < means[-1] < 1:
            raise WrongUseError(
                "step.backward(loss, weight=...) got a weight on some ranks of this replica, and none on others"
            )
        return means[:-2].to(losses.dtype), float(means[-2]) if means[-1] else None

    def end_optimizer_step(self) -> None:
        """The script has made that of the present step."""
        self._driver.post(StepMade())
        record = self._driver.replica.record
        if isinstance(record, Stepping) and record.standing is Standing.EVEN and (news := self._regrouping.take()):
            self._membership.tell(news)

    # -- between steps ------------------------------------------------------------------------------------------------

    def mean(self, value: Tensor | complex) -> Tensor:
        """The mean of what all ranks have. Raises TypeError for what has none, and as ``_between_steps``."""
        found: Tensor = self._between_steps(MEAN, lambda: MeanShare.of(value, self._device))
        return found

    def all_reduce(self, value: Tensor | complex) -> Tensor:
        """The sum of what all ranks have. Raises TypeError for what has none, and as ``_between_steps``."""
        found: Tensor = self._between_steps(SUM, lambda: MeanShare.of(value, self._device, SUM))
        return found

    def broadcast_object(self, value: Any) -> Any:
        """What the first rank has. Raises TypeError for what cannot be sent, and as ``_between_steps``."""
        return self._between_steps(OBJECT, lambda: ObjectShare.of(value, self._device, self._mates))

    def _between_steps(self, call: str, share_of: Callable[[], MeanShare | ObjectShare]) -> Any:
        """What is made of the shares of all ranks; of those that are left, the same on all of them, if others are lost.

        Raises RuntimeError before the first call of run.steps(), and MismatchError if the ranks do not all ask for the
        same.
        """
        if self._gradients is None:
            raise WrongUseError(f"run.{call}() is for the ranks of run.steps(), and has to stand behind its first call")
        self.guard.check_outside(
            f"run.{call}() belongs between steps: within 'for index in step' ranks have different numbers of "
            "micro-batches; the mean loss of all is step.loss, behind the inner loop"
        )
        with torch.inference_mode(mode=False), torch.no_grad():  # the result may be sent later, outside of such a mode
            share = self._share = share_of()
            self.reports.begin(share.kind, share.numbers, call)
            self._found = None
            self._hear_news()
            command = self._driver.post(MeanAsked())
            is_own = isinstance(command, ReturnMean) and command.is_own
            found = None if is_own else self._found or self.reports.find()
            self.reports.end(found)
            if found is not None and self.rank == 0:
                self.reports.tell(self.steps_made)
            numbers = share.numbers if found is None else found[0]
            return share.given_back(numbers, self._mates)

    def _average(self) -> ReplicaEvent:
        """Sum the shares of all ranks."""
        _, assembly = self._parts()
        share, asks = self._share, self.reports.asks
        assert share is not None
        assert asks is not None
        result: list[Tensor] = []

        def average() -> None:
            messages = self._transport.all_gather(share.message(asks.label))
            check_same(messages)
            result.append(share.result(messages, self._transport))

        if broke := assembly.together(average, asks.label):
            return broke
        self._found = result[0], share.lacks(self.reports.lost(assembly.world))
        return Averaged()

    # -- the registered state -----------------------------------------------------------------------------------------

    def at_rest(self, state: dict[str, Any]) -> dict[str, Any]:
        """The model's state_dict as it was when the present step began, or as it is between steps."""
        return state if self._buffers is None else self._buffers.at_rest(state)

    def way(self) -> dict[str, Any]:
        """Return what the script has done on its way, in ``steps()`` or in a loop of its own."""
        return self._registered.way(is_in_steps=self.is_member)

    def why_not(self, way: Mapping[str, Any]) -> str:
        """Return why nobody can go on from here on this way; "" if one can."""
        return self._registered.why_not(way) if way else ""

    def take_groups(self, way: Mapping[str, Any]) -> None:
        """Gives optimizers the groups that they were given on this way."""
        if way:
            self._registered.take_groups(way)

    def take_way(self, way: Mapping[str, Any]) -> None:
        """Takes over all else that a script did on this way."""
        if way and (otherwise := self._registered.take_way(way)):
            self._tell_people(otherwise)

    def named_buffers(self) -> dict[str, Tensor]:
        """All buffers of the model, at rest as well."""
        return named_buffers(self._model) if self._buffers is None else self._buffers.named()

    # -- a call of run.steps() ----------------------------------------------------------------------------------------

    def join(self, until: int, counts: MicroBatchCounts) -> bool:
        """Becomes a member of the job, with the state of those who train already, if there are any.

        False for a newcomer that is to pass by the steps ``until`` this total, as the others have them behind them.
        Raises ValueError if this run has another number of micro-batches already, and TypeError for a SparseAdam.
        """
        self._values.begin()
        self._replicas.begin_training()
        before, self._counts, self._counted = self._counts, counts, None
        if self._gradients is None:
            self._make_parts(counts.number)
        elif why := counts.why_not_after(before):
            raise ValueError(why)
        if self._mates is not None:
            check_alike(self._model, self._mates)
        record = self._driver.replica.record
        if isinstance(record, Passing) and record.kept is not None:
            self._registered.load()  # the script may have changed what it had copied
        self._hear_news()
        self._randomness.take_seeds(None if self._mates is None else self._mates.share)
        command = self._driver.post(CallBegun(until))
        if not isinstance(record, Finished):
            if isinstance(command, LetGo) and command.is_over:
                return False
            self._registered.rewind()
        return True

    def _make_parts(self, micro_batches: int) -> None:
        self._have_shards()
        check_suitable(self._model, self._optimizers, self._mesh)
        check_sendable(self._registered)
        kind = TreeGradients if self._is_reproducible else Gradients
        self._buffers = Buffers(self._model, micro_batches, is_reproducible=self._is_reproducible)
        self._gradients = kind((), micro_batches, self._transport)
        self._gradients.name = self._trainable.name
        self._gradients.digest = self._digest
        self._gradients.of_all_seats = self._of_all_seats
        self._gradients.compare_counts = self._compare_counts if self._counts.are_by_step else None
        self._gradients.when_ready(self._begin_bucket)
        self._replicas.buffers = self._buffers
        self._assembly = Assembly(
            self._membership,
            self._transport,
            self._gradients,
            self.reports,
            signs=self._signs,
            timeout_s=self._timeout_s,
            has_own_groups=self._mates is not None,
        )
        self._assembly.on_connect = self._on_regroup
        self._assembly.tell_apart = self._trainable.tell_apart
        self._driver.begin(micro_batches)
        self._lay_out()
        others = self._objects.objects.values()
        self.guard = Guard(self._optimizers, self._scaler, others=others, tell=self._tell_people)
        if self._scaler is not None:  # which makes its scale when it is first asked, and a newcomer may not ask in time
            self._scaler.scale(torch.zeros((), device=self._device))

    def _tell_people(self, sentence: str) -> None:
        """Say it, on one rank."""
        if self.rank == 0:
            sys.stderr.write(f"unicron: {sentence}.\n")

    def part(self) -> None:
        """Stays until nobody needs this rank any more: another may have missed the end of the last reduction."""
        _, assembly = self._parts()
        self._let_optimizers_step(is_summed=False)
        self._load_again()
        self._have_shards()
        self._lay_out()
        self._hear_news()
        self._driver.post(CallEnded())
        count_as_step(0)
        if self._buffers is not None:
            self._buffers.end()
        self.reports.begin_shares(assembly.world, (self.until, self.state))

    # -- what the protocol decides ------------------------------------------------------------------------------------

    def _hear_news(self) -> None:
        """Take in the newest world, with all processes of this replica."""
        if self._unison is not None:
            self._unison.agree_on_news()

    def _have_shards(self) -> None:
        """Have the model its shards, where a forward pass without a backward pass has left whole parameters."""
        if self._mates is not None:
            reshard(self._model)

    def _act(self, command: ReplicaCommand) -> Iterable[Result]:
        """Do it; return how it ended, for all of this replica. Raises what the script is to be told."""
        _, assembly = self._parts()
        said = self._in_full(command.said, is_copy=command.is_copy) if isinstance(command, Say) else None
        results = self._carry_out(command, said)
        if self._unison is not None and isinstance(command, _WITH_OTHERS):
            results = self._unison.agree(results)
        if isinstance(command, TellReady):
            results = [self._joined()]
        if said is None:
            return results
        return [assembly.understand(said, each) if isinstance(each, TextsHeard) else each for each in results]

    def _break_too(self, how: ReplicaEvent) -> None:
        """Another process of this replica ended with that what this one has done: it has not, for the replica."""
        _, assembly = self._parts()
        assembly.break_too(how.why if isinstance(how, GroupBroke) else type(how).__name__)

    def _carry_out(self, command: ReplicaCommand, said: Said | None) -> Iterable[Result]:
        """Do it; return how it ended here. ``said``: what it is to say, in full.

        Raises what the script is to be told.
        """
        _, assembly = self._parts()
        match command:
            case Say(number=number):
                assert said is not None
                is_silent = self._mates is not None and not self._mates.is_lead
                return [assembly.say(number, said, is_silent=is_silent)]
            case MakeGroup():
                return [assembly.connect()]
            case HandOver(bucket=int(bucket), source=source, to=to):
                return [assembly.hand_over(bucket, source, to)]
            case HandOver(source=source, to=int(to)):
                return [assembly.hand_over_mean(source, to)]
            case MoveState():
                return [self._move_state(command)]
            case Reduce(buckets=buckets, is_awaited=is_awaited):
                holdings = self._driver.replica.work.holdings
                return assembly.reduce(self.state, buckets, holdings, is_awaited=is_awaited)
            case Gather(is_awaited=is_awaited):
                return [assembly.gather(self.until, is_awaited=is_awaited)]
            case Compare():
                return [self._find_who_differs()]
            case Average():
                return [self._average()]
            case Raise(kind=kind, reason=reason):
                raise _ERRORS.get(kind, RuntimeError)(reason)
            case AskAgent() | CopyState() | TellReady() | AwaitWorld() | AwaitHolders():
                return self._wait(command)
        self._note(command)
        return ()

    def _wait(self, command: ReplicaCommand) -> Iterable[Result]:
        _, assembly = self._parts()
        match command:
            case AskAgent(is_again=is_again):
                return [self._arrival.ask(is_again=is_again)]
            case CopyState():
                return [self._arrival.copy()]
            case TellReady():
                self._tell_ready()
                return [None]
            case AwaitWorld(is_patient=True):
                assembly.await_agreed()
                return [None]
            case AwaitWorld():
                return [assembly.await_newcomer(self._join_patience_s)]
        is_released = self._gate.wait_released(self._join_patience_s, lambda: not self._membership.is_left())
        return [None if is_released else PatienceOver()]

    def _note(self, command: ReplicaCommand) -> None:
        """Carry out what is done at once."""
        gradients, assembly = self._parts()
        match command:
            case Clear():
                gradients.begin(self._trainable.stamp(self.state))
                if self._buffers is not None:
                    self._buffers.begin()
                self._replicas.begin(self.state, is_last=self.state + 1 == self.until)
            case NoteMeeting(dealt=dealt):
                self._note_meeting(dealt)
            case ReleaseSource():
                self._arrival.release()
            case BreakOff():
                self._gate.on_expire()
            case TellBroke():
                assembly.tell_broken()
            case TellLeft():
                self._membership.tell(Left())
            case TellParted(number=number, total=total):
                self._membership.tell(Parted(world=number, total=total))
            case TellEntered():
                self._membership.enter()

    def _note_meeting(self, dealt: tuple[tuple[int, ...], ...]) -> None:
        """All members of this world are even now."""
        _, assembly = self._parts()
        replica = self._driver.replica
        self.reports.hear(assembly.said, (self.until, self.state))
        assert replica.met is not None
        if self._regrouping.meet(replica.met, self.state, len(replica.work.computed), dealt):
            self._replicas.meet()

    def _tell_ready(self) -> None:
        """Tell the agent that this newcomer waits for a world with it, and wait for that. Raises TimeoutError."""
        if self._arrival.tell_copied():
            self._replicas.copy()
            made_before(self.state)
        self._lay_out()
        self._membership.is_ready(self.state)

    def _joined(self) -> WorldHeard:
        """Return the world for which a newcomer has waited, which it may have heard of before it was ready."""
        newest = self._membership.newer_than(0)
        assert newest is not None
        world, rank = newest
        if rank is None:
            raise RuntimeError(f"this process is not a member any more: {world.reason}")
        return WorldHeard(world, rank)

    def _lay_out(self) -> None:
        """For the parameters that are trained now, unless it is so already."""
        gradients, assembly = self._parts()
        assert self._buffers is not None
        is_other = self._trainable.look()
        if is_other and self._mesh is not None:
            check_shards(self._model, self._mesh)
        if not self._buffers.look(self._trainable.modules) and not is_other and assembly.terms:
            return
        gradients.lay_out(self._trainable.in_order, self._trainable.frozen, self._buffers.changes)
        terms = self._trainable.terms(self._counts.kind, is_reproducible=self._is_reproducible)
        assembly.terms = terms if self._mates is None else f"{terms}, in {self._seats} shards"
        self._driver.lay_out(len(gradients.buckets))

    def _in_full(self, said: Said, *, is_copy: bool) -> Said:
        """What this rank says, and what it says of its state and its means, of which the protocol knows nothing."""
        if said.state is None and said.start is None:
            return said
        if said.start is not None:
            self._check_in_replica(said.start, lambda each: f"begins with step {each}")
        self._count_micro_batches()
        said = replace(said, micro_batches=self._driver.replica.micro_batches)
        if said.state is None:
            return said
        return replace(
            said,
            digests={} if said.is_between else self._digests(is_copy=is_copy),
            report=self.reports.last(),
            asks=self.reports.asks,
            place=self.reports.place,
            lost=self.reports.lost(self._driver.replica.met),
            trained=self._trainable.positions,
        )

    def _digests(self, *, is_copy: bool) -> Mapping[str, int]:
        """Those of what it has copied, or of what newcomers should have, who cannot be taken in between two steps."""
        met = self._driver.replica.met
        assert met is not None
        if self._mates is not None:  # each has its shards, and one speaks for all
            return {}
        return self._replicas.by_name() if is_copy or self._regrouping.is_anyone_new(met) else {}

    # -- states that differ -------------------------------------------------------------------------------------------

    def _digest(self) -> list[float]:
        """That of the state, for the notes."""
        return written(None if self.world_size == self._seats else self._replicas.digest())

    def _told_by_all(self) -> list[str] | Result:
        """What each replica tells of its state; or how the exchange ended, which the first process of it knows."""
        _, assembly = self._parts()
        if self._mates is None:
            return assembly.exchange(self._replicas.told().to_json())
        own = self._replicas.told_of_all(self._mates.share).to_json()
        heard = assembly.exchange(own) if self._mates.is_lead else None
        texts: list[str] = json.loads(self._mates.share(json.dumps(heard if isinstance(heard, list) else []))[0])
        return texts or heard

    def _find_who_differs(self) -> Result:
        """Compare all states; those go on who are most, without what the others have computed.

        Raises ReplicasDifferError in those, and where nobody knows who is right.
        """
        _, assembly = self._parts()
        mates, who = self._mates, "rank" if self._mates is None else "replica"
        told = self._told_by_all()
        if not isinstance(told, list):
            return told
        verdict = judge([Told.parse(each) for each in told], self.state, who)
        if not verdict.wrong:
            left_out = verdict.left_out if mates is None else in_place(verdict.left_out, mates.seat)
            self._replicas.accept(replace(verdict, left_out=left_out), is_silent=self.rank > 0)
            return Judged(WhoIsWrong.NOBODY)
        if assembly.rank in verdict.wrong:
            self._gate.on_expire()  # nobody is to have its state
            if verdict.is_unsent:
                raise NotTakenError(
                    f"{verdict.sentence}, which the script has changed in a step before this process came, and nobody "
                    "can send; by `if step.number >= ...` who comes later changes it, too. The others train on without"
                )
            is_odd = 2 * len(verdict.wrong) < self.world_size // self._seats
            kind = OddReplicaError if is_odd else ReplicasDifferError
            raise kind(f"{verdict.sentence}: this process must not train on")
        why = ReplicasDifferError(f"{verdict.sentence}, and nobody has taken its place")
        assembly.expect_next(DIFFERENT_GOES_S, why)
        return Judged(WhoIsWrong.OTHERS)

    # -- the state, in the group --------------------------------------------------------------------------------------

    def _move_state(self, command: MoveState) -> ReplicaEvent:
        """Gives the state to those who have none, or takes it: all or nothing, as this rank may be the next source.

        Raises what the run raises for a state that it cannot take over.
        """
        _, assembly = self._parts()
        unlike = self._unlike(command.source) if command.begins else []
        if isinstance(unlike, ReplicaEvent):
            return unlike
        received: list[Any] = []
        began = time.monotonic()
        try:
            broke = assembly.together(partial(self._transfer, command, unlike, received), "the state", is_work=True)
        except NotGivenError as error:
            self._arrival.is_refused(str(error))
            return StateRefused()
        if broke is not None:
            return broke
        if command.begins:
            self._take_first(command.source, unlike, received)
        elif received:
            self._take(received, time.monotonic() - began, command.source)
        return Moved()

    def _take_first(self, source: int, unlike: list[str], received: list[Any]) -> None:
        """Takes over the model that the source has, and what else was not the same everywhere."""
        _, assembly = self._parts()
        shared = received.pop()
        self._randomness.seeds.copy_(received.pop())
        copy_each(self._tensors(), received)
        if unlike and assembly.rank != source:
            self._some(unlike).load_state_dict(shared)
        made_before(assembly.said[source].start or 0)
        self._lay_out()

    def _take(self, received: list[Any], took_s: float, source: int) -> None:
        """Takes over the state of a member that trains."""
        _, assembly = self._parts()
        state, taken_bytes = received
        self._registered.load_state_dict(state)
        if not self._arrival.was_newcomer:  # all are in their first meeting still: no script has done anything since
            self._registered.forget()
        self._replicas.copy()
        assert assembly.world is not None
        node = assembly.world.members[source].node
        self._membership.tell(about_taken(taken_bytes, took_s, node))
        made_before(self.state)
        self._lay_out()

    def _unlike(self, source: int) -> list[str] | ReplicaEvent:
        """The names of what is registered, besides the model, and not everywhere what the ``source`` has, who says so.

        Or how the exchange ended.
        """
        _, assembly = self._parts()
        if self.world_size == 1:
            return []
        if self._mates is not None:  # one speaks for all: all take over all that the source has
            return [name for name in self._objects.objects if name != MODEL]
        heard = assembly.exchange(json.dumps(self._objects.digests()))
        if isinstance(heard, ReplicaEvent):
            return heard
        all_digests = [json.loads(each) for each in heard]
        unlike = [
            name for name, digest in all_digests[source].items() if any(e.get(name) != digest for e in all_digests)
        ]
        if (told := to_tell(unlike, self._objects.objects)) and assembly.rank == source:
            sys.stderr.write(f"unicron: {about_unlike(told, source)}.\n")
        return unlike

    def _transfer(self, command: MoveState, unlike: list[str], received: list[Any]) -> None:
        """Puts what this rank is to take into ``received``. Raises what a collective raises."""
        _, assembly = self._parts()
        source = command.source
        if command.begins:
            received += [tensor.clone(memory_format=torch.contiguous_format) for tensor in self._tensors()]
            received.append(self._randomness.seeds.to(self._device, copy=True))
            for tensor in received:
                self._transport.broadcast(tensor, source)
            some = self._some(unlike)
            is_source = assembly.rank == source
            received.append(
                share_state(some, self._transport, source, self._device, is_source=is_source) if unlike else None
            )
        elif assembly.rank == source:
            give_state(self._registered, self._transport, command.to, self._device)
        elif assembly.rank in command.to:
            received += receive_state(self._transport, source, self._device)

    def _some(self, names: Iterable[str]) -> Stateful:
        some = self._objects.some(names)
        return some if self._mates is None else InShards(some, self._model)

    def _tensors(self) -> list[Tensor]:
        return [
            local_of(tensor).detach() for tensor in (*self._model.parameters(), *named_buffers(self._model).values())
        ]

    @property
    def _mesh(self) -> DeviceMesh | None:
        """That over which the model is divided; None if each process has the whole of it."""
        return None if self._mates is None else self._mates.mesh

    @property
    def _device(self) -> torch.device:
        return device_of(self._model)

    def _parts(self) -> tuple[Gradients, Assembly]:
        assert self._gradients is not None
        assert self._assembly is not None
        return self._gradients, self._assembly
