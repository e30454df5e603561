"""Sums the gradients of micro-batches by the fixed tree of ``tree.py``: the same bits, whoever computed what.

Each rank keeps one gradient for each node that it holds, and adds two as soon as both are there. Across ranks only
the top of the tree is left. The gradients of a bucket are cut into as many segments as there are ranks; each rank
gets all pieces of its own segment, adds them as the tree says, and the sums are gathered. When every rank holds one
piece, which is so if the micro-batches of each are a power of two, that is the traffic of a ring all-reduce.

Memory, in buffers of the size of all gradients: computing k micro-batches in rising order from a multiple of a
power of two >= k takes at most ``floor(log2(k)) + 1``, the one that backward is filling counted: 4 for k = 8 and 2
for k = 2, against 1 for plain accumulation. From any other start it is at most twice that, and in random order it
may be k / 2. Reducing a bucket of n elements takes (1 + q / W) n elements beside them, with q pieces on all W
ranks; they are kept for the next bucket, since memory that is new each time costs more than the sum. The result takes
n more, or ``out``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from unicron_elastic.compat.tensors import add_each, local_of
from unicron_elastic.engine.protocol.tree import Addition, TreeNode, combine_plan, merge, root
from unicron_elastic.engine.transport.completion import Completion
from unicron_elastic.state.nested import flat_like

Gradients = list[Tensor | None]  # one for each parameter; None where no micro-batch of the node gave it any
Held = tuple[tuple[TreeNode, ...], ...]


class Exchanges(Protocol):
    """`Exchanges` is a process group, as far as a sum over all of its ranks needs it."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def exchange(self, came: Tensor, gone: Tensor, counts: Sequence[int], given: Sequence[int]) -> Completion:
        """Begins to give each rank its part of ``gone``, of ``given`` elements, and to get ``counts`` from each."""


class TreeSum:
    """The partial sums of one rank in one step.

    A parameter that a micro-batch leaves without gradient counts as zeros in it.
    """

    def __init__(self, parameters: Iterable[Tensor], micro_batches: int) -> None:
        """Hold nothing yet.

        Args:
            parameters: of the model, in any order that stays; their ``.grad`` must be None before each micro-batch.
            micro_batches: of the whole step, over all ranks.

        Raises:
            ValueError: there is no micro-batch.
        """
        root(micro_batches)
        self.parameters = tuple(parameters)
        self.micro_batches = micro_batches
        self._place = {id(parameter): place for place, parameter in enumerate(self.parameters)}
        self._values: dict[TreeNode, Gradients] = {}
        self._free: list[Tensor] = []  # memory for what is exchanged

    @property
    def nodes(self) -> tuple[TreeNode, ...]:
        """What is held, sorted by the indices covered: ``maximal`` of the indices added so far."""
        return tuple(sorted(self._values, key=lambda node: node.start))

    def add(self, index: int) -> None:
        """Take the gradients that the backward pass of micro-batch ``index`` has left, and leave None in their place.

        The tensors themselves are taken, not copied: nothing else may go on using them.

        Raises:
            ValueError: there is no such micro-batch, or it is in the sum already. The gradients stay where they are.
        """
        additions = merge(self._values, index, self.micro_batches)
        value = [self._gradient(place) for place in range(len(self.parameters))]
        for parameter in self.parameters:
            parameter.grad = None
        self._values[TreeNode(0, index)] = value
        for addition in additions:
            left, right = self._values.pop(addition.left), self._values.pop(addition.right)
            self._values[addition.total] = _added(left, right)

    def drop(self) -> None:
        """Forget every partial sum, before the next step. Gradients that were not yet added are not touched."""
        self._values.clear()

    def flat(self, node: TreeNode, bucket: Sequence[Tensor]) -> Tensor:
        """The partial sum of ``node`` for the parameters of ``bucket``, one after the other: a new 1-D tensor.

        Raises:
            ValueError: the node is not held, or the bucket has unknown parameters, or several dtypes or devices.
        """
        like = self._check(bucket)
        if node not in self._values:
            raise ValueError(f"{node} is not held; held are {', '.join(map(str, self.nodes)) or 'none'}")
        return _flat(self._of_bucket(bucket)[node], bucket, like)

    def reduce(
        self,
        bucket: Sequence[Tensor],
        group: Exchanges,
        held_by_rank: Mapping[int, Sequence[TreeNode]],
        rank: int,
        out: Tensor | None = None,
    ) -> Tensor:
        """The sum over all micro-batches for the parameters of ``bucket``: the same bits on every rank.

        It takes one all-to-all for each piece of the rank that has most, and one more. They are out of place: if one
        fails, the partial sums are as they were. Everybody exchanges with everybody, so all notice the loss of any.

        Args:
            bucket: some of the parameters, all of one dtype on one device, in the same order on each rank.
            group: the ranks that reduce, which count from 0.
            held_by_rank: for each rank of the group its ``nodes``; together they cover every micro-batch once.
            rank: this one's in the group.
            out: where to put the sum, 1-D and of the bucket's size and dtype; by default in a new tensor.

        Returns:
            The bucket's elements, 1-D; undivided: it is the sum, not the mean.

        Raises:
            ValueError: a micro-batch is missing or held twice, this rank holds something else, the bucket is mixed, or
                ``out`` does not fit.
            RuntimeError: a collective failed.
        """
        summing = self.begin(bucket, group, held_by_rank, rank, out)
        summing.wait()
        return summing.out

    def begin(
        self,
        bucket: Sequence[Tensor],
        group: Exchanges,
        held_by_rank: Mapping[int, Sequence[TreeNode]],
        rank: int,
        out: Tensor | None = None,
        *,
        index: int | None = None,
    ) -> Summing:
        """Begin what ``reduce`` does, and raise what it raises; more of it is begun where its end is waited for.

        ``index``: a micro-batch of which this bucket has all gradients, and which was not added yet.
        """
        like = self._check(bucket)
        values = self._of_bucket(bucket, index)
        held = self._check_held(held_by_rank, group.size, rank, values)
        _plan(held, self.micro_batches)  # raises unless every micro-batch is there once
        count = _elements(bucket)
        out = like.new_empty(count) if out is None else out
        if (out.shape, out.dtype, out.device) != ((count,), like.dtype, like.device):
            found = f"{tuple(out.shape)} of {out.dtype} on {out.device}"
            raise ValueError(f"out must be ({count},) of {like.dtype} on {like.device}, it is {found}")
        if count == 0:
            return Summing(out, iter(()))
        if len(held) == 1:
            pieces = {node: _flat(value, bucket, like) for node, value in values.items()}
            out.copy_(_summed(pieces, held, self.micro_batches))
            return Summing(out, iter(()))
        given = [values[node] for node in held[rank]]
        return Summing(out, self._exchanges(bucket, given, group=group, held=held, rank=rank, out=out))

    def _of_bucket(self, bucket: Sequence[Tensor], index: int | None = None) -> dict[TreeNode, Gradients]:
        """Return what is held of a bucket's parameters, with those of ``index`` as if they had been added.

        What is held stays as it is: a gradient may still come to this micro-batch.
        """
        places = [self._place[id(parameter)] for parameter in bucket]
        values: dict[TreeNode, Gradients] = {
            node: [value[place] for place in places]
            for node, value in sorted(self._values.items(), key=lambda item: item[0].start)
        }
        if index is None:
            return values
        values[TreeNode(0, index)] = [self._gradient(place) for place in places]
        for addition in merge(self._values, index, self.micro_batches):
            left, right = values.pop(addition.left), values.pop(addition.right)
            alone = [b if a is not None or b is None else b.clone() for a, b in zip(left, right, strict=True)]
            values[addition.total] = _added([None if each is None else each.clone() for each in left], alone)
        return dict(sorted(values.items(), key=lambda item: item[0].start))

    def _exchanges(
        self,
        bucket: Sequence[Tensor],
        mine: Sequence[Gradients],
        *,
        group: Exchanges,
        held: Held,
        rank: int,
        out: Tensor,
    ) -> Iterator[Completion]:
        """Exchange the pieces by segments, add those of this rank's segment, and exchange the sums.

        Yields what is to be waited for before it goes on.
        """
        segments = _segments(out.numel(), len(held))
        size = segments[rank]
        sent = self._take_scratch(out, max(out.numel(), len(held) * size))
        received = self._take_scratch(out, sum(map(len, held)) * size)
        pieces: dict[TreeNode, Tensor] = {}
        for place in range(max(map(len, held))):
            senders = [place < len(nodes) for nodes in held]
            begin = len(pieces) * size
            came = received[begin : begin + sum(senders) * size]
            gone = sent[: out.numel() * senders[rank]]
            if senders[rank]:
                _write(mine[place], bucket, gone)
            counts = [size * sends for sends in senders]
            given = segments if senders[rank] else [0] * len(held)
            yield group.exchange(as_real(came), as_real(gone), counts, given)
            nodes = [nodes[place] for nodes, sends in zip(held, senders, strict=True) if sends]
            pieces |= zip(nodes, came.view(len(nodes), size).unbind(), strict=True)
        copies = sent[: len(held) * size]
        copies.view(len(held), size).copy_(_summed(pieces, held, self.micro_batches))
        # An all-gather by name: gloo's own takes twice the time, and all segments would have to be of one size.
        yield group.exchange(as_real(out), as_real(copies), segments, [size] * len(held))
        self._free += [sent, received]  # not where one has failed: nobody knows whether it still writes there

    def _take_scratch(self, like: Tensor, count: int) -> Tensor:
        """Return ``count`` elements or more, as they are, which nobody else has until they are free again."""
        fit = [place for place, each in enumerate(self._free) if (each.dtype, each.device) == (like.dtype, like.device)]
        enough = [place for place in fit if self._free[place].numel() >= count]
        if enough:
            return self._free.pop(enough[0])
        if fit:
            del self._free[fit[0]]  # it is too small, and would stay so
        return like.new_empty(count)

    def _gradient(self, place: int) -> Tensor | None:
        gradient = self.parameters[place].grad
        if gradient is None:
            return None
        gradient = local_of(gradient)
        if gradient.layout != torch.strided:  # of an Embedding(sparse=True), as when it is added to a dense one
            gradient = gradient.to_dense()
        gradient = gradient.resolve_conj()
        return gradient.detach() if gradient.requires_grad else gradient

    def _check(self, bucket: Sequence[Tensor]) -> Tensor:
        """A tensor of the bucket's dtype and device."""
        if any(id(parameter) not in self._place for parameter in bucket):
            raise ValueError("the bucket has a parameter that this sum was not made for")
        kinds = {(_dtype(parameter), parameter.device) for parameter in bucket}
        if len(kinds) > 1:
            found = " and ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
            raise ValueError(f"a bucket must have one dtype on one device, this one has {found}")
        return local_of(bucket[0]).new_empty(0, dtype=_dtype(bucket[0])) if bucket else torch.empty(0)

    def _check_held(
        self, held_by_rank: Mapping[int, Sequence[TreeNode]], world_size: int, rank: int, nodes: Collection[TreeNode]
    ) -> Held:
        if sorted(held_by_rank) != list(range(world_size)):
            raise ValueError(
                f"held_by_rank must name the group's ranks 0 to {world_size - 1}, it names {sorted(held_by_rank)}"
            )
        if list(held_by_rank[rank]) != list(nodes):
            raise ValueError(f"held_by_rank says {list(held_by_rank[rank])} of rank {rank}, which holds {list(nodes)}")
        return tuple(tuple(held_by_rank[other]) for other in range(world_size))


class Summing:
    """`Summing` is the sum of one bucket under way, which ``out`` has at its end."""

    def __init__(self, out: Tensor, exchanges: Iterator[Completion]) -> None:
        self.out = out
        self._exchanges = exchanges
        self._under_way = next(exchanges, None)

    def follow(self) -> None:
        """Wait for it; raises what a collective raises."""
        while self._under_way is not None:
            self._under_way.wait()
            self._under_way = next(self._exchanges, None)

    wait = follow

    def has_ended(self) -> bool:
        """Wait for the end of a broken one, good or bad; false if it had to be abandoned, and may still write."""
        return self._under_way is None or self._under_way.has_ended()


def _flat(gradients: Gradients, bucket: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return those of a bucket one after the other, in a tensor of the kind of ``like``."""
    flat = like.new_empty(_elements(bucket))
    _write(gradients, bucket, flat)
    return flat


def _write(gradients: Gradients, bucket: Sequence[Tensor], out: Tensor) -> None:
    """Write those of a bucket into ``out``, in the order of the parameters' memory."""
    parts = [
        out.new_zeros(own.numel()) if gradient is None else flat_like(own, gradient)
        for own, gradient in zip(map(local_of, bucket), gradients, strict=True)
    ]
    if parts:
        torch.cat(parts, out=out)


@lru_cache(maxsize=16)  # the buckets of a step ask for the same plan, mostly every step
def _plan(held: Held, micro_batches: int) -> tuple[Addition, ...]:
    return combine_plan(dict(enumerate(held)), micro_batches)


def _dtype(parameter: Tensor) -> torch.dtype:
    """What its gradients have: mostly its own, but it may say otherwise."""
    return parameter.grad_dtype or parameter.dtype


def _elements(bucket: Sequence[Tensor]) -> int:
    return sum(int(local_of(parameter).numel()) for parameter in bucket)


def _added(left: Gradients, right: Gradients) -> Gradients:
    """The sum, in the tensors of the left child; those of the right are freed.

    Zeros are not the neutral element for -0.0, which they make 0.0. So a lone gradient gets its zero added too:
    otherwise the bits would depend on whether the zeros were written out, as they are between ranks. Complex gradients
    are added as real numbers: else torch multiplies the second by 1 + 0j, which makes NaN of infinities.
    """
    both = [(as_real(a), as_real(b)) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    alone = [as_real(b if a is None else a) for a, b in zip(left, right, strict=True) if (a is None) != (b is None)]
    if both:
        add_each([a for a, _ in both], [b for _, b in both])
    if alone:
        add_each(alone, 0.0)
    return [b if a is None else a for a, b in zip(left, right, strict=True)]


def _summed(values: dict[TreeNode, Tensor], held: Held, micro_batches: int) -> Tensor:
    """Add all up, in place."""
    for addition in _plan(held, micro_batches):
        total = values[addition.total] = values.pop(addition.left)
        as_real(total).add_(as_real(values.pop(addition.right)))
    return values[root(micro_batches)]


def as_real(tensor: Tensor) -> Tensor:
    """The same memory, with two real numbers for each complex one: back ends do not take those."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _segments(count: int, world_size: int) -> list[int]:
    """The sizes of the parts of ``count`` elements that the ranks add up; the last may be smaller or empty."""
    size = -(-count // world_size)
    return [min(size, max(0, count - rank * size)) for rank in range(world_size)]
