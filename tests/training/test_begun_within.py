"""A loader may begin within an order by itself: it draws what it would have drawn there without the restart."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from script_in_epochs import BATCH, EPOCH, SAMPLES, Noisy, Script, Still
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, Subset

UNTIL = 2 * EPOCH + 3
STARTS = (1, 3, EPOCH - 1, EPOCH, EPOCH + 1, EPOCH + 4, 2 * EPOCH - 1)


def order_of(epoch: int) -> list[int]:
    drawn: list[int] = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch)).tolist()
    return drawn


class Advanced(Sampler[int]):
    """`Advanced` is a sampler that is told where to begin, and says so in its length if it ``shrinks``."""

    def __init__(self, *, shrinks: bool) -> None:
        self.epoch = self.begins_at = 0
        self.shrinks = shrinks

    def __len__(self) -> int:
        return SAMPLES - self.begins_at * self.shrinks

    def __iter__(self) -> Iterator[int]:
        return iter(order_of(self.epoch)[self.begins_at :])


class Skipping(BatchSampler):
    """`Skipping` leaves out the first batches of another one, and draws its order all the same."""

    def __init__(self, batches: Any, skips: int) -> None:
        self.batches, self.skips = batches, skips

    def __len__(self) -> int:
        return len(self.batches) - self.skips

    def __iter__(self) -> Iterator[list[int]]:
        return (each for number, each in enumerate(self.batches) if number >= self.skips)


class Within(Script):
    """`Within` begins its first epoch where it goes on."""

    start = 0
    dataset: Dataset[Tensor] = Noisy()
    workers = 0

    @classmethod
    def _numbered(cls, loader: DataLoader[Tensor], step: int) -> Iterator[tuple[int, Tensor]]:
        epoch, skips = divmod(cls.start, EPOCH)
        step = cls.start
        while True:
            for batch in cls.rest(loader, epoch, skips):
                yield step, batch
                step += 1
            epoch, skips = epoch + 1, 0

    @classmethod
    def rest(cls, loader: DataLoader[Tensor], epoch: int, skips: int) -> DataLoader[Tensor]:
        raise NotImplementedError


class Advancing(Within):
    """`Advancing` tells its sampler where to begin."""

    shrinks = False

    @classmethod
    def rest(cls, _: DataLoader[Tensor], epoch: int, skips: int) -> DataLoader[Tensor]:
        sampler = Advanced(shrinks=cls.shrinks)
        sampler.epoch, sampler.begins_at = epoch, skips * BATCH
        return DataLoader(cls.dataset, BATCH, sampler=sampler, num_workers=cls.workers)


class Endless(Within):
    """`Endless` has a sampler whose order has no end, nor a length, which it tells where to begin."""

    @classmethod
    def rest(cls, _: DataLoader[Tensor], epoch: int, skips: int) -> DataLoader[Tensor]:
        return DataLoader(cls.dataset, BATCH, sampler=OfAll(epoch, skips * BATCH))


class OfAll(Sampler[int]):
    """`OfAll` has all epochs, one behind the other."""

    def __init__(self, epoch: int, begins_at: int) -> None:
        self.epoch, self.begins_at = epoch, begins_at

    def __iter__(self) -> Iterator[int]:
        orders = (order_of(epoch) for epoch in itertools.count(self.epoch))
        return itertools.islice(itertools.chain.from_iterable(orders), self.begins_at, None)


class Shrinking(Advancing):
    """`Shrinking` has a sampler that is shorter then."""

    shrinks = True


class Subsetting(Within):
    """`Subsetting` makes a loader of what is left."""

    @classmethod
    def rest(cls, _: DataLoader[Tensor], epoch: int, skips: int) -> DataLoader[Tensor]:
        return DataLoader(Subset(cls.dataset, order_of(epoch)[skips * BATCH :]), BATCH, num_workers=cls.workers)


class Listing(Within):
    """`Listing` gives its loader the batches that are left."""

    @classmethod
    def rest(cls, _: DataLoader[Tensor], epoch: int, skips: int) -> DataLoader[Tensor]:
        batches: Any = torch.tensor(order_of(epoch)).view(-1, BATCH).tolist()[skips:]
        return DataLoader(cls.dataset, batch_sampler=batches, num_workers=cls.workers)


class SkippingFirst(Within):
    """`SkippingFirst` wraps its loader's batches once, and has the loader itself in all later epochs."""

    @classmethod
    def rest(cls, loader: DataLoader[Tensor], epoch: int, skips: int) -> DataLoader[Tensor]:
        sampler: Any = loader.sampler
        sampler.epoch = epoch
        if not skips:
            return loader
        return DataLoader(loader.dataset, batch_sampler=Skipping(loader.batch_sampler, skips), num_workers=cls.workers)


def seeded() -> DataLoader[Tensor]:
    return DataLoader(Noisy(), BATCH, sampler=Advanced(shrinks=False))


KINDS = [Advancing, Endless, Shrinking, Subsetting, Listing, SkippingFirst]


def train(script: Script, start: int) -> list[list[float]]:
    """Train from there on, as a script that begins its loader there and skips nothing."""
    Within.start = start
    return script.train(start, UNTIL, skips=False)


@pytest.mark.parametrize("is_behind", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_that_begins_within_draws_what_it_would_have_drawn_there(
    kind: type[Within], *, is_behind: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    script = kind(seeded, snapshot_behind=is_behind)
    whole = train(script, 0)
    assert [start for start in STARTS if train(script, start) != whole[start:]] == []
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("is_behind", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_it_may_do_so_again(kind: type[Within], *, is_behind: bool) -> None:
    script = kind(seeded, snapshot_behind=is_behind)
    whole, wrong = train(script, 0), []
    for first, second in ((2, 4), (3, EPOCH), (3, EPOCH + 2)):
        for each in [each for each in script.kept if each > first]:
            del script.kept[each]
        wrong += [(first, second, start) for start in (first, second) if train(script, start) != whole[start:]]
    assert wrong == []


@pytest.mark.parametrize("is_behind", [False, True])
def test_an_order_that_is_drawn_to_be_left_out_is_the_same(
    *, is_behind: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody knows that it is, unless the first batch is one that the script has had."""
    for start in STARTS:
        script = Shuffled(lambda: DataLoader(Noisy(), BATCH, shuffle=True), snapshot_behind=is_behind)
        whole = train(script, 0)
        assert train(script, start) == whole[start:], start
        is_told = "has begun it with another DataLoader" in capsys.readouterr().err
        assert is_told is (is_behind and start % EPOCH != 0)


class Shuffled(SkippingFirst):
    """`Shuffled` has an order that comes from everybody's random numbers."""


@pytest.mark.parametrize("kind", [Advancing, Subsetting])
def test_a_line_says_that_workers_draw_other_numbers(kind: type[Within], capsys: pytest.CaptureFixture[str]) -> None:
    """What the script draws itself is as it would have been."""
    for is_behind in (False, True):
        script = type("WithWorkers", (kind,), {"workers": 1, "dataset": Still()})(seeded, snapshot_behind=is_behind)
        whole = train(script, 0)
        assert capsys.readouterr().err == ""
        assert train(script, EPOCH + 3) == whole[EPOCH + 3 :]
        said = capsys.readouterr().err
        assert said.startswith("unicron: the script begins an epoch in its middle, and the workers")
        assert said.count("\n") == 1


def test_a_script_that_skips_in_an_order_that_nobody_can_draw_again_goes_on_with_its_numbers() -> None:
    """Its first batch is another, but it begins at the beginning."""

    class Unknown(Sampler[int]):
        """`Unknown` has an order of its own each time."""

        made = 0

        def __len__(self) -> int:
            return SAMPLES

        def __iter__(self) -> Iterator[int]:
            Unknown.made += 1
            return iter(order_of(Unknown.made))

    script = Script(lambda: DataLoader(Still(), BATCH, sampler=Unknown()), snapshot_behind=True)
    whole = script.train(0, EPOCH)
    again = script.train(3, EPOCH)
    assert [each[-2:] for each in again] == [each[-2:] for each in whole[3:]]
