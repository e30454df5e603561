from __future__ import annotations

import pytest

from unicron_elastic.training.of_launcher import shown_local_rank


@pytest.mark.parametrize(
    ("rank", "local_rank", "is_one_node", "shown"),
    [(1, 3, True, 1), (0, 3, True, 0), (0, 3, False, 0), (5, 1, False, 1)],
)
def test_somebody_is_the_first_of_a_node(rank: int, local_rank: int, is_one_node: bool, shown: int) -> None:
    assert shown_local_rank(rank, local_rank, is_one_node=is_one_node) == shown
