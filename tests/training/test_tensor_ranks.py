"""Who of the processes that compute one part of a micro-batch together has other numbers."""

from __future__ import annotations

import pytest

from unicron_elastic.training.shard.tensor_ranks import first_unlike


@pytest.mark.parametrize(
    ("told", "tensor", "found"),
    [
        ([[1, 2], [3, 4]], 1, None),
        ([[1, 2], [1, 2], [3, 4], [3, 4]], 2, None),
        ([[1, 2], [1, 2], [3, 4], [3, 5]], 2, (1, 3)),
        ([[1, 2], [7, 2], [3, 4], [3, 5]], 2, (0, 1)),
        ([[1], [1], [1], [2], [2], [3]], 3, (0, 5)),
        ([[], []], 2, None),
    ],
)
def test_neighbours_have_the_same(told: list[list[int]], tensor: int, found: tuple[int, int] | None) -> None:
    assert first_unlike([list(map(str, each)) for each in told], tensor) == found
