"""Whoever draws the order of an epoch, a script that begins it anew and does not skip is told so; else it is not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from script_in_epochs import BATCH, EPOCH, SAMPLES, Noisy, Script, Still, Stream
from torch import Tensor
from torch.utils.data import DataLoader, Sampler, WeightedRandomSampler


class OfTorch(Sampler[int]):
    """`OfTorch` draws an order itself, from torch's random numbers."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(self.order())

    def order(self) -> list[int]:
        drawn: list[int] = torch.randperm(SAMPLES).tolist()
        return drawn


class OfPython(OfTorch):
    """`OfPython` draws it from Python's."""

    def order(self) -> list[int]:
        return random.sample(range(SAMPLES), SAMPLES)


class OfNumpy(OfTorch):
    """`OfNumpy` draws it from NumPy's."""

    def order(self) -> list[int]:
        drawn: list[int] = np.random.permutation(SAMPLES).tolist()
        return drawn


class OfOne(OfTorch):
    """`OfOne` draws each number when it is asked for."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(SAMPLES):
            yield int(torch.randint(SAMPLES, ()))


class OfItsOwn(OfTorch):
    """`OfItsOwn` has a generator."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def order(self) -> list[int]:
        drawn: list[int] = torch.randperm(SAMPLES, generator=self.generator).tolist()
        return drawn


class OfTheEpoch(OfTorch):
    """`OfTheEpoch` has an order for each epoch, as a DistributedSampler."""

    epoch = 0

    def order(self) -> list[int]:
        drawn: list[int] = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return drawn


class Batches(Sampler[list[int]]):
    """`Batches` are those of an order that it draws."""

    def __len__(self) -> int:
        return EPOCH

    def __iter__(self) -> Iterator[list[int]]:
        return iter(torch.randperm(SAMPLES).view(-1, BATCH).tolist())


class ShuffledStream(Stream):
    """`ShuffledStream` has an order although it can only be iterated."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[Tensor]:
        return (Still()[number] for number in torch.randperm(SAMPLES).tolist())


class Buffered(ShuffledStream):
    """`Buffered` draws which one comes next from those that it has read."""

    def __iter__(self) -> Iterator[Tensor]:
        held = list(range(SAMPLES))
        while held:
            yield Still()[held.pop(random.randrange(min(8, len(held))))]


def sampled(sampler: Any, **more: Any) -> Callable[[], DataLoader[Tensor]]:
    return lambda: DataLoader(Still(), BATCH, sampler=sampler(), **more)


DRAWN: dict[str, Callable[[], DataLoader[Tensor]]] = {
    "shuffle": lambda: DataLoader(Still(), BATCH, shuffle=True),
    "weighted": sampled(lambda: WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)),
    "of torch": sampled(OfTorch),
    "of Python": sampled(OfPython),
    "of NumPy": sampled(OfNumpy),
    "one by one": sampled(OfOne),
    "of its own": sampled(OfItsOwn),
    "beside a generator of the loader's": sampled(OfTorch, generator=torch.Generator().manual_seed(5)),
    "batches": lambda: DataLoader(Still(), batch_sampler=Batches()),
    "stream": lambda: DataLoader(ShuffledStream(), BATCH),
    "buffered stream": lambda: DataLoader(Buffered(), BATCH),
    "with workers": sampled(OfTorch, num_workers=1),
    "with kept workers": sampled(OfTorch, num_workers=1, persistent_workers=True),
    "shuffle with kept workers": lambda: DataLoader(
        Still(), BATCH, shuffle=True, num_workers=1, persistent_workers=True
    ),
}


@pytest.mark.parametrize("kind", DRAWN)
def test_a_script_that_does_not_skip_is_told_whoever_draws_the_order(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Script(DRAWN[kind])
    script.train(0, EPOCH + 4)
    assert capsys.readouterr().err == ""
    script.train(EPOCH + 3, EPOCH + 5, skips=False)
    assert capsys.readouterr().err.startswith("unicron: the script is in the middle of an epoch and has not skipped")
    assert script.kept[EPOCH + 3]["epochs"]["epochs"][0]["is_drawn"], "as for one that takes a state without numbers"


class StillStream(Stream):
    """`StillStream` comes in order."""

    def __iter__(self) -> Iterator[Tensor]:
        return (Still()[number] for number in range(SAMPLES))


NOT_DRAWN: dict[str, Callable[[], DataLoader[Tensor]]] = {
    "in order": lambda: DataLoader(Noisy(), BATCH),
    "of the epoch": sampled(OfTheEpoch),
    "with workers": sampled(OfTheEpoch, num_workers=1),
    "with kept workers": sampled(OfTheEpoch, num_workers=1, persistent_workers=True),
    "with a generator of the loader's": sampled(OfTheEpoch, generator=torch.Generator().manual_seed(5)),
    "stream": lambda: DataLoader(StillStream(), BATCH),
    "stream with workers": lambda: DataLoader(StillStream(), BATCH, num_workers=1),
}


@pytest.mark.parametrize("kind", NOT_DRAWN)
def test_a_script_that_begins_in_the_middle_of_a_known_order_is_told_nothing(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """That it begins at the right place is its own business."""
    script = Script(NOT_DRAWN[kind])
    script.train(0, EPOCH + 4)
    script.train(EPOCH + 3, EPOCH + 5, skips=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("is_each", [False, True])
@pytest.mark.parametrize("kind", [OfTorch, OfPython, OfNumpy])
def test_numbers_that_the_script_seeds_before_each_epoch_are_told_from_those_that_it_has_seeded_once(
    kind: Any, is_each: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Though they are just seeded in the first epoch, too."""

    class Seeding(DataLoader[Tensor]):
        """`Seeding` is a loader before whose epochs a script seeds."""

        def __iter__(self) -> Any:
            if is_each:
                seed()
            return super().__iter__()

    def seed() -> None:
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)

    def begun() -> DataLoader[Tensor]:
        seed()
        return Seeding(Still(), BATCH, sampler=kind())

    script = Script(begun)
    script.train(0, 4)
    script.train(3, 5, skips=False)
    assert capsys.readouterr().err.startswith("unicron: ") is not is_each
