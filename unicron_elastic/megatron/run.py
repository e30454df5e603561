"""What goes on in one process that trains with Megatron-Core: micro-batches, reductions, meetings in each new world.

A step is: forward and backward passes through this process's part of the model; the reduction of the gradients over all
replicas; what Megatron sums up over the members of a replica (embeddings, layer norms); and one sum over all ranks, of
the tokens, with which every rank knows that all have all gradients: the step is committed. What breaks before that is
made again with the members of the next world. After it, each replica makes its optimizer step by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unicron_elastic.faults.classify import classify
from unicron_elastic.faults.vocabulary import Failure, Severity
from unicron_elastic.megatron.agreement import Agreement, Said
from unicron_elastic.megatron.buckets import Buckets
from unicron_elastic.megatron.members import Members
from unicron_elastic.training.assembly import BROKEN
from unicron_elastic.training.joining import HasState, give_state, take_state
from unicron_elastic.worker.steps import made_before

__all__ = ["Call", "Run"]

Call = Callable[[list[int]], tuple[list[Any], int]]  # passes for these micro-batches: what they gave, and their tokens


class Run:
    """One process's part in the training. ``step`` counts the optimizer steps that its parameters have behind them.

    ``finish`` sums up the gradients over the members of a replica, once they are reduced; ``changes_reduced`` says
    whether it changes them. ``counts_tokens``: whether the tokens of this rank are those of its replica.
    """

    def __init__(
        self,
        *,
        members: Members,
        buckets: Buckets,
        state: HasState,
        finish: Callable[[], None],
        changes_reduced: bool,
        counts_tokens: bool,
        step: int,
        steps: int,
        micro_batches: int,
        device: torch.device,
    ) -> None:
        self._members = members
        self._buckets = buckets
        self._state = state
        self._finish_replica = finish
        self._changes_reduced = changes_reduced
        self._counts_tokens = counts_tokens
        self.step = step
        self._steps = steps
        self._micro_batches = micro_batches
        self._device = device
        self._held: frozenset[int] = frozenset()  # micro-batches of this step whose gradients are summed up
        self._assigned: frozenset[int] = frozenset()
        self._tokens = 0  # of those that are held
        self._all_tokens = 0  # of the step that was committed last
        self._is_committed = False
        self._is_spoiled = False  # the sums: passes broke on the way
        self._is_changed = False  # the reduced gradients
        self._must_meet = False
        self._has_state = True
        self._has_parted = False
        self._news: dict[str, Any] | None = None  # of a new world, to be told after the step
        if not members.begin():
            self._must_meet, self._has_state = True, False

    @property
    def is_over(self) -> bool:
        """Whether the last step is made."""
        return self._has_parted or self.step >= self._steps

    # -- a step -------------------------------------------------------------------------------------------------------

    def train(self, call: Call) -> list[Any]:
        """Passes and reductions of one step, until it is committed; returns what the passes of this rank gave.

        ``call`` is called again for micro-batches of lost replicas.
        """
        given: list[Any] = []
        self._clear()
        if not (self._must_meet or self._members.needs_meeting()):
            self._assigned = frozenset(range(self._members.number, self._micro_batches, self._members.replicas))
        while not (self._is_committed or self.is_over):
            if self._must_meet or self._members.needs_meeting():
                self._meet()
            elif to_do := sorted(self._assigned - self._held):
                self._attempt(partial(self._compute, call, to_do, given))
            else:
                self._attempt(self._reduce)
        return given

    @property
    def tokens(self) -> int:
        """Of all micro-batches of the step, when it is committed."""
        return self._all_tokens

    def _clear(self) -> None:
        self._buckets.begin()
        self._held = self._assigned = frozenset()
        self._tokens = 0
        self._is_committed = self._is_spoiled = self._is_changed = False

    def _compute(self, call: Call, indices: list[int], given: list[Any]) -> None:
        self._is_spoiled = True
        with self._members.computing():
            if self._held or self._buckets.done:
                with self._buckets.held_back():
                    found, tokens = call(indices)
            else:
                found, tokens = call(indices)
        self._is_spoiled = False
        given += found
        self._held |= frozenset(indices)
        self._tokens += tokens

    def _reduce(self) -> None:
        self._buckets.reduce()
        if self._changes_reduced:
            self._buckets.keep_reduced()
            self._is_changed = True
        self._finish_replica()
        tokens = torch.tensor([self._tokens if self._counts_tokens else 0], dtype=torch.int64, device=self._device)
        self._all_tokens = int(self._members.sum(tokens))
        self._is_committed = True

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
        while not self._attempt(lambda: made.append(make())):
            self._meet()
            if self.step != before:  # of others
                break
        else:
            self.step += 1
        self._is_committed = False
        self._held = frozenset()
        self._tokens = 0
        self._buckets.begin()
        self._members.drop_former()
        self._tell_news()
        if self.step >= self._steps:
            self._part()
        return made[0] if made else None

    def _tell_news(self) -> None:
        if self._news is not None and not self._must_meet:
            self._members.tell({"went_on": self._news})
            self._news = None

    def _part(self) -> None:
        """Stays until nobody needs this rank any more."""
        while True:
            if self._must_meet or self._members.needs_meeting():
                self._meet()
            elif self._attempt(lambda: self._members.part(torch.zeros(1, device=self._device))):
                break
        self._has_parted = True
        self._tell_news()
        self._members.tell({"parted": True})

    # -- the world ----------------------------------------------------------------------------------------------------

    def _meet(self) -> None:
        """Agrees with the members of the newest world on where they are, until all are even or this rank is late."""
        self._must_meet = True
        self._mend()
        while True:
            agreement = self._members.meet(self._said)
            if self._members.is_spare:
                if agreement.is_even and not self._wait_as_spare():
                    return
            elif agreement.advance:
                if self._members.index in agreement.advance:
                    self._is_committed, self._all_tokens = True, agreement.tokens
                    return
            elif agreement.pull:
                self._attempt(partial(self._give_or_take, agreement))
            elif self._attempt(partial(self._take_part, agreement)):
                break
            self._mend()
        self._must_meet = False

    def _mend(self) -> None:
        """Puts the gradients in order that a fault left in disorder."""
        if self._is_committed:
            return
        if self._is_changed:
            self._buckets.restore_reduced()
            self._is_changed = False
        self._buckets.restore()
        if self._is_spoiled:
            self._drop()

    def _drop(self) -> None:
        self._buckets.drop()
        self._held, self._tokens, self._is_spoiled = frozenset(), 0, False

    def _said(self) -> Said:
        return Said(
            seat=self._members.seat,
            replica=self._members.replica,
            state=self.step if self._has_state else None,
            buckets=self._buckets.count,
            held=self._held,
            done=frozenset(self._buckets.done),
            is_committed=self._is_committed,
            tokens=self._all_tokens,
        )

    def _take_part(self, agreement: Agreement) -> None:
        """All are in the same step: takes over what this rank is to do of it."""
        number = self._members.number
        if agreement.held[number] != self._held:
            self._drop()
        for seat, bucket, source in agreement.fill:
            if seat == self._members.seat:
                has_it = bucket in self._buckets.done
                transfer = partial(self._members.spread, source=source, takes=not has_it)
                self._buckets.fill(bucket, transfer, has_it=has_it)
        self._assigned = self._held | frozenset(agreement.dealt[number])
        self._hear_news(reused=len(self._held), recomputed=sum(map(len, agreement.dealt)) if self._held else 0)

    def _hear_news(self, *, reused: int, recomputed: int) -> None:
        world = self._members.world
        assert world is not None
        if world.number > 1:
            self._news = {
                "reused": self._news["reused"] if self._news else reused,
                "recomputed": recomputed,
                "world": world.number,
                "regrouped_ns": time.monotonic_ns(),
            }

    def _wait_as_spare(self) -> bool:
        """Until there is a newer world; false if the training is over."""
        self._clear()
        self._drop()
        self._must_meet = False
        self._hear_news(reused=0, recomputed=0)
        self._tell_news()
        self._must_meet = True
        if self._members.wait_as_spare():
            return True
        self._has_parted = True
        self._members.tell({"parted": True})
        return False

    def _give_or_take(self, agreement: Agreement) -> None:
        """Gives the state to those who have none, or takes it."""
        me = self._members.index
        for destination, source in zip(agreement.pull, agreement.sources, strict=True):
            if me == source:
                give_state(self._state, self._members, [destination], self._device)
            elif me == destination:
                take_state(self._state, self._members, source, self._device)
                self.step = agreement.step
                made_before(self.step)
                self._has_state = True
                self._clear()
                self._drop()


def _is_of_connections(error: BaseException) -> bool:
    """Whether it is about the connections between ranks, and not the script's own."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    failure = Failure(at=0.0, rank=0, local_rank=0, pid=0, exception_type=name, message=str(error))
    return classify(failure).severity is Severity.SEV3


def scaled(buffers: Sequence[Any], tokens: int, device: torch.device) -> None:
    """Divides gradients by the tokens of the step, as ``finalize_model_grads`` does (megatron-core 0.16.1)."""
    if tokens > 0:
        factor: Tensor = 1.0 / torch.tensor(tokens, dtype=torch.int, device=device)
        for buffer in buffers:
            buffer.scale_gradients(factor)
