"""What goes on inside a run: micro-batches, reductions, and meetings with the members of each new world."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unicron_elastic.base.world import NO_END, EndOfSteps
from unicron_elastic.compat.tensors import copy_each
from unicron_elastic.engine.protocol.agreement import Agreement
from unicron_elastic.engine.protocol.said import MismatchError, Said
from unicron_elastic.engine.protocol.tree import shares
from unicron_elastic.engine.transport.transport import Transport
from unicron_elastic.training.group.arrival import Arrival
from unicron_elastic.training.group.assembly import Assembly, OverError
from unicron_elastic.training.group.give_state import about_taken, give_state, receive_state, share_state
from unicron_elastic.training.group.handover import Handover
from unicron_elastic.training.group.membership import membership
from unicron_elastic.training.group.reports import Reports
from unicron_elastic.training.group.sendable import Stateful, check_sendable
from unicron_elastic.training.group.servant import NotGivenError, Servant
from unicron_elastic.training.group.signs import Effort, Signs
from unicron_elastic.training.mean import MeanShare, check_same, few, message
from unicron_elastic.training.registered import Registered, about_unlike
from unicron_elastic.training.replicas import Replicas
from unicron_elastic.training.snapshot.gate import StateGate
from unicron_elastic.training.step.buffers import Buffers, device_of, named_buffers
from unicron_elastic.training.step.comparison import ReplicasDifferError, Told, differ, judge, written
from unicron_elastic.training.step.gradients import Gradients
from unicron_elastic.training.step.guard import Guard
from unicron_elastic.training.step.module_values import ModuleValues
from unicron_elastic.training.step.randomness import Randomness
from unicron_elastic.training.step.suitable import check_suitable
from unicron_elastic.training.step.trainable import Trainable
from unicron_elastic.training.step.tree_gradients import TreeGradients
from unicron_elastic.worker.notices import Parted, WentOn
from unicron_elastic.worker.step_count import count_as_step, made_before

DIFFERENT_GOES_S = 120.0  # so long a rank whose state is wrong has to end


class MissedStepError(RuntimeError):
    """The others have made the step that this rank is in, and nobody has its gradients any more."""


class Engine:
    """One process's part in the training; ``state`` counts the optimizer steps that its parameters have behind them.

    A rank that must meet does nothing together with others before it has: at the beginning, in a new world, and after
    a step that the others had made already. ``until`` is the total of the steps that it is in.
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
    ) -> None:
        self.state = 0
        self._model = model
        self._trainable = Trainable(model)
        self._scaler = scaler
        self._objects = registered
        self._optimizers = [each for each in registered.objects.values() if isinstance(each, Optimizer)]
        modules = {name: each for name, each in registered.objects.items() if isinstance(each, nn.Module)}
        self._values = ModuleValues(modules)
        self._registered = Handover(
            state,
            self._trainable,
            self._values,
            self._optimizers,
            lambda: self.until,
            randomness=randomness,
            schedulers=[each for each in registered.objects.values() if isinstance(each, LRScheduler)],
        )
        self._randomness = randomness
        self._is_reproducible = is_reproducible
        self._timeout_s = timeout_s
        self._join_patience_s = join_patience_s
        self._on_regroup = on_regroup
        self._replicas = replicas
        self._judged_in = (0, 0)  # the step and world in which what the ranks told each other was found to be right
        self._gate = StateGate()
        self._membership = membership(
            Servant(self._registered, self._gate, lambda: (self.until, self.state)).serve, backend
        )
        self._arrival = Arrival(self._membership, self._registered)
        self._signs = Signs(timeout_s, Effort().look)
        self._transport = Transport(backend, self._membership.is_left, self._signs)
        self.until = 0
        self.reports = Reports()
        self._is_compared = True  # what it has copied while others computed, with what they have
        self._has_state = False  # whether others may rely on this rank's parameters
        self._must_meet = True
        self._is_late = False  # the others are one step ahead, or in the next call of run.steps(), and wait
        self._is_in_step = False  # that it has met the others in, and has not begun
        self._is_arriving = False  # so, as a newcomer
        self._has_begun = False  # the step that its state tells
        self._is_between = False  # two steps, and meets the others there
        self._has_parted = False
        self._held: set[int] = set()  # micro-batches of this step that this rank has computed or will
        self._computed: set[int] = set()
        self._news: WentOn | None = None  # of a new world, to be told after the step
        self._again: set[tuple[int, int]] = set()  # steps and micro-batches that the lost had, to be told with the news
        self._names: frozenset[str] = frozenset()  # of the members of the world in which it met last
        self._is_anyone_gone = False  # who was in the world before that
        self.guard = Guard()
        self._buffers: Buffers | None = None
        self._gradients: Gradients | None = None
        self._assembly: Assembly | None = None

    @property
    def is_member(self) -> bool:
        """Whether it trains step by step, and counts them itself."""
        return self._gradients is not None

    def has_made(self, total: int) -> bool:
        """Whether it has made so many steps, and all others know."""
        return self._has_parted and self.state >= total

    @property
    def begins(self) -> bool:
        """Whether no step has been made, nor was this rank given the state of others."""
        return self.state == 0 and not self._arrival.was_newcomer

    @property
    def steps_made(self) -> int:
        """How many optimizer steps the state has behind it, the one that the script makes now included."""
        return self.state + (self._has_begun and not self.guard.is_inside)

    @property
    def is_passing(self) -> bool:
        """Whether the others have the call of run.steps() behind them that this newcomer has just left."""
        return self._arrival.passes

    @property
    def rank(self) -> int:
        """Return the rank in the present world; behind all others while it passes them by."""
        if self.is_passing:
            return int(os.environ.get("WORLD_SIZE", "1"))
        if self._assembly is not None and self._assembly.world is not None:
            return self._assembly.rank
        return int(os.environ.get("RANK", "0"))  # as the launcher has it

    @property
    def world_size(self) -> int:
        """Return the size of the present world."""
        if self._assembly is not None and self._assembly.world is not None and not self.is_passing:
            return self._assembly.world_size
        return int(os.environ.get("WORLD_SIZE", "1")) + self.is_passing  # as the launcher has it

    # -- a step -------------------------------------------------------------------------------------------------------

    def note_yield(self) -> None:
        """The script is about to get the next step, in which a newcomer's does what it does itself."""
        self._registered.note_yield()

    def begin_step(self) -> list[int]:
        """The micro-batches with which this rank begins the step."""
        gradients, assembly = self._parts()
        self._values.begin_step()
        count_as_step(self.state + 1)
        self.guard.drop(self.state - 1, self._trainable.trained)
        self.guard.begin()
        if self._is_in_step:
            self._begin_where_the_others_are()
        else:
            self._lay_out()
            self._clear()
            if not self._must_meet:
                assembly.holdings = [frozenset(each) for each in shares(gradients.micro_batches, assembly.world_size)]
                self._held.update(assembly.holdings[assembly.rank])
        self.guard.look(self._trainable.parameters)
        self._has_begun = True
        self._randomness.keep()
        self._open()
        if not self._is_late and (self._must_meet or assembly.needs_meeting()):
            self._meet()
            self._open()
        return sorted(self._held)

    def _open(self) -> None:
        """Lets others copy the state: the script has asked for the first micro-batch, and changes nothing from now on.

        Nobody else may open it. What the script changes between two steps belongs to the state behind it, whoever
        meets whom meanwhile.
        """
        if self._has_state:
            self._gate.begin(self.state)

    def _begin_where_the_others_are(self) -> None:
        """Begins the step in which it has met the others already: what is held and reduced stays."""
        gradients, _ = self._parts()
        self._is_in_step = self._is_arriving = False
        self._registered.load_again()
        self._lay_out()
        gradients.clear(self._trainable.stamp(self.state))
        if self._buffers is not None:
            self._buffers.begin()
        self._replicas.begin(self.state, is_last=self.state + 1 == self.until)

    def begin_micro_batch(self, index: int) -> None:
        """Right before the script computes it."""
        self._randomness.seed(self.state, index)
        if self._buffers is not None:
            self._buffers.begin_micro_batch()

    def backward(self, index: int, loss: Tensor) -> None:
        """Adds the gradients of a micro-batch."""
        gradients, _ = self._parts()
        gradients.check()
        self.guard.backward(loss / gradients.micro_batches)
        self._take_buffers(index)
        gradients.add(index, loss.detach())
        self._computed.add(index)

    def _take_buffers(self, index: int) -> None:
        """What a micro-batch has made of them."""
        gradients, _ = self._parts()
        if self._buffers is not None:
            self._buffers.end_micro_batch()
            if index == 0:
                gradients.made = self._buffers.made(self._device)

    def reduce(self) -> list[int] | None:
        """Reduces the gradients. None when that is complete, else more micro-batches that this rank is to compute."""
        gradients, assembly = self._parts()
        self.guard.check()
        gradients.check_places()
        if self._held != self._computed:
            wrong = ", ".join(map(str, sorted(self._held ^ self._computed)))
            raise RuntimeError(
                f"what this rank has computed is not what it was dealt: they differ in micro-batch {wrong}"
            )
        while True:
            if self._is_late:
                self._gate.end(self._join_patience_s, lambda: True)
                return None
            if self._must_meet or assembly.needs_meeting():
                self._meet()
                if to_do := sorted(self._held - self._computed):
                    return to_do
            elif not gradients.is_complete:
                is_copied = self._gate.close()
                assembly.reduce(self.state, is_awaited=is_copied or self._membership.is_newer())
            elif self._is_different():
                self._find_who_differs()
            elif self._may_leave(gradients.any_awaited()):
                return None

    def _digest(self) -> list[float]:
        """That of the state, for the notes."""
        return written(None if self.world_size == 1 else self._replicas.digest())

    def _is_different(self) -> bool:
        """Whether the ranks have said that their states differ, and have not found that they may."""
        gradients, assembly = self._parts()
        is_judged = assembly.world is not None and self._judged_in == (self.state, assembly.world.number)
        return not is_judged and differ(gradients.digests())

    def _find_who_differs(self) -> None:
        """Compare all states; those go on who are most, without what the others have computed.

        Raises ReplicasDifferError in those, and where nobody knows who is right.
        """
        gradients, assembly = self._parts()
        told = assembly.exchange(self._replicas.told().to_json())
        verdict = None if told is None else judge([Told.parse(each) for each in told], self.state)
        if verdict is not None and not verdict.wrong:
            assert assembly.world is not None
            self._judged_in = (self.state, assembly.world.number)
            self._replicas.accept(verdict, is_silent=assembly.rank > 0)
            return
        gradients.forget_reduced()
        self._must_meet = True
        if verdict is None:
            return
        if assembly.rank in verdict.wrong:
            self._gate.end(0.0, lambda: True)  # nobody is to have its state
            raise ReplicasDifferError(f"{verdict.sentence}: this process must not train on")
        if not self._membership.wait_for_agreed(DIFFERENT_GOES_S):
            raise ReplicasDifferError(f"{verdict.sentence}, and nobody has taken its place")

    def end_step(self) -> Tensor:
        """Puts the reduced gradients in place; returns the losses of all micro-batches, (micro_batches,)."""
        gradients, _ = self._parts()
        gradients.settle()
        if self._buffers is not None:
            self._buffers.settle(gradients.shared())
        self._replicas.end(is_compared=gradients.digests()[0] >= self.world_size > 1)
        self._values.end_step()
        self._randomness.give_back()
        self.guard.is_reduced(self._trainable.trained)
        self.reports.begin_shares(self._parts()[1].world, (self.until, self.state))
        return gradients.losses()

    def end_optimizer_step(self, number: int) -> None:
        """The script has made that of step ``number``."""
        self.state, self._has_begun = number + 1, False
        if self._news is not None and not self._must_meet:
            self._membership.tell(self._news)
            self._news = None
            self._again.clear()

    def _may_leave(self, is_anyone_awaited: bool) -> bool:
        """Waits for newcomers, if any rank has told all others of one; false if all are to meet now."""
        patience_s = self._join_patience_s
        if is_anyone_awaited:
            patience_s = 0.0
            if self._membership.wait_for_newer(self._join_patience_s):
                self._must_meet = True
                return False
        return self._gate.end(patience_s, lambda: not self._membership.is_left())

    def _lay_out(self) -> None:
        """For the parameters that are trained now, unless it is so already."""
        gradients, assembly = self._parts()
        assert self._buffers is not None
        is_other = self._trainable.look()
        if not self._buffers.look(self._trainable.modules) and not is_other and assembly.terms:
            return
        gradients.lay_out(self._trainable.trained, self._trainable.frozen, self._buffers.changes)
        assembly.terms = self._trainable.terms(gradients.micro_batches, is_reproducible=self._is_reproducible)

    def _clear(self) -> None:
        """Nothing of the step that begins is done."""
        gradients, _ = self._parts()
        gradients.begin(self._trainable.stamp(self.state))
        self._is_late = False
        self._held.clear()
        self._computed.clear()
        if self._buffers is not None:
            self._buffers.begin()
        self._replicas.begin(self.state, is_last=self.state + 1 == self.until)

    def mean(self, value: Tensor | complex) -> Tensor:
        """The mean of what all ranks have; of those that are left, the same on all of them, if others are lost.

        Raises RuntimeError before the first call of run.steps(), MismatchError if the ranks do not all ask for the
        same, and TypeError for what has no mean.
        """
        if self._gradients is None:
            raise RuntimeError("run.mean() is for the ranks of run.steps(), and has to stand behind its first call")
        self.guard.check_outside(
            "run.mean() belongs between steps: within 'for index in step' ranks have different numbers of "
            "micro-batches; the mean loss of all is step.loss, behind the inner loop"
        )
        with torch.inference_mode(mode=False), torch.no_grad():  # the result may be sent later, outside of such a mode
            share = MeanShare.of(value, self._device)
            if self._is_elsewhere:
                self.reports.is_partial = True
                return share.given_back(share.numbers)
            self.reports.begin(share.kind, share.numbers)
            found = self._mean(share)
            self.reports.end(found)
            if found is None:
                return share.given_back(share.numbers)
            if self.rank == 0:
                self.reports.tell(self.steps_made)
            return share.given_back(found[0])

    def _mean(self, share: MeanShare) -> tuple[Tensor, Iterable[int]] | None:
        """The mean, and which ranks' values it lacks; None if the others are elsewhere."""
        found = self._reduced(share)
        while found is None and not self._is_late:
            try:
                self._meet_between()
            except OverError:
                if not self._has_parted:
                    raise
                break  # behind the last step the others have made this reduction and ended
            found = self.reports.find()
            if found is None and self._have_others_begun():
                break
            found = found or self._reduced(share)
        return found

    @property
    def _is_elsewhere(self) -> bool:
        """Whether the others do not do now what the script does here: it comes to them, or is late."""
        return self.is_passing or self._is_arriving or self._is_late or self._have_others_begun()

    def _have_others_begun(self) -> bool:
        """Whether others are in the step before which this rank is, as they were late: they do not reduce this."""
        _, assembly = self._parts()
        where = (self.until, self.state)
        others = [each for each in assembly.said if (each.until, each.state) == where and not each.is_between]
        return bool(others) and not self._has_begun and not self._has_parted

    def _reduced(self, share: MeanShare) -> tuple[Tensor, Iterable[int]] | None:
        """The mean, and which ranks' values it lacks; None if the members have to meet first."""
        _, assembly = self._parts()
        if self._must_meet or assembly.needs_meeting():
            return None
        asks, result = self.reports.asks, list[Tensor]()
        assert asks is not None

        def reduce() -> None:
            messages = self._transport.all_gather(share.message(asks.label))
            check_same(messages)
            result.append(share.mean(messages, self._transport.sum))

        if not assembly.together(reduce, asks.label):
            return None
        return result[0], self.reports.lost(assembly.world)

    def _meet_between(self) -> None:
        """Meets the members of a new world between two steps; others may be in the next one already."""
        is_before = not self._has_begun and not self._has_parted
        if is_before and not self._is_in_step:
            self._lay_out()
            self._clear()
        self._is_between = True
        try:
            self._meet()
        finally:
            self._is_between = False
        if is_before:
            self._is_in_step = True

    def at_rest(self, state: dict[str, Any]) -> dict[str, Any]:
        """The model's state_dict as it was when the present step began, or as it is between steps."""
        return state if self._buffers is None else self._buffers.at_rest(state)

    def way(self) -> dict[str, Any]:
        """Return what the script has done on its way, in ``steps()``; nothing before."""
        return self._registered.way() if self.is_member else {}

    def take_groups(self, way: Mapping[str, Any]) -> None:
        """Gives optimizers the groups that they were given on this way."""
        if way:
            self._registered.take_groups(way)

    def take_way(self, way: Mapping[str, Any]) -> None:
        """Takes over all else that a script did on this way."""
        if way and (otherwise := self._registered.take_way(way)):
            self._tell_people(
                "run.restore() leaves it to the script which parameters are trained, and the one that saved "
                f"{otherwise}"
            )

    def named_buffers(self) -> dict[str, Tensor]:
        """All buffers of the model, at rest as well."""
        return named_buffers(self._model) if self._buffers is None else self._buffers.named()

    # -- the world ----------------------------------------------------------------------------------------------------

    def join(self, until: int, micro_batches: int) -> bool:
        """Becomes a member of the job, with the state of those who train already, if there are any.

        False for a newcomer that is to pass by the steps ``until`` this total, as the others have them behind them.
        Raises ValueError if this run has another number of micro-batches already, and TypeError for a SparseAdam.
        """
        self._values.begin()
        if self._gradients is None:
            self._make_parts(micro_batches)
        elif (was := self._gradients.micro_batches) != micro_batches:
            raise ValueError(f"all steps of a run have the same number of micro-batches: {was}, not {micro_batches}")
        elif not self._arrival.is_newcomer:
            self.until = until
            self._enter_again()
            return True
        self.until = until
        if self._arrival.come(self, until):
            if not self._is_in_step:  # all have the same from here on: a script may evaluate before its first step
                self._meet_between()
            self._registered.rewind()
            return True
        self.state = until  # as the others have it behind them: the script may count from there
        return False

    def _make_parts(self, micro_batches: int) -> None:
        check_suitable(self._model, self._optimizers)
        check_sendable(self._registered)
        kind = TreeGradients if self._is_reproducible else Gradients
        self._buffers = Buffers(self._model, micro_batches, is_reproducible=self._is_reproducible)
        self._gradients = kind((), micro_batches, self._transport)
        self._gradients.name = self._trainable.name
        self._gradients.digest = self._digest
        self._replicas.buffers = self._buffers
        self._assembly = Assembly(
            self._membership,
            self._transport,
            self._gradients,
            self.reports,
            signs=self._signs,
            timeout_s=self._timeout_s,
        )
        self._assembly.on_connect = self._on_regroup
        self._assembly.tell_apart = self._trainable.tell_apart
        self._lay_out()
        others = self._objects.objects.values()
        self.guard = Guard(self._optimizers, self._scaler, others=others, tell=self._tell_people)
        if self._scaler is not None:  # which makes its scale when it is first asked, and a newcomer may not ask in time
            self._scaler.scale(torch.zeros((), device=self._device))

    def _tell_people(self, sentence: str) -> None:
        """Say it, on one rank."""
        if self.rank == 0:
            sys.stderr.write(f"unicron: {sentence}.\n")

    def has_taken(self) -> None:
        """Note that it has copied the state of a member."""
        self._has_state, self._is_compared = True, False
        self._replicas.copy()
        made_before(self.state)

    def forget(self) -> None:
        """What it has copied is of no use where its script is."""
        self._has_state, self.state = False, 0

    def come_in(self) -> tuple[int, int] | None:
        """Meets the others, as a newcomer, in the step that they are in; None if it is with them.

        Else they go on without it, and are in the steps until this total, in this one.
        """
        _, assembly = self._parts()
        self._lay_out()
        self._clear()
        try:
            left = self._meet()
        except NotGivenError as error:
            self._arrival.is_refused(str(error))
            assembly.leave()
            return max((each.until, each.state) for each in assembly.said if each.state is not None)
        if left is None:
            self._is_in_step = self._is_arriving = True
            return None
        assembly.leave()
        return left.until, left.step

    def _enter_again(self) -> None:
        """A script may go on after the last step, with more of them."""
        if self._has_parted:
            self._has_parted = False
            self._membership.enter()

    def part(self) -> None:
        """Stays until nobody needs this rank any more: another may have missed the end of the last reduction."""
        _, assembly = self._parts()
        if self._is_in_step:
            self._begin_where_the_others_are()
        self._clear()
        end = f"the end of run.steps(total={self.until})"
        awaited: list[bool] = []
        while not assembly.is_over():  # else all have come here, and some have missed the end
            if self._must_meet or assembly.needs_meeting():
                with contextlib.suppress(OverError):
                    self._meet()
                if self._is_late or any(each.has_parted and each.until == self.until for each in assembly.said):
                    break
                continue
            assert assembly.world is not None
            assembly.parts_in = EndOfSteps(assembly.world.number, self.until)
            gather = partial(self._gather_end, end, self._membership.is_newer(), awaited)
            if assembly.together(gather, end) and self._may_leave(any(awaited)):
                break
        assembly.parts_in = NO_END
        count_as_step(0)
        self._has_begun = False
        if self._buffers is not None:
            self._buffers.end()
        self._has_parted = True
        self.reports.begin_shares(assembly.world, (self.until, self.state))
        assert assembly.world is not None
        self._membership.tell(Parted(world=assembly.world.number, total=self.until))

    def _gather_end(self, end: str, is_awaited: bool, awaited: list[bool]) -> None:
        """Says that it is at the ``end``, and whether a newcomer is ``awaited``, and hears the same of all."""
        told = self._transport.all_gather(
            message(end, torch.tensor([is_awaited], dtype=torch.float64, device=self._device))
        )
        check_same(told)
        awaited[:] = [bool(few(each, 1) > 0) for each in told]

    def _meet(self) -> Agreement | None:
        """Agrees with the members of the newest world on where they are, until all are even or this rank is late.

        It is late if the others made the step already in which it was interrupted: then it has the gradients of that
        step now, and meets them again after it. Returns the agreement by which this newcomer is to leave, if it is.
        """
        gradients, assembly = self._parts()
        self._must_meet = True
        agreement = assembly.meet(self._said, is_new=self._arrival.is_newcomer)
        gradients.forget_awaited()
        while not agreement.is_even:
            if assembly.rank in agreement.leave:
                return agreement
            if assembly.rank in agreement.advance:
                self._check_call(agreement)
                self._is_late = True
                return None
            if agreement.pull:
                self._give_or_take(agreement)
            agreement = assembly.meet(self._said)
        self._must_meet, self._is_compared = False, True
        self.reports.hear(assembly.said, (self.until, self.state))
        dealt = agreement.dealt[assembly.rank]
        self._held.update(dealt)
        assembly.holdings = [
            before | frozenset(more) for before, more in zip(assembly.holdings, agreement.dealt, strict=True)
        ]
        assert assembly.world is not None
        names = frozenset(member.name for member in assembly.world.members)
        if names - self._names:
            self._replicas.meet()
        if names != self._names:
            self._names, self._is_anyone_gone = names, bool(self._names - names)
        if assembly.world.number > 1:
            if self._computed and self._is_anyone_gone:  # else the step had not begun, or it is a newcomer's share
                self._again.update((self.state, index) for each in agreement.dealt for index in each)
            self._news = WentOn(
                reused=self._news.reused if self._news else len(self._computed),
                recomputed=len(self._again),
                world=assembly.world.number,
                regrouped_ns=time.monotonic_ns(),
            )
        return None

    def _check_call(self, agreement: Agreement) -> None:
        """Raises MismatchError if the others are in other steps than these, though these are not made."""
        if agreement.until != self.until and self.state < self.until:
            raise MismatchError(
                f"this rank is in step {self.state} of {self.until}, and others train until {agreement.until}: all "
                "ranks must call run.steps() with the same totals"
            )

    def _said(self) -> Said:
        gradients, assembly = self._parts()
        is_new = self._arrival.is_newcomer
        if not self._has_state:
            return Said(state=None, start=None if is_new else self.state, until=self.until, is_new=is_new)
        return Said(
            until=self.until,
            has_parted=self._has_parted,
            is_new=is_new,
            is_between=self._is_between,
            digests=self._digests(),
            report=self.reports.last(),
            asks=self.reports.asks,
            place=self.reports.place,
            lost=self.reports.lost(assembly.world),
            state=self.state,
            held=frozenset(self._held),
            done=frozenset(gradients.done),
            keeps_last=gradients.has_last,
            trained=self._trainable.positions,
            buckets=len(gradients.buckets),
        )

    def _digests(self) -> Mapping[str, int]:
        """Those of what it has copied, or of what newcomers should have, who cannot be taken in between two steps."""
        _, assembly = self._parts()
        members = () if assembly.world is None else assembly.world.members
        is_anyone_new = bool(self._names) and any(each.name not in self._names for each in members)
        if self._is_between or (self._is_compared and not is_anyone_new):
            return {}
        return self._replicas.by_name()

    def _give_or_take(self, agreement: Agreement) -> None:
        """Gives the state to those who have none, or takes it: all or nothing, as this rank may be the next source.

        Raises what the run raises for a state that it cannot take over.
        """
        _, assembly = self._parts()
        is_here = self._has_state and not self._arrival.is_newcomer
        if is_here and assembly.rank in agreement.pull and not agreement.begins:
            raise MissedStepError(
                f"the others have made step {self.state} while this rank was cut off from them, and nobody has its "
                "gradients any more: this rank begins again, with their state"
            )
        unlike = self._unlike(agreement.sources[0]) if agreement.begins else []
        if unlike is None:
            return
        received: list[Any] = []
        began = time.monotonic()
        if not assembly.together(partial(self._transfer, agreement, unlike, received), "the state", is_work=True):
            return
        if agreement.begins:
            shared = received.pop()
            copy_each(self._tensors(), received)
            if unlike and assembly.rank != agreement.sources[0]:
                self._objects.some(unlike).load_state_dict(shared)
            self.state = agreement.step
        elif not received:
            return
        else:
            state, taken_bytes = received
            self._is_compared = True
            self._registered.load_state_dict(state)
            if not self._arrival.is_newcomer:  # all are in their first meeting still: no script has done anything since
                self._registered.forget()
            self._replicas.copy()
            assert assembly.world is not None
            node = assembly.world.members[agreement.sources[0]].node
            self._membership.tell(about_taken(taken_bytes, time.monotonic() - began, node))
        made_before(self.state)
        self._has_state = True
        self._lay_out()
        self._clear()

    def _unlike(self, source: int) -> list[str] | None:
        """The names of what is registered, besides the model, and not everywhere what the ``source`` has, who says so.

        None if the world broke.
        """
        _, assembly = self._parts()
        if self.world_size == 1:
            return []
        heard = assembly.exchange(json.dumps(self._objects.digests()))
        if heard is None:
            return None
        all_digests = [json.loads(each) for each in heard]
        unlike = [
            name for name, digest in all_digests[source].items() if any(e.get(name) != digest for e in all_digests)
        ]
        if unlike and assembly.rank == source:
            sys.stderr.write(f"unicron: {about_unlike(unlike, source)}.\n")
        return unlike

    def _transfer(self, agreement: Agreement, unlike: list[str], received: list[Any]) -> None:
        """Puts what this rank is to take into ``received``. Raises what a collective raises."""
        _, assembly = self._parts()
        source = agreement.sources[0]
        if agreement.begins:
            received += [tensor.clone(memory_format=torch.contiguous_format) for tensor in self._tensors()]
            for tensor in received:
                self._transport.broadcast(tensor, source)
            some = self._objects.some(unlike)
            is_source = assembly.rank == source
            received.append(
                share_state(some, self._transport, source, self._device, is_source=is_source) if unlike else None
            )
        elif assembly.rank == source:
            give_state(self._registered, self._transport, agreement.pull, self._device)
        elif assembly.rank in agreement.pull:
            received += receive_state(self._transport, source, self._device)

    def _tensors(self) -> list[Tensor]:
        return [tensor.detach() for tensor in (*self._model.parameters(), *named_buffers(self._model).values())]

    @property
    def _device(self) -> torch.device:
        return device_of(self._model)

    def _parts(self) -> tuple[Gradients, Assembly]:
        assert self._gradients is not None
        assert self._assembly is not None
        return self._gradients, self._assembly
