from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from unicron_elastic.training.loader.loader_facts import LoaderFacts, loader_facts, refusal_of_loader


class Changing(DataLoader[Any]):
    """`Changing` leaves batches out while it is iterated."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return iter(())


class Stream(IterableDataset[int]):
    """`Stream` has no numbers."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def _data() -> TensorDataset:
    return TensorDataset(torch.arange(6))


def test_what_everybody_has_is_not_refused() -> None:
    assert refusal_of_loader(LoaderFacts(), "loader") == ""


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (LoaderFacts(kind="Mine", has_parts=False), "loader is a Mine without dataset"),
        (LoaderFacts(kind="Mine", is_iterated_otherwise=True), "loader is a Mine, which changes batches"),
        (LoaderFacts(has_index=False), "loader has a dataset that can only be iterated"),
        (LoaderFacts(batches=0), "loader has no batch"),
    ],
)
def test_loaders_that_are_no_table_are_refused(facts: LoaderFacts, words: str) -> None:
    assert words in refusal_of_loader(facts, "loader")


def test_a_loader_is_read_by_number_if_it_has_the_parts_for_that() -> None:
    assert loader_facts(DataLoader(_data(), 2)) == LoaderFacts(batches=3)
    assert loader_facts(Changing(_data(), 2)).is_iterated_otherwise
    assert not loader_facts(Changing(_data(), 2), (Changing.__iter__,)).is_iterated_otherwise
    assert not loader_facts(iter([1])).has_parts
    assert not loader_facts(DataLoader(Stream(), 2)).has_index
