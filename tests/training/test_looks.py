"""A script may look at batches of the DataLoader that it trains on before it goes through it: the order is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from script_in_epochs import BATCH, EPOCH, Noisy, Script, Still, shuffled
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

LOADERS: dict[str, Callable[[], DataLoader[Tensor]]] = {
    "shuffle": shuffled,
    "own generator": lambda: shuffled(generator=torch.Generator().manual_seed(5)),
    "in order": lambda: DataLoader(Noisy(), BATCH),
}
STARTS = (1, 2, EPOCH, EPOCH + 1, EPOCH + 3, 2 * EPOCH, 2 * EPOCH + 1, 3 * EPOCH)
UNTIL = 3 * EPOCH + 2


class Looking(Script):
    """`Looking` takes one batch before it trains, and lets the iterator go."""

    is_each = False

    @classmethod
    def _numbered(cls, loader: DataLoader[Tensor], step: int) -> Iterator[tuple[int, Tensor]]:
        held = cls.look(loader)
        while True:
            for batch in loader:
                yield step, batch
                step += 1
            if cls.is_each:
                held = cls.look(loader)  # in whose place
        del held

    @staticmethod
    def look(loader: DataLoader[Tensor]) -> object:
        return next(iter(loader))


class LookingTwice(Looking):
    """`LookingTwice` looks at one batch, and then at three."""

    @staticmethod
    def look(loader: DataLoader[Tensor]) -> object:
        next(iter(loader))
        for number, _ in enumerate(loader):
            if number == 2:
                break
        return None


class LookingOn(Looking):
    """`LookingOn` keeps what gives the batches that it looks at."""

    @staticmethod
    def look(loader: DataLoader[Tensor]) -> object:
        batches = iter(loader)
        next(batches)
        return batches


class LookingElsewhere(Looking):
    """`LookingElsewhere` makes a loader of the same kind for that."""

    @staticmethod
    def look(loader: DataLoader[Tensor]) -> object:
        is_shuffled = isinstance(loader.sampler, RandomSampler)
        return next(iter(DataLoader(loader.dataset, BATCH, shuffle=is_shuffled)))


class LookingThrough(Looking):
    """`LookingThrough` goes through all of it, as who evaluates with what it trains on."""

    @staticmethod
    def look(loader: DataLoader[Tensor]) -> object:
        for _ in loader:
            pass
        return None


def _each(kind: type[Looking]) -> type[Looking]:
    """Return one that looks before each epoch."""
    return type(f"{kind.__name__}Each", (kind,), {"is_each": True})


ALL = (Looking, LookingTwice, LookingOn, LookingElsewhere, LookingThrough)


def keeps_workers() -> DataLoader[Tensor]:
    return DataLoader(Still(), BATCH, shuffle=True, num_workers=1, persistent_workers=True)


def check(script: Script, starts: Sequence[int], *, from_beginning: bool = False) -> None:
    whole = script.train(0, UNTIL)
    again = {start: script.train(start, UNTIL, from_beginning=from_beginning) for start in starts}
    assert [start for start in starts if again[start] != whole[start:]] == []


SHAPES = [
    *((kind, loader) for loader in LOADERS for kind in (Looking, _each(Looking))),
    *((kind, "own generator") for kind in ALL[1:]),
    *((_each(kind), "shuffle") for kind in ALL[1:]),
]


@pytest.mark.parametrize("is_behind", [False, True])
@pytest.mark.parametrize(("kind", "loader"), SHAPES)
def test_the_order_is_that_of_the_undisturbed_training(kind: type[Looking], loader: str, *, is_behind: bool) -> None:
    check(kind(LOADERS[loader], snapshot_behind=is_behind), _starts(kind, is_behind=is_behind))


@pytest.mark.parametrize("is_behind", [False, True])
@pytest.mark.parametrize("kind", [Looking, LookingOn, *map(_each, (Looking, LookingTwice, LookingThrough))])
def test_a_script_may_skip_from_the_beginning_and_look(kind: type[Looking], *, is_behind: bool) -> None:
    starts = [start for start in _starts(kind, is_behind=is_behind) if start != EPOCH]
    check(kind(LOADERS["own generator"], snapshot_behind=is_behind), starts, from_beginning=True)


def _starts(kind: type[Looking], *, is_behind: bool) -> list[int]:
    """Return at which steps a script may go on: behind its first epoch nobody knows yet whether it looks again."""
    return [start for start in STARTS if not (kind.is_each and is_behind and start == EPOCH)]


@pytest.mark.parametrize("is_behind", [False, True])
@pytest.mark.parametrize("kind", [LookingTwice, LookingOn, _each(Looking)])
def test_kept_workers_may_be_there_since_the_script_has_looked(kind: type[Looking], *, is_behind: bool) -> None:
    starts = (1, EPOCH + 3, 2 * EPOCH)
    check(kind(keeps_workers, snapshot_behind=is_behind), starts)


@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize("is_behind", [False, True])
@pytest.mark.parametrize("kind", LOADERS)
def test_a_script_may_look_before_it_takes_the_state_over(kind: str, *, is_behind: bool, is_held: bool) -> None:
    held = []

    def looked() -> DataLoader[Tensor]:
        loader = LOADERS[kind]()
        batches = iter(loader)
        next(batches)
        held[:] = [batches] if is_held else []
        return loader

    check(Script(looked, snapshot_behind=is_behind), STARTS)


@pytest.mark.parametrize("is_each", [False, True])
def test_behind_the_first_epoch_it_is_said_that_nobody_knows_whether_the_script_looks_before_each(
    is_each: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    script = (_each(Looking) if is_each else Looking)(shuffled, snapshot_behind=True)
    script.train(0, 2 * EPOCH)
    for start in (1, EPOCH, 2 * EPOCH):
        script.train(start, UNTIL)
        said = capsys.readouterr().err
        assert said.startswith("unicron: before its first epoch the script has begun") is (start == EPOCH)
        assert said.count("\n") == (start == EPOCH)


@pytest.mark.parametrize("kind", [Script, Looking, _each(Looking)])
@pytest.mark.parametrize("is_behind", [False, True])
def test_a_script_that_was_restarted_may_be_so_again(kind: type[Script], *, is_behind: bool) -> None:
    """What it keeps then is as if there had been no restart."""
    script = kind(LOADERS["own generator"], snapshot_behind=is_behind)
    whole = script.train(0, UNTIL)
    for first, second in ((2, 4), (3, EPOCH), (3, EPOCH + 2), (EPOCH + 2, 2 * EPOCH), (EPOCH + 2, 2 * EPOCH + 1)):
        if kind is not Script and kind.is_each and is_behind and second == EPOCH:
            continue
        for each in [each for each in script.kept if each > first]:
            del script.kept[each]
        script.train(first, UNTIL)
        assert script.train(second, UNTIL) == whole[second:], (first, second)


class DrawingBehind(LookingThrough):
    """`DrawingBehind` draws something behind its look, which the training's numbers are not to come behind."""

    @staticmethod
    def look(loader: DataLoader[Tensor]) -> object:
        LookingThrough.look(loader)
        return torch.rand(3)


def test_what_is_drawn_behind_a_look_does_not_count_in_a_later_epoch() -> None:
    check(DrawingBehind(shuffled, snapshot_behind=True), (2 * EPOCH, 3 * EPOCH))


class EvaluatingSame(Script):
    """`EvaluatingSame` goes through the loader that it trains on at every third batch, before it trains on that."""

    start = 0

    @classmethod
    def _numbered(cls, loader: DataLoader[Tensor], step: int) -> Iterator[tuple[int, Tensor]]:
        while True:
            for batch in loader:
                if step % 3 == 0 and step >= cls.start:
                    for each in loader:
                        torch.rand(int(each[0, 0]))
                yield step, batch
                step += 1


def test_an_evaluation_with_the_same_loader_is_no_look() -> None:
    """The script that goes on at its next batch evaluates first, and begins an epoch of its own for that."""
    for is_behind in (False, True):
        EvaluatingSame.start = 0
        script = EvaluatingSame(shuffled, snapshot_behind=is_behind)
        whole = script.train(0, UNTIL)
        for start in STARTS:
            EvaluatingSame.start = start
            assert script.train(start, UNTIL) == whole[start:], start


def test_two_iterators_of_one_loader_are_no_looks() -> None:
    class Paired(Script):
        """`Paired` trains on pairs."""

        @staticmethod
        def _numbered(loader: DataLoader[Tensor], step: int) -> Iterator[tuple[int, Tensor]]:
            while True:
                for both in zip(loader, loader, strict=True):
                    yield step, torch.cat(both)
                    step += 1

    for is_behind in (False, True):
        check(Paired(shuffled, snapshot_behind=is_behind), STARTS)
