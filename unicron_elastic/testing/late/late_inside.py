"""The inside of a process group whose collectives end later than they say, as NCCL's do. What they send, gloo sends."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import Store, Work

from unicron_elastic.compat.collectives.python_group import COLLECTIVES
from unicron_elastic.compat.dispatch import leaves
from unicron_elastic.engine.group.gloo_inside import GlooInside
from unicron_elastic.testing.late.late_event import Fate, LateEvent, lateness, pending, unseen

LOOK_S = 0.0005
LIMIT_S = 30.0
TORN_S = 0.2  # so long an abort waits for the result of which it leaves a part
# These change the tensors that they are begun with; others fill some, and read others.
IN_PLACE = frozenset(["allreduce", "allreduce_coalesced", "broadcast", "reduce", "recv"])
HAS_OWN_STREAM = frozenset(["send", "recv"])  # as NCCL has for each pair of ranks

_insides: weakref.WeakSet[LateInside] = weakref.WeakSet()


class Flight(NamedTuple):
    """A `Flight` is one collective on its way: ``begin`` starts gloo's, into ``shadows`` of the ``tensors``."""

    event: LateEvent
    begin: Callable[[], Any]
    tensors: list[Tensor]
    shadows: list[Tensor]


class LateWork(Work):  # type: ignore[misc]
    """A `LateWork` says at once that it is done, as NCCL's ``wait`` does: only what follows on the stream waits."""

    def __init__(self, event: LateEvent, tensors: list[Tensor]) -> None:
        super().__init__()
        self.event = event
        self._tensors = tensors

    def wait(self, *_: Any, **__: Any) -> bool:
        """Return at once, but where nobody has what follows wait."""
        if unseen.depth:
            self.event.synchronize()
        return True

    def synchronize(self) -> None:
        """Return at once, as where the stream waits and the host does not."""

    def is_completed(self) -> bool:
        """Return whether it has ended, which an abort also does."""
        return self.event.query()

    def exception(self) -> Exception | None:
        """Return why it failed, as NCCL's watchdog notes it; of an abort nothing is known."""
        return RuntimeError("the collective has failed") if self.event.fate is Fate.FAILED else None

    def is_success(self) -> bool:
        """Return whether its result has come."""
        return self.event.fate is Fate.LANDED

    def get_future(self) -> Any:
        """Return one that is done, as one of CUDA tensors is."""
        future: Any = torch.futures.Future()
        future.set_result(self._tensors)
        return future

    def result(self) -> list[Tensor]:
        """Return the tensors, whatever is in them by now."""
        return self._tensors


class LateInside:
    """A `LateInside` runs collectives in order, on a thread that stands for a stream, and abandons them silently.

    Its making blocks as long as ``lateness`` says, and cannot be broken off, like that of a communicator.
    """

    kind = "late"
    looks_up = False

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        time.sleep(lateness.init_s)
        self._inner = GlooInside(store, rank, size, timeout)
        self._flights: queue.SimpleQueue[Flight | None] = queue.SimpleQueue()
        self._abort = threading.Event()
        self.begun = self.ended = 0
        self.has_failed = False
        threading.Thread(target=self._stream, name="unicron-late", daemon=True).start()
        _insides.add(self)

    def call_itself(self, name: str, ranks: Sequence[int]) -> None:
        """Have what gloo sends recorded under the name of a group."""
        self._inner.call_itself(name, ranks)

    def sequence_number(self) -> int:
        """Return how many collectives were begun."""
        return self.begun

    # -- how it ends --------------------------------------------------------------------------------------------------

    def break_off(self) -> None:
        """Abandon what is under way, without a word: tensors keep what is in them, and no wait raises."""
        self._abort.set()
        if lateness.is_torn:  # for which there must be a result, if the others come
            timer = threading.Timer(TORN_S, self._inner.break_off)
            timer.daemon = True
            timer.start()
        else:
            self._inner.break_off()

    @property
    def is_aborted(self) -> bool:
        """Return whether it was abandoned."""
        return self._abort.is_set()

    def shutdown(self) -> None:
        """Abandon what is under way, and end the stream."""
        self._abort.set()
        self._flights.put(None)

    # -- collectives --------------------------------------------------------------------------------------------------

    def carry(self, name: str, *arguments: Any) -> Work:
        """Begin gloo's ``name``. Inputs are read now and never again; outputs are spoiled now and filled late."""
        count = 1 if name in IN_PLACE else 2
        filled, handed, rest = arguments[0], arguments[:count], arguments[count:]
        tensors = [each for each in leaves(filled) if isinstance(each, Tensor)]
        copies = {id(each): each.detach().clone() for each in leaves(handed) if isinstance(each, Tensor)}
        shadows = [copies[id(each)] for each in tensors]
        event = LateEvent()
        for each in tensors:
            lateness.spoil(each.detach())
        for each in tensors:  # not before all are spoiled: some may be parts of the same memory
            pending[each.untyped_storage().data_ptr()] = event
        given = [_swapped(each, copies) for each in handed]
        return self._begin(name, Flight(event, lambda: getattr(self._inner, name)(*given, *rest), tensors, shadows))

    def barrier(self, *_: Any, **__: Any) -> Work:
        """Begin a sum of nothing."""
        return self.carry("allreduce", [torch.zeros(1)])

    def send(self, tensors: Sequence[Tensor], destination: int, tag: int = 0) -> Work:
        """Begin to send what is there now."""
        copies = [each.detach().clone() for each in tensors]
        return self._begin("send", Flight(LateEvent(), lambda: self._inner.send(copies, destination, tag), [], []))

    def recv_anysource(self, *_: Any) -> Work:
        """Refuse it, as NCCL does."""
        raise NotImplementedError("a tensor cannot be received from any rank: name one")

    # -- the stream ---------------------------------------------------------------------------------------------------

    def _begin(self, name: str, flight: Flight) -> Work:
        """Put it behind the others, if it has no stream of its own."""
        self.begun += 1
        if name in HAS_OWN_STREAM:
            threading.Thread(target=self._fly, args=(flight,), name="unicron-late", daemon=True).start()
        else:
            self._flights.put(flight)
        if lateness.is_next_aborted():
            self.break_off()
        return LateWork(flight.event, flight.tensors)

    def _stream(self) -> None:
        while (flight := self._flights.get()) is not None:
            self._fly(flight)

    def _fly(self, flight: Flight) -> None:
        fate = Fate.FAILED
        try:
            fate = self._land(flight)
        except Exception:
            fate = Fate.ABORTED if self._abort.is_set() else Fate.FAILED
            self.has_failed = True
        finally:
            self.ended += 1
            flight.event.end(fate)

    def _land(self, flight: Flight) -> Fate:
        if self._abort.is_set() and not lateness.is_torn:
            return Fate.ABORTED
        flight.begin().wait()
        time.sleep(max(0.0, flight.event.begun_at + lateness.delay_s - time.monotonic()))
        with torch.no_grad():
            for tensor, shadow in zip(flight.tensors, flight.shadows, strict=True):
                if self._abort.is_set():
                    lateness.tear(tensor.detach(), shadow)
                else:
                    tensor.detach().copy_(shadow)
        return Fate.ABORTED if self._abort.is_set() else Fate.LANDED


def _carrying(name: str) -> Callable[..., Work]:
    def begin(self: LateInside, *arguments: Any) -> Work:
        return self.carry(name, *arguments)

    return begin


for _name in COLLECTIVES:
    if not hasattr(LateInside, _name):
        setattr(LateInside, _name, _carrying(_name))


def synchronize(limit_s: float = LIMIT_S) -> bool:
    """Wait for all that was begun, as ``torch.cuda.synchronize`` does; false if any of it was aborted or failed."""
    end = time.monotonic() + limit_s
    insides = list(_insides)
    while any(each.ended < each.begun and not each.is_aborted for each in insides):
        if time.monotonic() > end:
            return False
        time.sleep(LOOK_S)
    return not any(each.is_aborted or each.has_failed for each in insides)


def _swapped(nested: Any, copies: dict[int, Tensor]) -> Any:
    """The same, with a copy in the place of each tensor."""
    if isinstance(nested, Tensor):
        return copies.get(id(nested), nested)
    if isinstance(nested, (list, tuple)):
        return type(nested)(_swapped(each, copies) for each in nested)
    return nested
