"""The gradients of a step: what this rank has summed up, and the reduced sum of all ranks, in flat buffers.

Reduction is out of place. What a rank has summed up stays as it is until the reduced sum is complete, so that after the
loss of a rank it still counts; and the reduced sum stays until the next reduction begins, for whoever missed its end.
``p.grad`` is a view of the first, into which the second is copied in the end: one copy in and one out, as in DDP.

Behind the gradients, in the last bucket, travel notes: the loss of each micro-batch, which parameters got a gradient
at all, and whether a newcomer is copying this rank's state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from unicron_elastic.compat.tensors import copy_each, zero_each
from unicron_elastic.state.nested import shaped_like

__all__ = ["BUCKET_BYTES", "Bucket", "Gradients"]

BUCKET_BYTES = 25 * 2**20  # as DDP's
_NOTES_DTYPE = torch.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Neighbouring gradients of one type on one device, reduced together. Both are 1-D and of the same length.

    ``parameters`` are the positions of its parameters; ``notes`` is how many of its last elements are notes.
    """

    local: Tensor
    reduced: Tensor
    parameters: tuple[int, ...]
    notes: int = 0


class Gradients:
    """Of ``parameters``, in steps of ``micro_batches`` micro-batches."""

    def __init__(self, parameters: Sequence[Tensor], micro_batches: int, *, bucket_bytes: int | None = None) -> None:
        self.parameters = tuple(parameters)
        self.micro_batches = micro_batches
        self.views: list[Tensor] = []  # of each parameter's gradient, in its shape, as the parameter lies in memory
        self.done: set[int] = set()  # buckets whose reduced sum is complete
        self.has_last = False  # whether ``reduced`` still is that of the step before
        self._touched: set[Tensor] = set()
        self._staged: dict[int, Tensor] = {}
        self._flats: list[Tensor] = []
        self.wait: Callable[[Work], None] = _wait  # for a collective
        self.buckets = self._make_buckets(bucket_bytes or BUCKET_BYTES)
        for parameter in self.parameters:
            if parameter.requires_grad:  # else its gradient is not autograd's, and always there
                # Called for each gradient that autograd adds: a set's own method is the least that this can cost.
                parameter.register_post_accumulate_grad_hook(self._touched.add)

    # -- accumulation -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begins a step: nothing summed up, nothing reduced. ``reduced`` keeps what it has."""
        zero_each(self._flats)
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view
        self._touched.clear()
        self.has_last = self.is_complete
        self.done.clear()

    def add(self, index: int, loss: Tensor) -> None:
        """Notes that this rank has computed a micro-batch; autograd has added its gradients."""
        self._notes[index].copy_(loss)

    def check(self) -> None:
        """Raises RuntimeError if a gradient is not where it was summed up."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is not view:
                raise RuntimeError(
                    "the gradients were taken away while micro-batches were being summed up: call "
                    "optimizer.zero_grad() outside of 'for index in step', or not at all, since each step begins with "
                    "zeros"
                )

    # -- reduction ----------------------------------------------------------------------------------------------------

    @property
    def is_complete(self) -> bool:
        """Whether all buckets are reduced."""
        return len(self.done) == len(self.buckets)

    def reduce(self, bucket: int, holdings: Sequence[frozenset[int]], *, is_held: bool) -> Work | None:  # noqa: ARG002
        """Begins to sum a bucket over all ranks; ``holdings`` are the micro-batches that each has computed.

        Raises what a collective raises.
        """
        return dist.all_reduce(self.stage(bucket, is_held=is_held), async_op=True)

    def stage(self, bucket: int, part: slice = slice(None), *, is_held: bool) -> Tensor:
        """What is to be reduced in place: a copy of this rank's sum, or a part of it.

        ``is_held``: a newcomer copies this rank's state.
        """
        self.has_last = False
        each = self.buckets[bucket]
        if each.notes:
            self._note_touched(is_held)
        if part == slice(None):
            return each.reduced.copy_(each.local)
        staged = self._staged[bucket] = each.reduced[part]  # kept, so that no thread of gloo's is the last to have it
        return staged.copy_(each.local[part])

    def renew(self) -> None:
        """Takes other memory for what is not reduced: an abandoned collective may still write to where it was to be.

        What is there stays: it may be that of the step before, which somebody who is late still needs.
        """
        self.buckets = [
            bucket if number in self.done else replace(bucket, reduced=bucket.reduced.clone())
            for number, bucket in enumerate(self.buckets)
        ]

    def settle(self) -> None:
        """Puts the reduced gradients into ``p.grad``; None for a parameter that no micro-batch gave one."""
        copy_each([b.local for b in self.buckets], [b.reduced for b in self.buckets])
        first = self.micro_batches
        touched = self._notes[first : first + len(self.parameters)].tolist()
        for parameter, view, count in zip(self.parameters, self.views, touched, strict=True):
            parameter.grad = view if count else None

    def losses(self) -> Tensor:
        """The loss of each micro-batch, (micro_batches,), once settled."""
        return self._notes[: self.micro_batches].clone()

    def any_held(self) -> bool:
        """Whether a newcomer copies the state of some rank, once complete."""
        return bool(self.buckets[-1].reduced[-1] > 0)

    def forget_held(self) -> None:
        """What was held when the sum was made is over: newcomers have come, or have not."""
        self.buckets[-1].reduced[-1] = 0

    def _note_touched(self, is_held: bool) -> None:
        flags = [float(each in self._touched or not each.requires_grad) for each in self.parameters]
        self._notes[self.micro_batches :].copy_(torch.tensor([*flags, float(is_held)], dtype=_NOTES_DTYPE))

    # -- layout -------------------------------------------------------------------------------------------------------

    def _make_buckets(self, bucket_bytes: int) -> list[Bucket]:
        notes = self.micro_batches + len(self.parameters) + 1
        views: dict[int, Tensor] = {}
        buckets: list[Bucket] = []
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for position, parameter in enumerate(self.parameters):
            groups.setdefault((parameter.device, parameter.dtype), []).append(position)
        # The notes go behind gradients of their own type; the last bucket has them.
        ordered = sorted(groups.items(), key=lambda item: item[0][1] is _NOTES_DTYPE)
        if not ordered or ordered[-1][0][1] is not _NOTES_DTYPE:
            device = self.parameters[0].device if self.parameters else torch.device("cpu")
            ordered.append(((device, _NOTES_DTYPE), []))
        for number, ((device, dtype), positions) in enumerate(ordered):
            extra = notes if number == len(ordered) - 1 else 0
            sizes = [self.parameters[position].numel() for position in positions]
            local = torch.zeros(sum(sizes) + extra, device=device, dtype=dtype)
            reduced = torch.zeros_like(local)
            self._flats.append(local)
            offset = 0
            for position, size in zip(positions, sizes, strict=True):
                views[position] = shaped_like(self.parameters[position], local[offset : offset + size])
                offset += size
            buckets += _cut(local, reduced, positions, sizes, most=max(1, bucket_bytes // local.element_size()))
            self._notes = local[offset:]
        self.views = [views[position] for position in range(len(self.parameters))]
        return [*buckets[:-1], replace(buckets[-1], notes=notes)]


def _wait(work: Work) -> None:
    work.wait()


def _cut(local: Tensor, reduced: Tensor, positions: Sequence[int], sizes: Sequence[int], *, most: int) -> list[Bucket]:
    """Buckets of at most ``most`` elements, or of one parameter; what comes behind the gradients goes to the last."""
    firsts, begins = [0], [0]  # of each bucket: its first parameter and element
    end = 0
    for number, size in enumerate(sizes):
        if end > begins[-1] and end + size - begins[-1] > most:
            firsts.append(number)
            begins.append(end)
        end += size
    return [
        Bucket(local=local[begin:end], reduced=reduced[begin:end], parameters=tuple(positions[first:last]))
        for first, last, begin, end in zip(
            firsts, [*firsts[1:], len(sizes)], begins, [*begins[1:], local.numel()], strict=True
        )
    ]
