from __future__ import annotations

import random

import pytest

from unicron_elastic.training.loader.sample_order import SampleOrder, why_other_order


def order_of(seed: int, told: list[int] | None = None) -> SampleOrder:
    def batches(epoch: int) -> list[list[int]]:
        drawn = list(range(10))
        random.Random(f"{seed} {epoch}").shuffle(drawn)
        return [drawn[:4], drawn[4:8], drawn[8:]]

    return SampleOrder([].append if told is None else told.append, batches)


def test_it_stays_the_same_in_whatever_order_it_is_asked() -> None:
    one, other = order_of(0), order_of(0)
    there = [one.digest(epoch) for epoch in range(5)]
    back = [other.digest(epoch) for epoch in reversed(range(5))]
    assert there == back[::-1]
    assert len(set(there)) == 5
    assert one.batch(1, 2) == other.batch(1, 2)


def test_the_sampler_is_told_of_an_epoch_when_another_begins() -> None:
    told: list[int] = []
    order = order_of(0, told)
    for epoch in (0, 0, 1, 0):
        order.batch(epoch, 0)
    assert told == [0, 1, 0]


def test_another_order_is_told_from_it() -> None:
    own, others = order_of(0).digest(3), order_of(1).digest(3)
    assert why_other_order(3, own, own) == ""
    assert why_other_order(3, own, others).startswith("this rank has the samples of epoch 3 in another order")


def test_the_same_samples_in_other_batches_are_another_order() -> None:
    cut = [SampleOrder([].append, lambda _, at=at: [[1, 2, 3][:at], [1, 2, 3][at:]]).digest(0) for at in (1, 2)]
    assert cut[0] != cut[1]


def test_samples_without_numbers_are_refused() -> None:
    with pytest.raises((TypeError, ValueError)):
        SampleOrder([].append, lambda _: [["a", "b"]]).batch(0, 0)  # type: ignore[list-item]
