"""Which rank takes over which micro-batches of those that were lost, and how sets of them are written. Pure."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Iterable, Sequence


def deal(lost: Collection[int], held: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return by rank what it takes over of the ``lost`` micro-batches; ``held`` is how many each rank has already.

    Whoever has fewest gets one more, until none is left; then neighbours are given to the same rank.
    """
    counts = list(held)
    heap = [(count, rank) for rank, count in enumerate(counts)]
    heapq.heapify(heap)
    for _ in lost:
        count, rank = heap[0]
        heapq.heapreplace(heap, (count + 1, rank))
    for count, rank in heap:
        counts[rank] = count - held[rank]
    in_order = iter(sorted(lost))
    return tuple(tuple(itertools.islice(in_order, count)) for count in counts)


def to_ranges(indices: Iterable[int]) -> list[list[int]]:
    """Indices as [first, last + 1] pairs, which stay short however large the batch is."""
    ranges: list[list[int]] = []
    for index in sorted(indices):
        if ranges and ranges[-1][1] == index:
            ranges[-1][1] = index + 1
        else:
            ranges.append([index, index + 1])
    return ranges


def from_ranges(ranges: Sequence[Sequence[int]], below: int) -> frozenset[int]:
    """What ``to_ranges`` was given. Raises ValueError for anything but ranges of indices ``below`` that."""
    indices: set[int] = set()
    for first, end in ranges:
        if not (isinstance(first, int) and isinstance(end, int) and 0 <= first < end <= below):
            raise ValueError(f"micro-batches must be ranges below {below}, got [{first}, {end}]")
        indices.update(range(first, end))
    return frozenset(indices)
