from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler, WeightedRandomSampler

from unicron_elastic.training.loader.loader_order import LoaderOrder

DATA = list(range(10))


def seeded(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def loaders() -> dict[str, Any]:
    weights = [1.0 + each for each in DATA]
    return {
        "of the loader": DataLoader(DATA, 3, shuffle=True, generator=seeded()),
        "of the sampler": DataLoader(DATA, 3, sampler=RandomSampler(DATA, generator=seeded())),
        "of both": DataLoader(DATA, 3, sampler=RandomSampler(DATA, generator=seeded()), generator=seeded(4)),
        "of one for both": DataLoader(DATA, 5, sampler=WeightedRandomSampler(weights, 10, generator=seeded())),
        "of none": DataLoader(DATA, 3),
    }


@pytest.mark.parametrize("name", list(loaders()))
@pytest.mark.parametrize("batches", [2, None])
def test_it_is_that_of_a_loader_that_is_iterated_once_for_each_epoch(name: str, batches: int | None) -> None:
    one, other = loaders()[name], loaders()[name]
    count = batches or len(one)
    iterated = []
    for _ in range(4):
        taken = iter(one)
        iterated.append([next(taken).tolist() for _ in range(count)])
    order = LoaderOrder(other, 0, count)
    assert [order.batches(epoch) for epoch in range(4)] == iterated
    assert LoaderOrder(loaders()[name], 0, count).batches(3) == iterated[3]
    assert order.batches(1) == iterated[1]
    assert order.batches(3) == iterated[3]


@pytest.mark.parametrize("name", list(loaders()))
def test_whole_epochs_are_those_of_a_loader_that_is_iterated_to_its_end(name: str) -> None:
    one = loaders()[name]
    iterated = [[batch.tolist() for batch in one] for _ in range(5)]
    order = LoaderOrder(loaders()[name], 0, None)
    assert [order.batches(epoch) for epoch in (4, 1, 3, 0, 2)] == [iterated[epoch] for epoch in (4, 1, 3, 0, 2)]


class Counting(Sampler[int]):
    """`Counting` takes it that the next epoch begins where it has come to the end of one, as accelerate's sampler."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(DATA)

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(len(DATA), generator=seeded(self.epoch)).tolist()
        self.set_epoch(self.epoch + 1)


@pytest.mark.parametrize("asked", [(0, 1, 2), (2, 2, 0), (1, 3), (3, 0, 3)])
def test_samplers_that_count_epochs_are_in_the_one_that_is_asked_for(asked: tuple[int, ...]) -> None:
    order = LoaderOrder(DataLoader(DATA, 5, sampler=Counting()), 0, None)
    for epoch in asked:
        whole = torch.randperm(len(DATA), generator=seeded(epoch)).tolist()
        assert order.batches(epoch) == [whole[:5], whole[5:]]


def test_without_a_generator_it_depends_on_seed_and_epoch() -> None:
    loader: Any = DataLoader(DATA, 3, shuffle=True)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    one = [LoaderOrder(loader, 0, 4).batches(epoch) for epoch in (0, 1)]
    torch.manual_seed(6)
    other = LoaderOrder(loader, 0, 4)
    assert [other.batches(1), other.batches(0)] == one[::-1]
    assert one[0] != one[1]
    assert LoaderOrder(loader, 1, 4).batches(0) != one[0]
    assert not torch.equal(torch.get_rng_state(), state)


class Told(Sampler[int]):
    """`Told` has an order by the epoch that it is told of."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Begin it."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(each + self.epoch) % 10 for each in DATA])


def test_a_sampler_is_told_of_epochs() -> None:
    loader: Any = DataLoader(DATA, 5, sampler=Told())
    order = LoaderOrder(loader, 0, 2)
    order.begin_epoch(2)
    assert order.batches(2)[0] == [2, 3, 4, 5, 6]
