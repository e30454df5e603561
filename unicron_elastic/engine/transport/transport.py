"""The connections of a run with the others of its world, whatever back end they are made of.

Nothing else in a run knows a back end, so that another one, or threads in tests, can be put in its place.
"""

from __future__ import annotations

import atexit
import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store, Work

from unicron_elastic.engine.transport.carrier import Carrier, DefaultGroup
from unicron_elastic.engine.transport.completion import Completion, UnderWay
from unicron_elastic.engine.transport.landing import marking_of
from unicron_elastic.engine.transport.references import count_references, wait_let_go
from unicron_elastic.engine.transport.waiter import AbandonedError, Patience, Waiter, keep_for_ever


class Transport:
    """`Transport` connects one process with the members of one world after another, and carries what they exchange.

    ``is_left`` tells that a newer world ends what goes on; ``patience`` is how long this rank waits for the others.
    ``carrier``: what the connections are made of; by default torch's default process group. All that a collective
    raises, also for another rank's loss, is raised where its result is waited for.
    """

    def __init__(
        self,
        backend: str,
        is_left: Callable[[], bool],
        patience: Patience | None = None,
        carrier: Carrier | None = None,
    ) -> None:
        self.is_connected = False
        self.is_broken = False  # this world's connections
        self._carrier = carrier or DefaultGroup(backend)
        self._marking = marking_of(backend)
        self._is_left = is_left
        self._patience = patience
        self._waiter = Waiter(lambda: self.is_broken or is_left(), looks_up="gloo" in backend, patience=patience)
        # Groups of earlier worlds. Who drops one waits for gloo's threads, some 20 ms, and holds the interpreter: none
        # of them may be waiting for it then, to let go of a tensor. So they have two more reductions' time.
        self._former: list[Any] = []
        self._retired: list[Any] = []
        self._gathered: list[tuple[list[Tensor], int]] = []  # the tensors of the latest, and how many refer to each
        atexit.register(_let_go, weakref.ref(self))

    @property
    def rank(self) -> int:
        """Return this one's in the group."""
        return self._carrier.rank

    @property
    def size(self) -> int:
        """Return how many members the group has."""
        return self._carrier.size

    @property
    def on_look(self) -> Callable[[], None]:
        """What is called at each look while it waits; what that raises ends the waiting."""
        return self._waiter.on_look

    @on_look.setter
    def on_look(self, call: Callable[[], None]) -> None:
        self._waiter.on_look = call

    # -- the world ----------------------------------------------------------------------------------------------------

    def connect(
        self, store: Store, rank: int, size: int, *, timeout_s: float, device: torch.device, is_fixed: bool
    ) -> None:
        """Connects with the members who meet in ``store``. Raises Superseded, or what torch raises.

        ``timeout_s`` is that of a collective. ``is_fixed``: no other world ever comes, and it has no other limit.
        """
        self.is_broken = False
        self._waiter.begin()
        self._carrier.connect(
            store,
            rank,
            size,
            timeout_s=timeout_s,
            is_left=self._is_left,
            patience=None if is_fixed else self._patience,
            device=device,
        )
        self.is_connected = True

    def leave(self) -> None:
        """Leaves this world's group, which is dropped two reductions later."""
        self.is_connected = False
        if (former := self._carrier.leave()) is not None:
            self._former.append(former)

    def retire(self) -> None:
        """A reduction has ended well: groups that were left before the one before it are dropped."""
        self._retired, self._former = self._former, []

    def give_up(self, error: Exception, begun: Iterable[UnderWay]) -> bool:
        """Waits for the end of what was ``begun`` in a world that broke with ``error``.

        False if something of it was abandoned and may write into its tensors for ever.
        """
        self.is_broken = True
        ended = [each.has_ended() for each in begun]
        if not isinstance(error, AbandonedError) and all(ended):
            return True
        if self.is_connected and (present := self._carrier.present) is not None:
            keep_for_ever(present)
        return False

    # -- collectives --------------------------------------------------------------------------------------------------

    def reduce(self, tensor: Tensor) -> Completion:
        """Begins to sum it over all members, in place."""
        return self._begun(self._carrier.all_reduce(tensor), tensor)

    def sum(self, tensor: Tensor) -> None:
        """Sum it over all members, in place. Raises what a collective raises."""
        self.reduce(tensor).wait()

    def share(self, tensor: Tensor, source: int) -> Completion:
        """Begins to give all members the bytes that ``source`` has."""
        return self._begun(self._carrier.broadcast(tensor, source), tensor)

    def exchange(self, came: Tensor, gone: Tensor, counts: Sequence[int], given: Sequence[int]) -> Completion:
        """Begins to give each member its part of ``gone``, of ``given`` elements, and to get ``counts`` from each."""
        return self._begun(self._carrier.all_to_all(came, gone, counts, given), came)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """What each member gives, by rank. Raises what a collective raises.

        Gloo ends a process whose collective of one kind meets one of another size, and no sum is gathered so: who
        calls a sum then only waits.
        """
        given = [torch.empty_like(tensor) for _ in range(self.size)]
        held = [[each] for each in (tensor, *given)]
        references = [count_references(each) for each in held]
        self._begun(self._carrier.all_gather(given, tensor), *given).wait()
        self._gathered = list(zip(held, references, strict=True))
        return given

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Gives all members what ``source`` has. Raises what a collective raises."""
        if tensor.numel():
            self.share(_bytes(tensor), source).wait()

    def send(self, tensor: Tensor, destination: int) -> None:
        """Send to one member. Raises what a collective raises."""
        if tensor.numel():
            self._waiter.wait_one_to_one(_there(self._carrier.send(_bytes(tensor), destination)))

    def receive(self, tensor: Tensor, source: int) -> None:
        """Receive from one member. Raises what a collective raises."""
        if tensor.numel():
            work = _there(self._carrier.receive(received := _bytes(tensor), source))
            self._waiter.wait_one_to_one(work)
            self._waiter.land(work, self._marking([received]))

    def _begun(self, work: Work | None, *tensors: Tensor) -> Completion:
        """Return the promise of what comes into these tensors."""
        return Completion(_there(work), self._waiter, self._marking, tensors)


def _let_go(transport: weakref.ref[Transport]) -> None:
    """Waits, where the script ends right behind it, until gloo's threads have let go of what was gathered last."""
    there = transport()
    if there is not None:
        gc.collect()  # a time-out that was looked into leaves a circle with the collective in it
        for held, references in there._gathered:
            wait_let_go(held, references)


def _there(work: Work | None) -> Work:
    """Return what torch gives to who is in the group."""
    assert work is not None
    return work


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as bytes: back ends do not take all types."""
    return tensor.view(-1).view(torch.uint8)
