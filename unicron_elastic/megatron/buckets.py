"""The gradients of one process, bucket group by bucket group, so that a reduction which breaks can be made again.

Megatron-Core reduces gradients in place (``_ParamAndGradBucketGroup.start_grad_sync``), and a reduction that a fault
interrupts leaves them changed on some ranks. So what this rank has summed up is copied right before, one group at a
time, where Megatron begins to reduce it: with ``overlap_grad_reduce`` that is during the last backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from unicron_elastic.engine.transport.waiter import AbandonedError, Waiter
from unicron_elastic.megatron.rebuilding import Sums
from unicron_elastic.training.group.assembly import BROKEN


class Buckets:
    """Those of all model chunks of this process. ``chunks`` are Megatron-Core's DistributedDataParallel modules.

    A bucket here is one of Megatron's bucket groups, which it reduces together.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        waiter: Waiter,
        on_abandon: Callable[[], None] = lambda: None,
        *,
        is_wide: bool = False,
    ) -> None:
        """``on_abandon`` is called when a reduction does not end. ``is_wide``: see ``sums``."""
        self._chunks = chunks
        self._sums = Sums(chunks, is_wide=is_wide)
        self._waiter = waiter
        self._on_abandon = on_abandon
        self._groups: list[Any] = []
        self._kept: list[list[Tensor]] = []
        self._begun: set[int] = set()  # those that may have been changed, and whose sums are kept
        self._error: BaseException | None = None  # of a reduction that did not begin, in the middle of a backward pass
        self._is_held_back = False
        self.done: set[int] = set()  # reduced over all replicas
        self.install()

    def install(self) -> None:
        """Takes the place of Megatron's functions; again if its bucket groups were made anew."""
        self._sums.install()
        self._groups = [group for chunk in self._chunks for group in chunk.bucket_groups]
        self._kept = [[self._sums.like(bucket) for bucket in group.buckets] for group in self._groups]
        numbered = iter(range(len(self._groups)))
        by_chunk = [[next(numbered) for _ in chunk.bucket_groups] for chunk in self._chunks]
        self._order = [number for numbers in reversed(by_chunk) for number in numbers]
        self._ready: dict[int, Callable[[], None]] = {}
        for number, group in enumerate(self._groups):
            group.start_grad_sync = partial(self._start, number, group.start_grad_sync)
            group.finish_grad_sync = partial(self._finish, number, group.finish_grad_sync)

    @property
    def _scatters(self) -> bool:
        """Whether gradients are reduced by reduce-scatter, whose work on gloo minds no time-out (torch 2.13)."""
        return any(group.ddp_config.use_distributed_optimizer for group in self._groups)

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._groups)

    @property
    def is_complete(self) -> bool:
        """Whether all are reduced."""
        return len(self.done) == self.count

    def begin(self) -> None:
        """Begins a step: nothing is reduced."""
        self._sums.widen()
        self.done.clear()
        self._begun.clear()
        self._ready.clear()
        self._error = None

    def round(self) -> None:
        """When all is reduced and divided: gradients are as the optimizer takes them."""
        self._sums.round()

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """While more is added to the sums, none is reduced; those that are reduced already stay as they are."""
        counts = [dict(group.per_param_grad_ready_counts) for group in self._groups]
        for number in self.done:
            self._keep(number)
        self._is_held_back = True
        try:
            yield
        finally:
            self._is_held_back = False
            for number in self.done:
                self._take_back(number)
            for group, before in zip(self._groups, counts, strict=True):
                if before:  # else nothing of this step was summed up: it counts as any other first pass
                    group.per_param_grad_ready_counts = before

    def reduce(self) -> None:
        """Reduces what is not reduced. Raises what a collective raises."""
        for number in self._order:
            self._groups[number].finish_grad_sync()
        if self._error is not None:
            raise self._error

    def keep_reduced(self) -> None:
        """Before the reduced gradients are changed by collectives that may break."""
        for number in range(self.count):
            self._keep(number)

    def change_reduced(self, call: Callable[[], object]) -> None:
        """Have ``call`` change the reduced gradients, with others and without a time-out. Raises what it raises.

        AbandonedError: it has not ended, though its collectives are broken, and may still write to where they were.
        """
        try:
            self._waiter.call(call)
        except AbandonedError:
            self._leave_memory()
            raise

    def restore_reduced(self) -> None:
        """Restore the sums as ``keep_reduced`` found them."""
        for number in self.done:
            self._take_back(number)

    def reopen(self) -> None:
        """What is reduced is of no use: with the distributed optimizer, each rank has its part of it only."""
        self._begun |= self.done
        self.done.clear()

    def restore(self) -> None:
        """Takes back the sums of reductions that broke."""
        broken = sorted(self._begun - self.done)
        handles = [self._groups[number].grad_reduce_handle for number in broken]
        works = [work for handle in handles for work in getattr(handle, "works", ())]
        have_ended = [self._waiter.has_ended(work, minds_time_out=not self._scatters) for work in works]
        if not all(have_ended):
            self._leave_memory()
        for number in broken:
            self._groups[number].grad_reduce_handle = None
            self._take_back(number)
        self._begun &= self.done
        self._ready.clear()
        self._error = None

    def drop(self) -> None:
        """Forgets what was summed up, but not what is reduced."""
        for number in range(self.count):
            self._groups[number].per_param_grad_ready_counts = {}
            if number not in self.done:
                for bucket in self._groups[number].buckets:
                    bucket.grad_data.zero_()
        self._begun &= self.done

    def fill(self, number: int, transfer: Callable[[Tensor], None], *, has_it: bool) -> None:
        """Gives the reduced gradients of a bucket to those who need them, or takes them."""
        if not has_it:  # what breaks on the way leaves anything
            self._begun.add(number)
            self._keep(number)
        for bucket in self._groups[number].buckets:
            transfer(bucket.grad_data)
        self.done.add(number)

    def _leave_memory(self) -> None:
        """Take other memory for the sums: something that was given up may still write to where they are."""
        self._on_abandon()
        self._sums.renew()

    # -- in the place of Megatron's ------------------------------------------------------------------------------------

    def _start(self, number: int, start: Callable[..., None], force_all_reduce: bool | None = False) -> None:
        """Begins those whose turn it is: all ranks in the same order, also those for whom it is their first step."""
        if self._is_held_back or number in self.done or number in self._begun:
            return
        self._ready[number] = partial(start, force_all_reduce=force_all_reduce)
        for each in self._order:
            if each in self.done or each in self._begun:
                continue
            if each not in self._ready or self._error is not None:
                return
            self._keep(each)
            self._begun.add(each)
            try:
                self._ready[each]()
            except BROKEN as error:  # it must not end a backward pass, whose gradients are good
                self._error = error

    def _finish(self, number: int, finish: Callable[..., None], force_all_reduce: bool | None = False) -> None:
        group = self._groups[number]
        if number in self.done:
            group.param_gather_dispatched = False
            return
        if group.ddp_config.overlap_grad_reduce:
            group.start_grad_sync(force_all_reduce=force_all_reduce)
        if self._error is not None:
            raise self._error
        for work in getattr(group.grad_reduce_handle, "works", ()):  # which waits for ever if gloo has lost a send
            (self._waiter.wait_one_to_one if self._scatters else self._waiter.wait)(work)
        finish(force_all_reduce=force_all_reduce)
        if self._error is not None:
            raise self._error
        self.done.add(number)

    def _keep(self, number: int) -> None:
        for kept, bucket in zip(self._kept[number], self._groups[number].buckets, strict=True):
            kept.copy_(bucket.grad_data)

    def _take_back(self, number: int) -> None:
        for kept, bucket in zip(self._kept[number], self._groups[number].buckets, strict=True):
            bucket.grad_data.copy_(kept)
