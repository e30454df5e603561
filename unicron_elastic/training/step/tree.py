"""The fixed tree by which the micro-batches of a step are summed, so that the sum does not depend on who computed what.

Over the indices 0..M-1 stands one binary tree. The node (level l, position j) covers the indices from ``j * 2**l`` to
below ``min((j + 1) * 2**l, M)``; its value is the value of its left child (l-1, 2j) plus that of its right child
(l-1, 2j+1), or the left child's alone where the right one covers nothing. Floating-point addition is not associative:
fixing which two values are added makes the bits fixed, and leaves open where and when each addition is done.

A node whose right child covers nothing has the value of its left child, so several nodes would name one value. Here
only the lowest of them is used. For M = 12 the root (4, 0) is (3, 0) + (2, 2), and (3, 1) does not occur.

Invariant: nodes held together cover disjoint indices, and no two of them can be added to make a node of the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from unicron_elastic.compat.tensors import add_each
from unicron_elastic.state.nested import flat_like
from unicron_elastic.training.step.collective import as_real


@dataclass(frozen=True, slots=True, order=True)
class TreeNode:
    """One node of the tree; (0, i) is the leaf of micro-batch i."""

    level: int
    position: int

    @property
    def size(self) -> int:
        """How many leaves it has in a tree that is full."""
        return 1 << self.level

    @property
    def start(self) -> int:
        """The first index that it covers."""
        return self.position << self.level

    @property
    def parent(self) -> TreeNode:
        """The node above."""
        return TreeNode(self.level + 1, self.position >> 1)

    @property
    def sibling(self) -> TreeNode:
        """The other child of the node above."""
        return TreeNode(self.level, self.position ^ 1)


@dataclass(frozen=True, slots=True)
class Addition:
    """One step of summing: the values of ``left`` and ``right`` give way to their sum, the value of ``total``."""

    left: TreeNode
    right: TreeNode
    total: TreeNode


def covers(node: TreeNode, micro_batches: int) -> range:
    """The indices whose sum is the node's value, in a tree over ``micro_batches`` leaves."""
    return range(node.start, min(node.start + node.size, micro_batches))


def root(micro_batches: int) -> TreeNode:
    """The node whose value is the sum of all.

    Raises:
        ValueError: there is no micro-batch.
    """
    if micro_batches < 1:
        raise ValueError(f"a step needs at least one micro-batch, not {micro_batches}")
    return TreeNode((micro_batches - 1).bit_length(), 0)


def merge(held: Collection[TreeNode], index: int, micro_batches: int) -> tuple[Addition, ...]:
    """The additions to make, in order, when micro-batch ``index`` has been computed beside what is ``held``.

    Afterwards the last addition's total is held in place of all that was added, or the leaf itself if there is none.

    Args:
        held: nodes that cover disjoint indices; give a set or a dictionary, it is searched.
        index: of the micro-batch, 0 to ``micro_batches - 1``.
        micro_batches: of the step.

    Raises:
        ValueError: the index does not exist, or is covered by a node that is held.
    """
    _check_index(index, micro_batches)
    above = (TreeNode(level, index >> level) for level in range(root(micro_batches).level + 1))
    if any(_lowest(node, micro_batches) in held for node in above):
        raise ValueError(f"micro-batch {index} is already in the sum")
    return _climb(held, TreeNode(0, index), micro_batches)


def maximal(indices: Iterable[int], micro_batches: int) -> tuple[TreeNode, ...]:
    """The nodes that are held by who has computed ``indices``, in whatever order, sorted by the indices they cover.

    Raises:
        ValueError: an index does not exist or occurs twice.
    """
    top = root(micro_batches)
    nodes: list[TreeNode] = []
    for first, end in _runs(indices, micro_batches):
        start = first
        limit = top.size if end == micro_batches else end  # beyond the last leaf nothing is missing
        while start < end:
            aligned = (start & -start).bit_length() - 1 if start else top.level
            level = min(aligned, (limit - start).bit_length() - 1)
            nodes.append(_lowest(TreeNode(level, start >> level), micro_batches))
            start += 1 << level
    return tuple(nodes)


def shares(micro_batches: int, world_size: int) -> list[range]:
    """Return who computes what when nobody is missing: one contiguous block for each rank.

    The sizes differ by at most one; where that leaves a choice, each boundary is the even one of the two possible,
    because an even boundary parts no two leaves that are added to each other. If there are fewer micro-batches than
    ranks, the first ranks get one each.

    Raises:
        ValueError: there is no micro-batch, or no rank.
    """
    root(micro_batches)
    blocks = _blocks(range(micro_batches), world_size)
    return [range(block[0], block[-1] + 1) if block else range(0) for block in blocks]


def combine_plan(held: Mapping[int, Iterable[TreeNode]], micro_batches: int) -> tuple[Addition, ...]:
    """The additions that make the sum of all from what the ranks hold, in an order that any of them can follow.

    Args:
        held: for each rank the nodes that it holds; together they must cover every micro-batch once.
        micro_batches: of the step.

    Returns:
        The additions, lowest first; none if one rank holds the root. The last total is ``root(micro_batches)``.

    Raises:
        ValueError: a micro-batch is held by no rank or by two, or a node is not one of this tree.
    """
    _check_cover(held, micro_batches)
    present: set[TreeNode] = set()
    plan: list[Addition] = []
    for node in sorted((node for nodes in held.values() for node in nodes), key=_start):
        additions = _climb(present, node, micro_batches)
        for addition in additions:
            present -= {addition.left, addition.right}
        present.add(additions[-1].total if additions else node)
        plan += additions
    return tuple(plan)


def _climb(held: Collection[TreeNode], node: TreeNode, micro_batches: int) -> tuple[Addition, ...]:
    """Add ``node`` to its sibling as long as that is held, going up."""
    top = root(micro_batches).level
    additions: list[Addition] = []
    at = value = node  # `at` walks through the nodes without a right child, whose value goes by its lowest name
    while at.level < top:
        sibling = at.sibling
        if sibling.start < micro_batches:
            sibling = _lowest(sibling, micro_batches)
            if sibling not in held:
                break
            left, right = sorted((value, sibling), key=_start)
            value = at.parent
            additions.append(Addition(left, right, value))
        at = at.parent
    return tuple(additions)


def _lowest(node: TreeNode, micro_batches: int) -> TreeNode:
    """The lowest node of the same value: down to the left as long as the right child covers nothing."""
    while node.level and node.start + node.size // 2 >= micro_batches:
        node = TreeNode(node.level - 1, node.position * 2)
    return node


def _blocks(indices: Sequence[int], count: int) -> list[Sequence[int]]:
    """Cut ``indices`` into ``count`` consecutive blocks, by the rule of ``shares``."""
    if count < 1:
        raise ValueError(f"micro-batches can only be given to at least one rank, not to {count}")
    size, larger = divmod(len(indices), count)
    blocks: list[Sequence[int]] = []
    start = 0
    for left in range(count, 0, -1):
        end = start + size
        may_be_larger, must_be_larger = larger > 0, larger == left
        # With less than one for each, the first ranks get them: an even boundary would only pass them on to the last.
        if must_be_larger or (may_be_larger and (size == 0 or indices[end] % 2)):
            end, larger = end + 1, larger - 1
        blocks.append(indices[start:end])
        start = end
    return blocks


def _runs(indices: Iterable[int], micro_batches: int) -> list[tuple[int, int]]:
    """Each run of neighbours as its first index and the one after its last, in rising order."""
    runs: list[tuple[int, int]] = []
    for index in sorted(indices):
        _check_index(index, micro_batches)
        if runs and index < runs[-1][1]:
            raise ValueError(f"micro-batch {index} is named twice; each must be named once")
        if runs and index == runs[-1][1]:
            runs[-1] = (runs[-1][0], index + 1)
        else:
            runs.append((index, index + 1))
    return runs


def _check_index(index: int, micro_batches: int) -> None:
    root(micro_batches)
    if not 0 <= index < micro_batches:
        raise ValueError(f"there is no micro-batch {index}; this step has 0 to {micro_batches - 1}")


def _check_cover(held: Mapping[int, Iterable[TreeNode]], micro_batches: int) -> None:
    root(micro_batches)
    holder: dict[int, int] = {}
    for rank, nodes in held.items():
        for node in nodes:
            if node.level < 0 or node.start not in range(micro_batches) or node != _lowest(node, micro_batches):
                raise ValueError(f"rank {rank} holds {node}, which is not in the tree of {micro_batches} micro-batches")
            for index in covers(node, micro_batches):
                if index in holder:
                    raise ValueError(f"micro-batch {index} is held by rank {holder[index]} and by rank {rank}")
                holder[index] = rank
    missing = [index for index in range(micro_batches) if index not in holder]
    if missing:
        raise ValueError(f"no rank holds micro-batch {_listed(missing)}")


def _listed(numbers: Sequence[int]) -> str:
    """The first ten, and how many there are."""
    text = ", ".join(map(str, numbers[:10]))
    return text if len(numbers) <= 10 else f"{text}, ... ({len(numbers)} in all)"


def _start(node: TreeNode) -> int:
    return node.start


# Sums the gradients of micro-batches by the fixed tree of ``tree.py``: the same bits, whoever computed what.
#
# Each rank keeps one gradient for each node that it holds, and adds two as soon as both are there. Across ranks only
# the top of the tree is left. The gradients of a bucket are cut into as many segments as there are ranks; each rank
# gets all pieces of its own segment, adds them as the tree says, and the sums are gathered. When every rank holds one
# piece, which is so if the micro-batches of each are a power of two, that is the traffic of a ring all-reduce.
#
# Memory, in buffers of the size of all gradients: computing k micro-batches in rising order from a multiple of a
# power of two >= k takes at most ``floor(log2(k)) + 1``, the one that backward is filling counted: 4 for k = 8 and 2
# for k = 2, against 1 for plain accumulation. From any other start it is at most twice that, and in random order it
# may be k / 2. Reducing a bucket of n elements takes (1 + q / W) n elements beside them, with q pieces on all W
# ranks; they are kept for the next bucket, since memory that is new each time costs more than the sum. The result
# takes n more, or ``out``.


Gradients = list[Tensor | None]  # one for each parameter; None where no micro-batch of the node gave it any
Held = tuple[tuple[TreeNode, ...], ...]


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
        self._scratch: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
        self.wait: Callable[[Any], object] = lambda work: work.wait()  # for a collective

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
        flat = like.new_empty(_elements(bucket))
        self._write(node, bucket, flat)
        return flat

    def reduce(
        self,
        bucket: Sequence[Tensor],
        group: Any,
        held_by_rank: Mapping[int, Sequence[TreeNode]],
        rank: int,
        out: Tensor | None = None,
    ) -> Tensor:
        """The sum over all micro-batches for the parameters of ``bucket``: the same bits on every rank.

        It takes one all-to-all for each piece of the rank that has most, and one more. They are out of place: if one
        fails, the partial sums are as they were. Everybody exchanges with everybody, so all notice the loss of any.

        Args:
            bucket: some of the parameters, all of one dtype on one device, in the same order on each rank.
            group: a process group; its ranks count from 0.
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
        held = self._check_held(held_by_rank, group.size(), rank)
        _plan(held, self.micro_batches)  # raises unless every micro-batch is there once
        like = self._check(bucket)
        count = _elements(bucket)
        out = like.new_empty(count) if out is None else out
        if (out.shape, out.dtype, out.device) != ((count,), like.dtype, like.device):
            found = f"{tuple(out.shape)} of {out.dtype} on {out.device}"
            raise ValueError(f"out must be ({count},) of {like.dtype} on {like.device}, it is {found}")
        if count == 0:
            return out
        if len(held) == 1:
            return out.copy_(_summed({node: self.flat(node, bucket) for node in held[0]}, held, self.micro_batches))
        try:
            self._reduce(bucket, group, held, rank, out)
        except BaseException:
            self._scratch.clear()  # nobody knows whether the broken collective still writes there
            raise
        return out

    def _reduce(self, bucket: Sequence[Tensor], group: Any, held: Held, rank: int, out: Tensor) -> None:
        """Exchange the pieces by segments, add those of this rank's segment, and exchange the sums."""
        segments = _segments(out.numel(), len(held))
        size = segments[rank]
        sent = self._scratch_for(out, "sent", max(out.numel(), len(held) * size))
        received = self._scratch_for(out, "received", sum(map(len, held)) * size)
        pieces: dict[TreeNode, Tensor] = {}
        for place in range(max(map(len, held))):
            senders = [place < len(nodes) for nodes in held]
            begin = len(pieces) * size
            came = received[begin : begin + sum(senders) * size]
            gone = sent[: out.numel() * senders[rank]]
            if senders[rank]:
                self._write(held[rank][place], bucket, gone)
            counts = [size * sends for sends in senders]
            given = segments if senders[rank] else [0] * len(held)
            self.wait(group.alltoall_base(as_real(came), as_real(gone), counts, given))
            nodes = [nodes[place] for nodes, sends in zip(held, senders, strict=True) if sends]
            pieces |= zip(nodes, came.view(len(nodes), size).unbind(), strict=True)
        mine = _summed(pieces, held, self.micro_batches)
        copies = sent[: len(held) * size]
        copies.view(len(held), size).copy_(mine)
        # An all-gather by name: gloo's own takes twice the time, and all segments would have to be of one size.
        self.wait(group.alltoall_base(as_real(out), as_real(copies), segments, [size] * len(held)))

    def _scratch_for(self, like: Tensor, use: str, count: int) -> Tensor:
        """``count`` elements as they are; the largest that was asked for is kept."""
        key = (use, like.dtype, like.device)
        if key not in self._scratch or self._scratch[key].numel() < count:
            self._scratch[key] = like.new_empty(count)
        return self._scratch[key][:count]

    def _gradient(self, place: int) -> Tensor | None:
        gradient = self.parameters[place].grad
        if gradient is None:
            return None
        if gradient.layout != torch.strided:  # of an Embedding(sparse=True), as when it is added to a dense one
            gradient = gradient.to_dense()
        gradient = gradient.resolve_conj()
        return gradient.detach() if gradient.requires_grad else gradient

    def _write(self, node: TreeNode, bucket: Sequence[Tensor], out: Tensor) -> None:
        """Write the partial sum of ``node`` for the bucket into ``out``, in the order of the parameters' memory."""
        if node not in self._values:
            raise ValueError(f"{node} is not held; held are {', '.join(map(str, self.nodes)) or 'none'}")
        value = self._values[node]
        gradients = [value[self._place[id(parameter)]] for parameter in bucket]
        parts = [
            out.new_zeros(parameter.numel()) if gradient is None else flat_like(parameter, gradient)
            for parameter, gradient in zip(bucket, gradients, strict=True)
        ]
        if parts:
            torch.cat(parts, out=out)

    def _check(self, bucket: Sequence[Tensor]) -> Tensor:
        """A tensor of the bucket's dtype and device."""
        if any(id(parameter) not in self._place for parameter in bucket):
            raise ValueError("the bucket has a parameter that this sum was not made for")
        kinds = {(_dtype(parameter), parameter.device) for parameter in bucket}
        if len(kinds) > 1:
            found = " and ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
            raise ValueError(f"a bucket must have one dtype on one device, this one has {found}")
        return bucket[0].new_empty(0, dtype=_dtype(bucket[0])) if bucket else torch.empty(0)

    def _check_held(self, held_by_rank: Mapping[int, Sequence[TreeNode]], world_size: int, rank: int) -> Held:
        if sorted(held_by_rank) != list(range(world_size)):
            raise ValueError(
                f"held_by_rank must name the group's ranks 0 to {world_size - 1}, it names {sorted(held_by_rank)}"
            )
        if tuple(held_by_rank[rank]) != self.nodes:
            raise ValueError(
                f"held_by_rank says {list(held_by_rank[rank])} of rank {rank}, which holds {list(self.nodes)}"
            )
        return tuple(tuple(held_by_rank[other]) for other in range(world_size))


@lru_cache(maxsize=16)  # the buckets of a step ask for the same plan, mostly every step
def _plan(held: Held, micro_batches: int) -> tuple[Addition, ...]:
    return combine_plan(dict(enumerate(held)), micro_batches)


def _dtype(parameter: Tensor) -> torch.dtype:
    """What its gradients have: mostly its own, but it may say otherwise."""
    return parameter.grad_dtype or parameter.dtype


def _elements(bucket: Sequence[Tensor]) -> int:
    return sum(int(parameter.numel()) for parameter in bucket)


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


def _segments(count: int, world_size: int) -> list[int]:
    """The sizes of the parts of ``count`` elements that the ranks add up; the last may be smaller or empty."""
    size = -(-count // world_size)
    return [min(size, max(0, count - rank * size)) for rank in range(world_size)]
