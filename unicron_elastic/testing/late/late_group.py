"""A process group over gloo whose collectives end later than they say, as NCCL's do."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import AllToAllOptions, ProcessGroup, ProcessGroupGloo, Store, Work

from unicron_elastic.compat.dispatch import leaves
from unicron_elastic.testing.late.late_event import Fate, LateEvent, lateness, pending

LOOK_S = 0.0005
LIMIT_S = 30.0

_groups: weakref.WeakSet[LateGroup] = weakref.WeakSet()


class Flight(NamedTuple):
    """A `Flight` is one collective on its way: ``begin`` starts gloo's, into ``shadows`` of the ``tensors``."""

    event: LateEvent
    begin: Callable[[], list[Any]]
    tensors: list[Tensor]
    shadows: list[Tensor]


class LateWork(Work):  # type: ignore[misc]
    """A `LateWork` says at once that it is done, as NCCL's ``wait`` does: only what follows on the stream waits."""

    def __init__(self, event: LateEvent, tensors: list[Tensor]) -> None:
        super().__init__()
        self.event = event
        self._tensors = tensors

    def wait(self, *_: Any, **__: Any) -> bool:
        """Return at once."""
        return True

    def synchronize(self) -> None:
        """Return at once, as where the stream waits and the host does not."""

    def is_completed(self) -> bool:
        """Return whether it has ended, which an abort also does."""
        return self.event.query()

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


class LateGroup(ProcessGroup):  # type: ignore[misc]
    """`LateGroup` runs collectives in order, on a thread that stands for a stream, and abandons them silently.

    torch finds its methods in two ways: ``dist.*`` calls the object, DDP's reducer and functional collectives come
    from C++ by the same names. Their arguments are torch's.
    """

    supports_coalescing = False
    supports_splitting = False

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._inner = ProcessGroupGloo(store, rank, size, timeout)
        self._rank, self._size = rank, size
        self._name = self._description = ""
        self._bracket: list[Flight] | None = None
        self._flights: queue.SimpleQueue[Flight | None] = queue.SimpleQueue()
        self._abort = threading.Event()
        self.begun = self.ended = 0
        threading.Thread(target=self._stream, name="unicron-late", daemon=True).start()
        _groups.add(self)

    # -- collectives: the names that Python and C++ ask for -----------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        return self._late("allreduce", tensors, None, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Work:
        return self._late("allreduce_coalesced", tensors, None, opts)

    def broadcast(self, tensors: Any, opts: Any = None) -> Work:
        return self._late("broadcast", tensors, None, opts)

    def reduce(self, tensors: Any, opts: Any = None) -> Work:
        return self._late("reduce", tensors, None, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        return self._late("allgather", outputs, inputs, opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        return self._late("gather", outputs, inputs, opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        return self._late("scatter", outputs, inputs, opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        return self._late("reduce_scatter", outputs, inputs, opts)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        return self._late("alltoall", outputs, inputs, opts)

    def all_gather_single(self, output: Any, tensor: Any, opts: Any = None) -> Work:
        return self._late(self._one_of("all_gather_single", "_allgather_base"), output, tensor, opts)

    def reduce_scatter_single(self, output: Any, tensor: Any, opts: Any = None) -> Work:
        return self._late(self._one_of("reduce_scatter_single", "_reduce_scatter_base"), output, tensor, opts)

    def all_to_all_single(self, output: Any, tensor: Any, counts: Any, given: Any, opts: Any = None) -> Work:
        name = self._one_of("all_to_all_single", "alltoall_base")
        return self._late(name, output, tensor, opts or AllToAllOptions(), counts, given)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        return self._each(self.all_gather_single, outputs, inputs, opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        return self._each(self.reduce_scatter_single, outputs, inputs, opts)

    def barrier(self, *_: Any, **__: Any) -> Work:
        return self._late("allreduce", [torch.zeros(1)], None, None)

    def send(self, tensors: Any, destination: int, tag: int = 0) -> Work:
        copies = [each.detach().clone() for each in tensors]
        flight = Flight(LateEvent(), lambda: [self._inner.send(copies, destination, tag)], [], [])
        return self._begin(flight, has_own_stream=True)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Work:
        return self._late("recv", tensors, None, None, source, tag)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _start_coalescing(self, *_: Any) -> None:
        self._bracket = []

    def _end_coalescing(self, *_: Any) -> Work:
        flights, self._bracket = self._bracket or [], None
        if not flights:
            event = LateEvent()
            event.end(Fate.LANDED)
            return LateWork(event, [])
        self.begun -= len(flights)
        flights[-1].event.followers = [each.event for each in flights[:-1]]
        tensors = [tensor for each in flights for tensor in each.tensors]
        shadows = [shadow for each in flights for shadow in each.shadows]
        return self._begin(
            Flight(flights[-1].event, lambda: [w for each in flights for w in each.begin()], tensors, shadows)
        )

    # -- what torch asks of a group ------------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return "late"

    def getRank(self) -> int:
        return self._rank

    def getSize(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def _get_backend(self, _device: Any) -> LateGroup:
        return self

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: it has one, which is how many collectives were begun."""

    def _get_sequence_number_for_group(self) -> int:
        return self.begun

    # -- how it ends ---------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Abandon what is under way, without a word: tensors keep what is in them, and no wait raises."""
        self._abort.set()

    @property
    def is_aborted(self) -> bool:
        """Return whether it was abandoned."""
        return self._abort.is_set()

    def shutdown(self) -> None:
        """Abandon what is under way, and end the stream."""
        self._abort.set()
        self._flights.put(None)

    # -- the stream ----------------------------------------------------------------------------------------------------

    def _late(self, name: str, outputs: Any, inputs: Any, options: Any, *rest: Any) -> Work:
        """Begins gloo's ``name``. Inputs are read now and never again; outputs are spoiled now and filled late."""
        tensors = _flat(outputs)
        copies = {id(each): each.detach().clone() for each in (*tensors, *_flat(inputs))}
        shadows = [copies[id(each)] for each in tensors]
        event = LateEvent()
        for each in tensors:
            lateness.spoil(each.detach())
        for each in tensors:  # not before all are spoiled: some may be parts of the same memory
            pending[each.untyped_storage().data_ptr()] = event
        given = [_swapped(each, copies) for each in ((outputs,) if inputs is None else (outputs, inputs))]
        given += [*rest, *([] if options is None else [options])]
        flight = Flight(event, lambda: [getattr(self._inner, name)(*given)], tensors, shadows)
        return self._begin(flight, has_own_stream=name == "recv")

    def _begin(self, flight: Flight, *, has_own_stream: bool = False) -> Work:
        """Puts it behind the others; what is sent between two ranks has a stream of its own, as on NCCL."""
        self.begun += 1
        if self._bracket is not None:
            self._bracket.append(flight)
        elif has_own_stream:
            threading.Thread(target=self._fly, args=(flight,), name="unicron-late", daemon=True).start()
        else:
            self._flights.put(flight)
        return LateWork(flight.event, flight.tensors)

    def _each(self, begin: Callable[[Any, Any, Any], Work], outputs: Any, inputs: Any, options: Any) -> Work:
        """Begins one for each pair, as one: gloo has no such collective in Python."""
        is_outermost = self._bracket is None
        if is_outermost:
            self._start_coalescing()
        for output, tensor in zip(outputs, inputs, strict=True):
            begun = begin(output, tensor, options)
        return self._end_coalescing() if is_outermost else begun

    def _stream(self) -> None:
        while (flight := self._flights.get()) is not None:
            self._fly(flight)

    def _fly(self, flight: Flight) -> None:
        fate = Fate.FAILED
        try:
            fate = self._land(flight)
        except Exception:
            fate = Fate.ABORTED if self._abort.is_set() else Fate.FAILED
        finally:
            self.ended += 1
            flight.event.end(fate)

    def _land(self, flight: Flight) -> Fate:
        if self._abort.is_set():
            return Fate.ABORTED
        for work in flight.begin():
            if work is not None:
                work.wait()
        time.sleep(max(0.0, flight.event.begun_at + lateness.delay_s - time.monotonic()))
        with torch.no_grad():
            for tensor, shadow in zip(flight.tensors, flight.shadows, strict=True):
                if self._abort.is_set():
                    lateness.tear(tensor.detach(), shadow)
                else:
                    tensor.detach().copy_(shadow)
        return Fate.ABORTED if self._abort.is_set() else Fate.LANDED

    def _one_of(self, *names: str) -> str:
        """Return the name that this torch's gloo has."""
        return next(name for name in names if hasattr(self._inner, name))


def synchronize(limit_s: float = LIMIT_S) -> bool:
    """Wait for all that was begun, as ``torch.cuda.synchronize`` does; false if any of it was aborted or failed."""
    end = time.monotonic() + limit_s
    groups = list(_groups)
    while any(each.ended < each.begun and not each.is_aborted for each in groups):
        if time.monotonic() > end:
            return False
        time.sleep(LOOK_S)
    return not any(each.is_aborted for each in groups)


def _flat(nested: Any) -> list[Tensor]:
    return [each for each in leaves(nested) if isinstance(each, Tensor)]


def _swapped(nested: Any, copies: dict[int, Tensor]) -> Any:
    """The same, with a copy in the place of each tensor."""
    if isinstance(nested, Tensor):
        return copies.get(id(nested), nested)
    if isinstance(nested, (list, tuple)):
        return type(nested)(_swapped(each, copies) for each in nested)
    return nested
