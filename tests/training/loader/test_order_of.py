from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from unicron_elastic.training.loader.order_of import order_of

DATA = TensorDataset(torch.arange(7))


def made(kind: str) -> DataLoader[Any]:
    """Return a loader with a generator of this kind."""
    generator = torch.Generator().manual_seed(3)
    if kind == "sampler":
        return DataLoader(DATA, 2, sampler=RandomSampler(DATA, generator=generator))
    if kind == "both":
        other = torch.Generator().manual_seed(4)
        return DataLoader(DATA, 2, sampler=RandomSampler(DATA, generator=generator), generator=other)
    return DataLoader(DATA, 2, shuffle=True, generator=generator)


def iterated(kind: str, epochs: int) -> list[list[list[int]]]:
    loader = made(kind)
    return [[batch.tolist() for (batch,) in loader] for _ in range(epochs)]


@pytest.mark.parametrize("kind", ["loader", "sampler", "both"])
def test_a_generator_goes_on_from_epoch_to_epoch_as_where_the_loader_is_iterated(kind: str) -> None:
    order = order_of(made(kind), 0)
    assert [[order.batch(epoch, each) for each in range(4)] for epoch in range(5)] == iterated(kind, 5)


@pytest.mark.parametrize("kind", ["loader", "sampler", "both"])
def test_who_begins_in_the_middle_or_goes_back_has_the_same(kind: str) -> None:
    order, there = order_of(made(kind), 0), iterated(kind, 6)
    for epoch in (4, 1, 5, 0, 3, 4):
        assert [order.batch(epoch, each) for each in range(4)] == there[epoch]


def test_what_a_sampler_draws_from_the_global_generators_depends_on_seed_and_epoch_alone() -> None:
    orders = [order_of(DataLoader(DATA, 2, shuffle=True), seed) for seed in (1, 1, 2)]
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    found = [[order.batch(epoch, 0) for epoch in range(8)] for order in orders]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert found[0] == found[1]
    assert found[0] != found[2]
    assert len({tuple(each) for each in found[0]}) > 1
