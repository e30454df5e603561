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

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass


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
