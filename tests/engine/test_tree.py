"""The fixed tree: whoever computes what in which order, the same two values are added, in the same places."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unicron_elastic.engine.protocol.shares import deal
from unicron_elastic.engine.protocol.tree import TreeNode, combine_plan, covers, maximal, merge, root, shares

SIZES = st.integers(1, 70)


def definition(level: int, position: int, micro_batches: int) -> object:
    """The value of a node as the definition has it, with a pair for each addition and an index for each leaf."""
    if level == 0:
        return position
    left = definition(level - 1, 2 * position, micro_batches)
    if (2 * position + 1) << (level - 1) >= micro_batches:
        return left
    return (left, definition(level - 1, 2 * position + 1, micro_batches))


def sum_of_all(micro_batches: int) -> object:
    level = 0
    while 1 << level < micro_batches:
        level += 1
    return definition(level, 0, micro_batches)


class Rank:
    """What one rank holds, with additions written down in place of being made."""

    def __init__(self, micro_batches: int) -> None:
        self.micro_batches = micro_batches
        self.values: dict[TreeNode, object] = {}

    def add(self, index: int) -> None:
        additions = merge(self.values, index, self.micro_batches)
        self.values[TreeNode(0, index)] = index
        for addition in additions:
            self.values[addition.total] = (self.values.pop(addition.left), self.values.pop(addition.right))

    @property
    def indices(self) -> set[int]:
        return {index for node in self.values for index in covers(node, self.micro_batches)}


def combined(ranks: dict[int, Rank], micro_batches: int) -> object:
    values = {node: value for rank in ranks.values() for node, value in rank.values.items()}
    for addition in combine_plan({number: rank.values for number, rank in ranks.items()}, micro_batches):
        values[addition.total] = (values.pop(addition.left), values.pop(addition.right))
    assert list(values) == [root(micro_batches)]
    return values[root(micro_batches)]


@settings(deadline=None)
@given(data=st.data(), micro_batches=SIZES, world_size=st.integers(1, 6))
def test_any_assignment_in_any_order_with_losses_makes_the_same_additions(
    data: st.DataObject, micro_batches: int, world_size: int
) -> None:
    ranks = {number: Rank(micro_batches) for number in range(world_size)}
    owners = data.draw(st.lists(st.integers(0, world_size - 1), min_size=micro_batches, max_size=micro_batches))
    to_do = data.draw(st.permutations([(owner, index) for index, owner in enumerate(owners)]))
    for _ in range(data.draw(st.integers(0, world_size - 1))):
        for owner, index in to_do[: data.draw(st.integers(0, len(to_do)))]:
            ranks[owner].add(index)
        gone = data.draw(st.sampled_from(sorted(ranks)))
        del ranks[gone]
        done = {index for rank in ranks.values() for index in rank.indices}
        dealt = zip(sorted(ranks), deal(set(range(micro_batches)) - done, [0] * len(ranks)), strict=True)
        to_do = data.draw(st.permutations([(rank, index) for rank, block in dealt for index in block]))
    for owner, index in to_do:
        ranks[owner].add(index)

    assert sum_of_all(micro_batches) == combined(ranks, micro_batches)


@settings(deadline=None)
@given(data=st.data(), micro_batches=SIZES)
def test_what_is_held_depends_on_the_indices_only(data: st.DataObject, micro_batches: int) -> None:
    indices = data.draw(st.sets(st.integers(0, micro_batches - 1)))
    rank = Rank(micro_batches)
    for index in data.draw(st.permutations(sorted(indices))):
        rank.add(index)

    assert set(maximal(indices, micro_batches)) == set(rank.values)
    assert indices == rank.indices
    for node, value in rank.values.items():
        assert definition(node.level, node.position, micro_batches) == value


@settings(deadline=None)
@given(micro_batches=SIZES, data=st.data())
def test_a_contiguous_block_is_held_in_few_nodes(micro_batches: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, micro_batches - 1))
    end = data.draw(st.integers(start + 1, micro_batches))
    rank = Rank(micro_batches)
    for index in range(start, end):
        rank.add(index)
        assert len(rank.values) <= 2 * (end - start).bit_length()


@settings(deadline=None)
@given(level=st.integers(0, 6), position=st.integers(0, 5), micro_batches=st.integers(1, 400))
def test_an_aligned_block_takes_the_buffers_that_are_stated(level: int, position: int, micro_batches: int) -> None:
    rank, most = Rank(micro_batches), 0
    for index in covers(TreeNode(level, position), micro_batches):
        most = max(most, len(rank.values) + 1)  # the one that backward is filling, too
        rank.add(index)

    assert most <= level + 1
    assert len(rank.values) <= 1


def test_the_root_of_twelve() -> None:
    assert sum_of_all(8) == (((0, 1), (2, 3)), ((4, 5), (6, 7)))
    assert sum_of_all(12) == ((((0, 1), (2, 3)), ((4, 5), (6, 7))), ((8, 9), (10, 11)))
    assert (TreeNode(4, 0),) == maximal(range(12), 12)


def test_a_node_without_right_child_goes_by_its_lowest_name() -> None:
    """Of 9 leaves the last is the whole right half of the tree."""
    (last,) = merge({TreeNode(3, 0)}, 8, 9)

    assert (TreeNode(3, 0), TreeNode(0, 8), TreeNode(4, 0)) == (last.left, last.right, last.total)


@settings(deadline=None)
@given(micro_batches=st.integers(1, 300), world_size=st.integers(1, 40))
def test_shares_are_contiguous_and_even(micro_batches: int, world_size: int) -> None:
    blocks = shares(micro_batches, world_size)
    sizes = [len(block) for block in blocks]

    assert list(range(micro_batches)) == [index for block in blocks for index in block]
    assert world_size == len(blocks)
    assert max(sizes) - min(sizes) <= 1
    if micro_batches >= 2 * world_size and micro_batches % world_size:
        odd = sum(block.start % 2 for block in blocks)
        assert odd <= sum(r * micro_batches // world_size % 2 for r in range(world_size))


def test_shares_where_they_can_be_whole_subtrees() -> None:
    assert [range(4), range(4, 8), range(8, 12), range(12, 16)] == shares(16, 4)
    assert [range(4), range(4, 8), range(8, 13)] == shares(13, 3)
    assert [range(2), range(2, 4), range(4, 7), range(7, 10)] == shares(10, 4)
    assert [range(1), range(1, 2), range(0)] == shares(2, 3)


@pytest.mark.parametrize(
    ("held", "sentence"),
    [
        ({0: [TreeNode(1, 0)], 1: [TreeNode(0, 3)]}, "no rank holds micro-batch 2$"),
        ({0: [TreeNode(1, 0)], 1: [TreeNode(1, 1), TreeNode(0, 1)]}, "micro-batch 1 is held by rank 0 and by rank 1"),
        (
            {0: [TreeNode(3, 0)]},
            r"rank 0 holds TreeNode\(level=3, position=0\), which is not in the tree of 4 micro-batches",
        ),
        ({0: [TreeNode(0, 4)]}, "which is not in the tree"),
        ({0: [TreeNode(-1, 0)]}, "which is not in the tree"),
        ({}, "no rank holds micro-batch 0, 1, 2, 3"),
    ],
)
def test_a_cover_with_holes_or_overlaps_is_refused(held: dict[int, Sequence[TreeNode]], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        combine_plan(held, 4)


def test_many_missing_are_counted() -> None:
    with pytest.raises(ValueError, match=r"0, 1, 2, 3, 4, 5, 6, 7, 8, 9, \.\.\. \(20 in all\)"):
        combine_plan({}, 20)


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="there is no micro-batch 4; this step has 0 to 3"):
        merge((), 4, 4)
    with pytest.raises(ValueError, match="micro-batch 1 is already in the sum"):
        merge({TreeNode(1, 0)}, 1, 4)
    with pytest.raises(ValueError, match="there is no micro-batch -1"):
        maximal([0, -1], 4)
    with pytest.raises(ValueError, match="micro-batch 2 is named twice"):
        maximal([2, 1, 2], 4)
    with pytest.raises(ValueError, match="at least one micro-batch, not 0"):
        shares(0, 2)
    with pytest.raises(ValueError, match="at least one rank, not to 0"):
        shares(1, 0)
