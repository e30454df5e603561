"""Who takes over which micro-batches, and how sets of them are written."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_elastic.engine.protocol.shares import deal, from_ranges, to_ranges

INDICES = st.frozensets(st.integers(0, 60))


@given(INDICES, st.lists(st.integers(0, 12), min_size=1, max_size=6))
def test_each_lost_micro_batch_is_dealt_once_and_nobody_gets_two_more_than_needed(
    lost: frozenset[int], held: list[int]
) -> None:
    dealt = deal(lost, held)
    assert len(dealt) == len(held)
    assert sorted(index for more in dealt for index in more) == sorted(lost)
    after = [count + len(more) for count, more in zip(held, dealt, strict=True)]
    assert all(count <= min(after) + 1 for count, more in zip(after, dealt, strict=True) if more)


def test_neighbours_go_to_the_same_rank() -> None:
    assert deal([4, 5, 6, 7], [2, 2]) == ((4, 5), (6, 7))


def test_whoever_has_fewest_gets_more() -> None:
    assert deal([4, 5, 6], [3, 0]) == ((), (4, 5, 6))


@given(INDICES)
def test_ranges_are_read_as_they_were_written(indices: frozenset[int]) -> None:
    assert from_ranges(json.loads(json.dumps(to_ranges(indices))), 61) == indices


def test_ranges_are_short_however_large_the_batch_is() -> None:
    assert to_ranges([*range(1000), *range(2000, 3000)]) == [[0, 1000], [2000, 3000]]


@pytest.mark.parametrize("ranges", [[[0, 9]], [[-1, 2]], [[3, 3]], [[4, 2]], [["0", 2]], [[0.0, 2]], [[0, None]]])
def test_anything_but_ranges_below_the_limit_is_refused(ranges: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="must be ranges below 8"):
        from_ranges(ranges, 8)


@pytest.mark.parametrize("ranges", [[[0, 1, 2]], [[0]]])
def test_a_range_has_two_ends(ranges: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="values to unpack"):
        from_ranges(ranges, 8)
