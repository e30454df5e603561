"""The dynamic programme of the Unicron paper (arXiv 2401.00134), as it stands there: the reference for the fast one.

S(i, j) = max over k of S(i-1, j-k) + G(t_i, k), O(m * n**2) for m tasks and n nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unicron_elastic.planning.model.tasks import Ints
from unicron_elastic.planning.model.waf import IMPOSSIBLE


def plain_optimum(rows: Sequence[Ints], nodes: int) -> list[int]:
    """How many nodes each task gets: the largest sum of keys with at most ``nodes`` in all.

    ``rows``: of each task its keys by number of nodes, shape (at most nodes + 1,). Of equal optima the one that gives
    the first task most, then the second, and so on. Raises ``ValueError`` if there is no solution.
    """
    best = [np.zeros(nodes + 1, dtype=np.int64)]  # best[-1 - i]: of the last i tasks on at most j nodes
    for row in reversed(rows):
        best.append(_with(row, best[-1]))
    if best[-1][nodes] <= IMPOSSIBLE // 2:
        raise ValueError(f"the tasks cannot share {nodes} nodes: some must have more than there are")
    found, left = [], nodes
    for row, whole, rest in zip(rows, best[:0:-1], best[-2::-1], strict=True):
        limit = min(len(row), left + 1)
        reached = row[:limit] + rest[left::-1][:limit] == whole[left]
        found.append(int(np.flatnonzero(reached & (row[:limit] > IMPOSSIBLE))[-1]))
        left -= found[-1]
    return found


def _with(row: Ints, rest: Ints) -> Ints:
    """S(i, .) from S(i-1, .)."""
    found = np.full_like(rest, IMPOSSIBLE)
    buffer = np.empty_like(rest)
    for count in np.flatnonzero(row > IMPOSSIBLE):
        width = len(rest) - int(count)
        sums = np.add(rest[:width], row[count], out=buffer[:width])
        np.maximum(found[count:], sums, out=found[count:])
    return np.maximum(found, IMPOSSIBLE, out=found)
