"""The gradients of a step: what this rank has summed up, and the reduced sum of all ranks, in flat buffers.

Reduction is out of place. What a rank has summed up stays as it is until the reduced sum is complete, so that after the
loss of a rank it still counts; and the reduced sum stays until the next reduction begins, for whoever missed its end.
``p.grad`` is a view of the first, into which the second is copied in the end: one copy in and one out, as in DDP.

Buckets are in the reverse order of the parameters, which is about that in which a backward pass comes to them: all but
the last one can be reduced while it goes on, one after the other (``buckets_ready.py``).

Behind the gradients, in the last bucket of them, travel notes (``notes.py``), which say what is in the sum. The more
micro-batches a step has, the more notes: where steps differ, what is reduced of the one before stays as long as it was.

One more bucket is for the model's buffers that micro-batch 0 has made, as bytes: whoever has computed it gives them to
all. The notes say how many there are; mostly there are none, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from unicron_elastic.compat.tensors import (
    changes_by_operations,
    changes_of,
    copy_each,
    divide_each,
    local_of,
    shard_like,
    share_of,
    zero_each,
)
from unicron_elastic.engine.transport.completion import Completion, UnderWay
from unicron_elastic.engine.transport.transport import Transport
from unicron_elastic.state.marks_of_shards import MarksOfShards
from unicron_elastic.state.nested import shaped_like
from unicron_elastic.state.packing import pack, unpack
from unicron_elastic.training.step.buckets_ready import BucketsReady
from unicron_elastic.training.step.comparison import written
from unicron_elastic.training.step.notes import NOTES_DTYPE, Notes, digest_notes, flags, made_bytes
from unicron_elastic.training.step.wrong_use import WrongUseError

BUCKET_BYTES = 25 * 2**20  # as DDP's
LAST_BUCKET_SHARE = 1 / 8  # of that: no backward pass goes on while it is reduced
_MARKS = 4096  # numbers of all gradients of one type that are looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """`Bucket` has neighbouring gradients of one type on one device, which are reduced together. Both are 1-D.

    ``parameters`` are the positions of its parameters; ``notes`` is how many notes are behind them in ``reduced``.
    """

    local: Tensor
    reduced: Tensor
    parameters: tuple[int, ...]
    notes: int = 0


class Gradients:
    """`Gradients` are those of ``parameters``, in steps of ``micro_batches`` micro-batches.

    ``others`` are tensors whose ``.grad`` is not autograd's: it is summed up like a gradient, and always there.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        micro_batches: int,
        transport: Transport,
        *,
        others: Sequence[Tensor] = (),
        bucket_bytes: int | None = None,
    ) -> None:
        self.micro_batches = micro_batches
        self._transport = transport
        self._made: Tensor | None = None  # if this rank has computed micro-batch 0, what that has made
        self.came: list[Tensor] = []  # whose gradients the latest backward pass has added, in that order
        self.weight: float | None = None  # of all micro-batches, once settled; None: they have none
        self._losses = torch.zeros(0)  # of all micro-batches, once settled
        # The losses and the weight of all processes of this replica, from this one's.
        self.of_all_seats: Callable[[Tensor, float | None], tuple[Tensor, float | None]] = lambda *own: own
        self.digest: Callable[[], list[float]] = lambda: written(None)  # of the state, for the notes
        self.name: Callable[[Tensor], str] = _shape  # of a parameter, for people
        # Compares with all ranks of how many micro-batches the step is; None: all steps are of as many.
        self.compare_counts: Callable[[], None] | None = None
        self._stamp = bytes(4)
        self._marks: MarksOfShards | None = None  # of what operations on many DTensors do, which torch does not count
        self._bucket_bytes = bucket_bytes or BUCKET_BYTES
        # Whose gradients autograd has added in this micro-batch, each as often as it has.
        self._added: list[Tensor] = []
        self._ready = BucketsReady(self._added)
        self._touched: set[Tensor] = set()
        self._hooks: dict[Tensor, Any] = {}
        self._staged: dict[int, Tensor] = {}
        self.lay_out(parameters, others=others)

    def lay_out(
        self, parameters: Sequence[Tensor], frozen: Sequence[Tensor] = (), others: Sequence[Tensor] = ()
    ) -> None:
        """Takes buffers for the gradients of these parameters, between steps; those of the step before are gone.

        ``frozen``: others of the model, which are to get no gradient.
        """
        self._others = tuple(others)
        for parameter in self._hooks.keys() - set(parameters):
            self._hooks.pop(parameter).remove()
            parameter.grad = None
        for parameter in parameters:
            if parameter not in self._hooks:
                # Called for each gradient that autograd adds: a list's own method is the least that this can cost.
                self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(self._added.append)
            parameter.grad = None  # a view of the former buffers, which are freed before there are new ones
        self._trained = tuple(parameters)
        self._frozen = tuple(frozen)
        self.parameters = (*self._trained, *self._others)
        self.views: list[Tensor] = []  # of each parameter's gradient, in its shape, as the parameter lies in memory
        self._gradients: list[Tensor] = []  # these, or what has them as this rank's part, as the parameter is divided
        self._divided: list[Tensor] = []  # the latter
        self.buckets: list[Bucket] = []
        self._flats: list[Tensor] = []
        self._notes = Notes(torch.zeros(0), 0)
        self._staged.clear()
        self.buckets = self._make_buckets()
        self._begin_notes()
        self._ready.lay_out(self._reduced_early())

    def _begin_notes(self) -> None:
        count = Notes.size(self.micro_batches, len(self.parameters))
        memory = torch.zeros(count, device=self._noted.local.device, dtype=NOTES_DTYPE)
        self._notes = Notes(memory, self.micro_batches, self._stamp)
        self.buckets[-2] = replace(self._noted, notes=count)

    def take_count(self, micro_batches: int) -> None:
        """Takes it that the step that begins has so many micro-batches. Nothing is noted of it yet.

        What is reduced of the step before stays, for who is late.
        """
        self.micro_batches = micro_batches
        self._begin_notes()

    def _reduced_early(self) -> list[list[Tensor]]:
        """Return the parameters of each bucket that can be reduced while a backward pass goes on."""
        early = self.buckets[:-2]
        count = next((at for at, each in enumerate(early) if max(each.parameters) >= len(self._trained)), len(early))
        return [[self._trained[position] for position in each.parameters] for each in early[:count]]

    def when_ready(self, begin: Callable[[int], bool]) -> None:
        """Call ``begin`` when all gradients of a bucket have come, in its turn; it tells whether it reduces it now."""
        self._ready.begin = begin

    # -- accumulation -------------------------------------------------------------------------------------------------

    def begin(self, stamp: bytes = bytes(4)) -> None:
        """Begins a step: nothing is summed up. ``reduced`` keeps what it has.

        ``stamp`` must be the same on all ranks: see ``Notes``.
        """
        zero_each(self._flats)
        for parameter, gradient in zip(self.parameters, self._gradients, strict=True):
            parameter.grad = gradient
        for parameter in self._frozen:
            parameter.grad = None
        self._stamp = stamp
        self._notes.begin(stamp)
        self._added.clear()
        self._ready.begin_pass()
        self._touched.clear()
        self._made = None
        self._remember()

    def take_added(self) -> None:
        """Notes whose gradients autograd has added in a backward pass that has just ended.

        Raises RuntimeError if something else has changed gradients there: each addition is one change.
        """
        if sum(self._changes()) - sum(self._versions) > len(self._added):
            raise WrongUseError(
                "the gradients were changed in the backward pass of step.backward(loss), as by a hook of "
                "register_post_accumulate_grad_hook: there they are the sum of some micro-batches of this rank. Change "
                "them behind 'for index in step', or each micro-batch's own with parameter.register_hook"
            )
        self._touched.update(self._added)
        self.came = self._added.copy()
        self._ready.end_pass()
        self._added.clear()

    def add(self, index: int, loss: Tensor, weight: float | None = None) -> None:
        """Notes that this rank has computed a micro-batch; autograd has added its gradients."""
        self._notes.add(index, loss, weight)
        self._remember()

    def take_made(self, made: Mapping[str, Tensor], device: torch.device) -> None:
        """Take what micro-batch 0 has made, for all ranks."""
        self._made = pack(dict(made), device) if made else None

    def check(self) -> None:
        """Raises RuntimeError if a gradient was changed since the latest micro-batch was added, by who tells so.

        The buffers count the changes of all their views. Those that are made through ``.data`` do not show.
        """
        if self._versions != self._changes() or (self._marks is not None and self._marks.have_changed()):
            raise WrongUseError(
                "the gradients were changed while micro-batches were being summed up: within 'for index in step' there "
                "must be no zero_grad(), no clipping or unscaling, and no other backward pass than step.backward(loss)"
            )

    def check_places(self) -> None:
        """Raises RuntimeError if a gradient is not where it was summed up, or was computed without being summed up."""
        self.check()
        for parameter, gradient in zip(self.parameters, self._gradients, strict=True):
            if parameter.grad is not gradient:
                raise WrongUseError(
                    "the gradients were taken away while micro-batches were being summed up: call "
                    "optimizer.zero_grad() outside of 'for index in step', or not at all, since each step begins with "
                    "zeros"
                )
        self._check_frozen()

    def _check_frozen(self) -> None:
        for parameter in self._frozen:
            if parameter.grad is not None:
                raise WrongUseError(
                    f"{self.name(parameter)} got a gradient, and was frozen when the step began: freeze and unfreeze "
                    "before 'for index in step', not within"
                )

    def _remember(self) -> None:
        self._versions = self._changes()
        self._marks = MarksOfShards(self._flats, _MARKS) if self._divided else None

    def _changes(self) -> list[int]:
        return [*map(changes_of, self._flats), *map(changes_by_operations, self._divided)]

    # -- reduction ----------------------------------------------------------------------------------------------------

    @property
    def rounds(self) -> tuple[range, range]:
        """The buckets that can be reduced at once, and those whose reduction begins when the former is complete."""
        last = len(self.buckets) - 1
        return range(last), range(last, last + 1)

    def reduce(self, bucket: int, holdings: Sequence[frozenset[int]], *, is_awaited: bool) -> UnderWay | None:
        """Begins to sum a bucket over all ranks; ``holdings`` are the micro-batches that each has computed.

        None if nothing is to be waited for. Raises what a collective raises.
        """
        if bucket in self.rounds[1]:
            return self._share_made(holdings)
        if self.has_notes(bucket) and self.compare_counts is not None:
            self.compare_counts()  # sums of different sizes end a process
        return self._transport.reduce(self.stage(bucket, is_awaited=is_awaited))

    def stage(self, bucket: int, *, is_awaited: bool, notes_alone: bool = False) -> Tensor:
        """What is to be reduced in place: a copy of this rank's sum, with the notes behind it, or these alone.

        ``is_awaited``: a newcomer is on its way, as this rank knows.
        """
        each = self._fitted(bucket)
        elements = each.local.numel()
        staged = each.reduced
        if notes_alone:
            staged = self._staged[bucket] = each.reduced[elements:]  # kept: no thread of gloo's is the last to have it
        else:
            staged[:elements].copy_(each.local)
        if each.notes:
            touched = [parameter in self._touched for parameter in self._trained]
            made = 0 if self._made is None else self._made.numel()
            touched += [True for _ in self._others]
            self._notes.write(
                staged[-each.notes :],
                touched,
                self.digest(),
                made_bytes=made,
                is_awaited=is_awaited,
                must_repeat=self._ready.take_too_early(),
            )
        return staged

    def _share_made(self, holdings: Sequence[frozenset[int]]) -> Completion | None:
        room = self.room(len(self.buckets) - 1)
        if not room.numel():
            return None
        source = next(rank for rank, held in enumerate(holdings) if 0 in held)
        if source == self._transport.rank:
            # Of another size if micro-batch 0 was computed again, and made others: then all stay as they were.
            is_same = self._made is not None and self._made.numel() == room.numel()
            room.copy_(self._made) if self._made is not None and is_same else room.zero_()
        return self._transport.share(room, source)

    def room(self, bucket: int) -> Tensor:
        """Where the reduced bucket of the present step is, or is to be received, when those before it are there."""
        if bucket not in self.rounds[1]:
            return self._fitted(bucket).reduced
        each = self.buckets[bucket]
        count = made_bytes(self._noted.reduced)
        if each.reduced.numel() != count:
            each = self.buckets[bucket] = replace(each, reduced=each.local.new_empty(count))
        return each.reduced

    def _fitted(self, bucket: int) -> Bucket:
        """Return a bucket whose ``reduced`` has room for what the present step has: what is there may be gone then."""
        each = self.buckets[bucket]
        count = each.local.numel() + each.notes
        if each.reduced.numel() != count:
            each = self.buckets[bucket] = replace(each, reduced=_of_length(each.reduced, count, spare=each.notes))
        return each

    def renew(self) -> None:
        """Takes other memory for what is reduced: an abandoned collective may still write to where it was to be.

        What is there stays: it may be that of the step before, which somebody who is late still needs.
        """
        self.buckets = [replace(bucket, reduced=bucket.reduced.clone()) for bucket in self.buckets]

    def settle(self) -> None:
        """Puts the reduced gradients into ``p.grad``; None for a parameter that no micro-batch gave one.

        With weights they are divided by the sum of these. Raises RuntimeError if they are not those of all
        micro-batches of this step, each once.
        """
        copy_each([b.local for b in self.buckets[:-1]], [b.reduced[: b.local.numel()] for b in self.buckets[:-1]])
        self._notes.memory.copy_(self._noted.reduced[self._noted.local.numel() :])
        touched = self._notes.read()
        for parameter, gradient, is_touched in zip(self.parameters, self._gradients, touched, strict=True):
            parameter.grad = gradient if is_touched else None
        self._losses, self.weight = self.of_all_seats(self._notes.losses.clone(), self._notes.weight)
        if self.weight == 0:
            raise WrongUseError("all micro-batches of this step have the weight 0, so that it has no mean")
        if self.weight is not None and self._trained:
            divide_each(self.views[: len(self._trained)], self.weight)

    def shared(self) -> dict[str, Tensor]:
        """What micro-batch 0 has made, once complete: mostly nothing."""
        made = self.buckets[-1].reduced
        shared: dict[str, Tensor] = unpack(made) if made.numel() and bool(made.any()) else {}
        return shared

    def losses(self) -> Tensor:
        """The loss of each micro-batch, (micro_batches,), once settled."""
        return self._losses

    def digests(self) -> list[float]:
        """The sums of the digests of all ranks' states, once complete."""
        return digest_notes(self._noted.reduced)

    def flags(self) -> tuple[bool, bool]:
        """Whether some rank knows of a newcomer on its way, and whether all must be reduced again, once complete."""
        return flags(self._noted.reduced)

    def has_notes(self, bucket: int) -> bool:
        """Whether the notes are behind the gradients of this bucket."""
        return self.buckets[bucket].notes > 0

    @property
    def _noted(self) -> Bucket:
        """The bucket with the notes."""
        return self.buckets[-2]

    # -- layout -------------------------------------------------------------------------------------------------------

    def _make_buckets(self) -> list[Bucket]:
        views: dict[int, Tensor] = {}
        buckets: list[Bucket] = []
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for position in (*range(len(self._trained))[::-1], *range(len(self._trained), len(self.parameters))):
            parameter = self.parameters[position]
            groups.setdefault((parameter.device, parameter.dtype), []).append(position)
        # The notes go behind gradients of their own type; the last bucket has them.
        ordered = sorted(groups.items(), key=lambda item: item[0][1] is NOTES_DTYPE)
        if not ordered or ordered[-1][0][1] is not NOTES_DTYPE:
            device = self.parameters[0].device if self.parameters else torch.device("cpu")
            ordered.append(((device, NOTES_DTYPE), []))
        for number, ((device, dtype), positions) in enumerate(ordered):
            has_notes = number == len(ordered) - 1
            sizes = [local_of(self.parameters[position]).numel() for position in positions]
            local = torch.zeros(sum(sizes), device=device, dtype=dtype)
            notes = Notes.size(self.micro_batches, len(self.parameters)) if has_notes else 0
            reduced = torch.zeros(sum(sizes) + notes, device=device, dtype=dtype)
            self._flats.append(local)
            offset = 0
            for position, size in zip(positions, sizes, strict=True):
                views[position] = shaped_like(local_of(self.parameters[position]), local[offset : offset + size])
                offset += size
            most = max(1, self._bucket_bytes // local.element_size())
            last = max(1, int(most * LAST_BUCKET_SHARE)) if has_notes else 0
            shares = [share_of(self.parameters[position]) for position in positions]
            buckets += _cut(local, reduced, positions, sizes, shares=shares, most=most, last=last)
        self.views = [views[position] for position in range(len(self.parameters))]
        self._gradients = [*map(shard_like, self.parameters, self.views)]
        self._divided = [each for each in self._gradients if local_of(each) is not each]
        nothing = torch.empty(0, dtype=torch.uint8, device=self._flats[-1].device)
        return [*buckets, Bucket(local=nothing, reduced=nothing, parameters=())]


def _shape(parameter: Tensor) -> str:
    return f"a parameter of shape {tuple(parameter.shape)}"


def _of_length(tensor: Tensor, count: int, spare: int) -> Tensor:
    """Return memory for so many numbers where the tensor is, if what is behind it has room, and else new, with more."""
    room = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    return tensor.as_strided((count,), (1,)) if count <= room else tensor.new_empty(count + spare)[:count]


def _cut(
    local: Tensor,
    reduced: Tensor,
    positions: Sequence[int],
    sizes: Sequence[int],
    *,
    shares: Sequence[int],
    most: int,
    last: int,
) -> list[Bucket]:
    """Buckets of at most ``most`` elements, or of one parameter; what ``reduced`` has behind them goes to the last.

    That one begins with the parameter in which the ``last`` elements begin, if ``last`` is not 0 and the one before has
    more. ``shares``: the sizes by which that is decided, the same in all processes of a replica.
    """
    firsts, begun_at = [0], 0  # the first parameter of each bucket; where the present one begins
    end, last_begins = 0, sum(shares) - last
    for number, share in enumerate(shares):
        is_last = 0 < last < end - begun_at and end <= last_begins < end + share
        if end > begun_at and (is_last or end + share - begun_at > most):
            firsts.append(number)
            begun_at = end
        end += share
    begins = [sum(sizes[:first]) for first in firsts]
    return [
        Bucket(local=local[begin:end], reduced=reduced[begin:end], parameters=tuple(positions[first:last]))
        for first, last, begin, end in zip(firsts, [*firsts[1:], len(sizes)], begins, [*begins[1:], None], strict=True)
    ]
