"""Sums by the fixed tree over real gloo groups: bit for bit the recursive definition, whoever computed what."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unicron_elastic.engine.protocol.shares import deal
from unicron_elastic.engine.protocol.tree import TreeNode, maximal, shares
from unicron_elastic.training.step.tree_sum import TreeSum

DEADLINE_S = 60.0
SHAPES = ((5,), (2, 3), (), (0,), (4, 1))
NUMBERS = (0.0, -0.0, 1.0, -1.0, 0.1, 3e38, -3e38, 1e-45, float("inf"), 1e-8, 16777216.0)
GRADIENTS = st.lists(st.none() | st.integers(0, 1000), min_size=len(SHAPES), max_size=len(SHAPES))


def numbers(seed: int, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Some that are awkward to add, among others."""
    if dtype.is_complex:
        return torch.complex(numbers(seed, shape), numbers(seed + 1, shape)).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(shape, generator=generator)
    choice = torch.randint(2 * len(NUMBERS), tuple(shape), generator=generator)
    return torch.where(choice < len(NUMBERS), torch.tensor(NUMBERS)[choice % len(NUMBERS)], drawn).to(dtype)


def parameters(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in SHAPES]


def leave_gradients(made: Sequence[Tensor], seeds: Sequence[int | None]) -> None:
    """What a backward pass does."""
    for parameter, seed in zip(made, seeds, strict=True):
        assert parameter.grad is None
        parameter.grad = None if seed is None else numbers(seed, parameter.shape, parameter.dtype)


def sum_of_all(batch: Sequence[Sequence[int | None]], dtype: torch.dtype = torch.float32) -> Tensor:
    return definition(batch, (len(batch) - 1).bit_length(), 0, dtype)


def definition(batch: Sequence[Sequence[int | None]], level: int, position: int, dtype: torch.dtype) -> Tensor:
    """The value of a node, by recursion."""
    if level == 0:
        seeds = zip(SHAPES, batch[position], strict=True)
        filled = (torch.zeros(s, dtype=dtype) if seed is None else numbers(seed, s, dtype) for s, seed in seeds)
        return torch.cat([values.reshape(-1) for values in filled])
    left = definition(batch, level - 1, 2 * position, dtype)
    if (2 * position + 1) << (level - 1) >= len(batch):
        return left
    right = definition(batch, level - 1, 2 * position + 1, dtype)
    if dtype.is_complex:
        return torch.complex(left.real + right.real, left.imag + right.imag)
    return left + right


def bits(values: Tensor) -> list[int | str]:
    """Every bit, the sign of zero too; of what is no number only that."""
    values = torch.view_as_real(values).reshape(-1) if values.is_complex() else values
    raw = values.view({4: torch.int32, 8: torch.int64, 2: torch.int16}[values.element_size()]).tolist()
    return ["nan" if unordered else word for unordered, word in zip(values.isnan().tolist(), raw, strict=True)]


class Through:
    """A gloo group, as a sum needs it."""

    def __init__(self, group: Any) -> None:
        self.group = group

    @property
    def size(self) -> int:
        return int(self.group.size())

    def exchange(self, came: Tensor, gone: Tensor, counts: Sequence[int], given: Sequence[int]) -> Any:
        return self.group.alltoall_base(came, gone, counts, given)


class World:
    """The ranks of one gloo group, as threads of this process."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.threads = ThreadPoolExecutor(world_size)
        store, timeout = dist.HashStore(), timedelta(seconds=DEADLINE_S)
        self.groups = self.run(lambda rank: Through(dist.ProcessGroupGloo(store, rank, world_size, timeout)))

    def run(self, part: Callable[[int], Any]) -> list[Any]:
        """``part`` of every rank at once."""
        return list(self.threads.map(part, range(self.world_size), timeout=DEADLINE_S))

    def reduced(self, sums: Sequence[TreeSum], buckets: Sequence[Sequence[int]] | None = None) -> list[Tensor]:
        """What each rank gets, with its buckets one after the other."""
        held = {rank: each.nodes for rank, each in enumerate(sums)}
        cuts = buckets or [range(len(SHAPES))]

        def part(rank: int) -> Tensor:
            made, group = sums[rank].parameters, self.groups[rank]
            return torch.cat([sums[rank].reduce([made[i] for i in cut], group, held, rank) for cut in cuts])

        return self.run(part)


@pytest.fixture(scope="module")
def worlds() -> Iterator[Mapping[int, World]]:
    made = {world_size: World(world_size) for world_size in (1, 2, 3, 4)}
    yield made
    for world in made.values():
        world.groups.clear()
        world.threads.shutdown()


def compute(tree_sum: TreeSum, indices: Sequence[int], batch: Sequence[Sequence[int | None]]) -> None:
    for index in indices:
        leave_gradients(tree_sum.parameters, batch[index])
        tree_sum.add(index)


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    batch=st.lists(GRADIENTS, min_size=1, max_size=17),
    world_size=st.integers(1, 4),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float64, torch.complex64]),
)
def test_any_assignment_and_order_with_losses_gives_the_bits_of_the_definition(
    worlds: Mapping[int, World], data: st.DataObject, batch: list[list[int | None]], world_size: int, dtype: torch.dtype
) -> None:
    sums = [TreeSum(parameters(dtype), len(batch)) for _ in range(data.draw(st.integers(world_size, 5)))]
    owners = data.draw(st.lists(st.integers(0, len(sums) - 1), min_size=len(batch), max_size=len(batch)))
    for index in data.draw(st.permutations(range(len(batch)))):
        compute(sums[owners[index]], [index], batch)
    lost = [index for index, owner in enumerate(owners) if owner >= world_size]
    for rank, indices in enumerate(deal(lost, [0] * world_size)):
        compute(sums[rank], data.draw(st.permutations(indices)), batch)
    cut = data.draw(st.integers(1, len(SHAPES) - 1))
    results = worlds[world_size].reduced(sums[:world_size], [range(cut), range(cut, len(SHAPES))])

    for result in results:
        assert dtype == result.dtype
        assert bits(sum_of_all(batch, dtype)) == bits(result)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("micro_batches", [16, 12, 2])
def test_the_shares_of_any_world_give_the_same_bits(
    worlds: Mapping[int, World], world_size: int, micro_batches: int
) -> None:
    batch = [[7 * index + place for place in range(len(SHAPES))] for index in range(micro_batches)]
    sums = [TreeSum(parameters(), micro_batches) for _ in range(world_size)]
    for rank, share in enumerate(shares(micro_batches, world_size)):
        compute(sums[rank], share, batch)
    plain = sum(definition([seeds], 0, 0, torch.float32) for seeds in batch)

    for result in worlds[world_size].reduced(sums):
        assert bits(sum_of_all(batch)) == bits(result)
    if micro_batches > 2:
        assert bits(plain) != bits(result), "the order makes no difference here: nothing is tested"


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("micro_batches", [12, 6, 3])
def test_a_bucket_may_begin_before_its_last_micro_batch_is_added(
    worlds: Mapping[int, World], world_size: int, micro_batches: int
) -> None:
    batch = [[10 * index + place for place in range(len(SHAPES))] for index in range(micro_batches)]
    batch[-1][1] = batch[0][0] = None
    dealt = shares(micro_batches, world_size)
    held = {rank: maximal(indices, micro_batches) for rank, indices in enumerate(dealt)}
    sums = [TreeSum(parameters(), micro_batches) for _ in range(world_size)]
    world = worlds[world_size]

    def reduce(rank: int) -> tuple[Tensor, Tensor]:
        mine, (*first, last) = sums[rank], dealt[rank]
        compute(mine, first, batch)
        leave_gradients(mine.parameters, batch[last])
        buckets = [mine.parameters[:3], mine.parameters[3:]]
        early = mine.begin(buckets[0], world.groups[rank], held, rank, index=last)
        assert mine.nodes == maximal(first, micro_batches)
        mine.add(last)
        late = mine.reduce(buckets[1], world.groups[rank], held, rank)  # while the first is under way
        early.wait()
        again = [mine.reduce(bucket, world.groups[rank], held, rank) for bucket in buckets]
        return torch.cat([early.out, late]), torch.cat(again)

    right = bits(sum_of_all(batch))
    for early, again in world.run(reduce):
        assert bits(early) == right
        assert bits(again) == right


def test_reducing_leaves_the_partial_sums_and_can_be_done_again(worlds: Mapping[int, World]) -> None:
    batch = [[index, None, 3, 4, index + 50] for index in range(6)]
    sums = [TreeSum(parameters(), 6) for _ in range(2)]
    for each, indices in zip(sums, ([0, 1, 2], [5, 4, 3]), strict=True):
        compute(each, indices, batch)
    before = [bits(each.flat(node, each.parameters)) for each in sums for node in each.nodes]
    first, second = worlds[2].reduced(sums), worlds[2].reduced(sums)

    assert before == [bits(each.flat(node, each.parameters)) for each in sums for node in each.nodes]
    assert bits(first[0]) == bits(second[1])


def test_what_autograd_made_is_taken_and_not_copied() -> None:
    weight, unused = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
    tree_sum = TreeSum([weight, unused], 2)
    (weight * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert weight.grad is not None
    address = weight.grad.data_ptr()
    tree_sum.add(0)
    (weight * 10.0 + unused.sum()).sum().backward()
    tree_sum.add(1)

    assert (weight.grad, unused.grad) == (None, None)
    assert (TreeNode(1, 0),) == tree_sum.nodes
    assert tree_sum.flat(TreeNode(1, 0), [weight, unused]).tolist() == [11.0, 12.0, 13.0, 3.0, 3.0]
    assert [address] == [value[0].data_ptr() for value in tree_sum._values.values() if value[0] is not None]


def test_what_is_held_is_told_from_the_indices_alone() -> None:
    tree_sum = TreeSum(parameters(), 11)
    compute(tree_sum, [10, 3, 9, 2, 8], [[1, 2, 3, 4, 5]] * 11)

    assert maximal({2, 3, 8, 9, 10}, 11) == tree_sum.nodes
    tree_sum.drop()
    assert tree_sum.nodes == ()


def test_a_micro_batch_that_is_refused_leaves_its_gradients() -> None:
    tree_sum = TreeSum(parameters(), 2)
    compute(tree_sum, [0], [[1, 2, 3, 4, 5]])
    leave_gradients(tree_sum.parameters, [1, 2, 3, 4, 5])
    for index, sentence in ((0, "micro-batch 0 is already in the sum"), (2, "there is no micro-batch 2")):
        with pytest.raises(ValueError, match=sentence):
            tree_sum.add(index)
    assert all(parameter.grad is not None for parameter in tree_sum.parameters)
    tree_sum.add(1)
    assert (TreeNode(1, 0),) == tree_sum.nodes


def test_a_sparse_gradient_becomes_dense() -> None:
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    tree_sum = TreeSum(embedding.parameters(), 2)
    for index in range(2):
        embedding(torch.tensor([1, 3, 1])).sum().backward()
        tree_sum.add(index)
    (node,) = tree_sum.nodes
    assert tree_sum.flat(node, tree_sum.parameters).tolist() == [0.0, 0.0, 4.0, 4.0, 0.0, 0.0, 2.0, 2.0]


@pytest.mark.parametrize("of_parameter", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("of_gradient", [torch.contiguous_format, torch.channels_last])
def test_gradients_are_put_in_the_order_of_the_parameters_memory(of_parameter: Any, of_gradient: Any) -> None:
    image = torch.zeros(1, 2, 2, 2).to(memory_format=of_parameter).requires_grad_()
    values = torch.arange(8.0).view(1, 2, 2, 2)
    image.grad = values.to(memory_format=of_gradient)
    tree_sum = TreeSum([image], 1)
    tree_sum.add(0)

    as_it_lies = values if of_parameter is torch.contiguous_format else values.permute(0, 2, 3, 1)
    assert as_it_lies.flatten().tolist() == tree_sum.flat(TreeNode(0, 0), [image]).tolist()


def test_bad_buckets_and_holdings_are_named(worlds: Mapping[int, World]) -> None:
    made = [*parameters(), *parameters(torch.float64)]
    tree_sum = TreeSum(made, 2)
    tree_sum.add(0)
    group = worlds[2].groups[0]
    assert tree_sum.reduce([], group, {0: [TreeNode(0, 0)], 1: [TreeNode(0, 1)]}, 0).numel() == 0
    with pytest.raises(ValueError, match=r"has torch\.float32 on cpu and torch\.float64 on cpu"):
        tree_sum.flat(TreeNode(0, 0), made)
    with pytest.raises(ValueError, match="a parameter that this sum was not made for"):
        tree_sum.flat(TreeNode(0, 0), parameters())
    with pytest.raises(ValueError, match=r"TreeNode\(level=0, position=1\) is not held; held are TreeNode"):
        tree_sum.flat(TreeNode(0, 1), made[:1])
    with pytest.raises(ValueError, match=r"must name the group's ranks 0 to 1, it names \[0\]"):
        tree_sum.reduce(made[:1], group, {0: tree_sum.nodes}, 0)
    with pytest.raises(ValueError, match="of rank 0, which holds"):
        tree_sum.reduce(made[:1], group, {0: [TreeNode(0, 1)], 1: [TreeNode(0, 0)]}, 0)
    with pytest.raises(
        ValueError, match=r"out must be \(5,\) of torch.float32 on cpu, it is \(4,\) of torch.float32 on cpu"
    ):
        tree_sum.reduce(made[:1], group, {0: [TreeNode(0, 0)], 1: [TreeNode(0, 1)]}, 0, torch.empty(4))
    with pytest.raises(ValueError, match="no rank holds micro-batch 1"):
        tree_sum.reduce(made[:1], group, {0: tree_sum.nodes, 1: []}, 0)


# Four ranks compute their shares of eleven micro-batches. Rank 2 dies where the others reduce; they form a new group,
# take over its micro-batches, and reduce again.
SURVIVOR = """
import os, signal, sys
from datetime import timedelta
import torch, torch.distributed as dist
from unicron_elastic.engine.protocol.shares import deal
from unicron_elastic.engine.protocol.tree import maximal, shares
from unicron_elastic.training.step.tree_sum import TreeSum
sys.path.insert(0, sys.argv[3])
from test_tree_sum import SHAPES, Through, compute, parameters

torch.set_num_threads(1)
rank, path = int(sys.argv[1]), sys.argv[2]
batch = [[7 * index + place for place in range(len(SHAPES))] for index in range(11)]
store = dist.FileStore(path, -1)
def world(name, rank, size):
    return Through(dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, timedelta(seconds=60)))
group = world("first", rank, 4)
mine = shares(11, 4)
tree_sum = TreeSum(parameters(), 11)
compute(tree_sum, mine[rank], batch)
if rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    tree_sum.reduce(tree_sum.parameters, group, {r: maximal(mine[r], 11) for r in range(4)}, rank)
except RuntimeError:
    pass
else:
    sys.exit("the reduction with a dead rank came to an end")
left = [0, 1, 3]
dealt = dict(zip(left, deal(mine[2], [0] * len(left)), strict=True))
compute(tree_sum, dealt[rank], batch)
held = {new: maximal([*mine[old], *dealt[old]], 11) for new, old in enumerate(left)}
result = tree_sum.reduce(tree_sum.parameters, world("second", left.index(rank), 3), held, left.index(rank))
print(*result.view(torch.int32).tolist(), flush=True)
os._exit(0)
"""


def test_ranks_that_lose_a_peer_while_they_reduce_get_the_bits_of_the_whole_batch(
    warm_launchers: Any, tmp_path: Path
) -> None:
    script, here = tmp_path / "survivor.py", str(Path(__file__).parent)
    script.write_text(SURVIVOR)
    said = [tmp_path / f"said-{rank}" for rank in range(4)]
    arguments = [(str(script), str(rank), str(tmp_path / "store"), here) for rank in range(4)]
    ranks = [warm_launchers.begin(said[rank], *arguments[rank]) for rank in range(4)]
    try:
        codes = [process.wait(DEADLINE_S) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    told = [each.read_text() for each in said]
    batch = [[7 * index + place for place in range(len(SHAPES))] for index in range(11)]
    expected = sum_of_all(batch).view(torch.int32).tolist()

    assert codes == [0, 0, -signal.SIGKILL, 0], told
    for rank in (0, 1, 3):
        assert expected == [int(word) for word in told[rank].splitlines()[-1].split()]
