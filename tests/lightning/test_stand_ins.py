from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.utilities.data import extract_batch_size
from torch.utils.data import DataLoader

from unicron_elastic.lightning.stand_ins import StandIn, StandIns, limited
from unicron_elastic.training.loader.epoch_plan import EpochPlan


@given(st.integers(1, 60), st.integers(1, 5), st.one_of(st.integers(0, 70), st.floats(0, 1)))
def test_a_limit_is_that_of_a_rank(batches: int, ranks: int, limit: float) -> None:
    taken, turns = limited(batches, ranks, limit)
    assert turns == EpochPlan(batches, 1, ranks).turns
    of_a_rank = min(turns, limit) if isinstance(limit, int) else int(turns * limit)
    assert (taken == batches) == (of_a_rank == turns)
    if taken:
        assert EpochPlan(taken, 1, ranks).turns == of_a_rank


@pytest.mark.parametrize(("limit", "taken"), [(1.0, 23), (1, 3), (0.5, 12), (100, 23), (0, 0)])
def test_one_is_a_batch_and_all_are_one_point_nought(limit: float, taken: int) -> None:
    assert limited(23, 3, limit) == (taken, 8)


def test_who_asks_for_a_size_gets_that_of_a_batch() -> None:
    assert extract_batch_size(StandIn(4)) == 4


def test_each_that_is_taken_is_told() -> None:
    told: list[int] = []
    stand_ins = StandIns(DataLoader([1, 2, 3], 2), EpochPlan(5, 2, 1), 5, lambda: told.append(len(told)))
    assert len(stand_ins) == 5
    each = iter(stand_ins)
    assert told == []
    assert {type(one) for one in islice(each, 3)} == {StandIn}
    assert told == [0, 1, 2]
