"""A script that goes on in the middle of an epoch has the samples that are left, changed as they would have been."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from script_in_epochs import BATCH, EPOCH, SAMPLES, Noisy, Script, Still, Stream, numbers, shuffled
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
)

from unicron_elastic.training.run import Run
from unicron_elastic.training.snapshot.open_epochs import without_numbers


class Named(Sampler[int]):
    """`Named` draws the order of each epoch from a generator that it calls as it likes."""

    def __init__(self) -> None:
        self.numbers = torch.Generator().manual_seed(5)

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SAMPLES, generator=self.numbers).tolist())


class Around(Sampler[int]):
    """`Around` has another sampler, from which it has the order."""

    def __init__(self) -> None:
        self.inner = Named()

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return (each for each in self.inner)


LOADERS: dict[str, Callable[[], DataLoader[Tensor]]] = {
    "shuffle": shuffled,
    "own generator": lambda: shuffled(generator=torch.Generator().manual_seed(5)),
    "can only be iterated": lambda: DataLoader(Stream(), BATCH),
    "keeps its workers": lambda: DataLoader(Still(), BATCH, shuffle=True, num_workers=1, persistent_workers=True),
    "keeps its workers, own generator": lambda: DataLoader(
        Still(), BATCH, shuffle=True, num_workers=1, persistent_workers=True, generator=torch.Generator().manual_seed(5)
    ),
    "in order": lambda: DataLoader(Noisy(), BATCH),
    "subset": lambda: DataLoader(Noisy(), BATCH, sampler=SubsetRandomSampler(range(SAMPLES))),
    "sampler with a generator of any name": lambda: DataLoader(Noisy(), BATCH, sampler=Named()),
    "sampler around that": lambda: DataLoader(Noisy(), BATCH, sampler=Around()),
    "batch sampler": lambda: DataLoader(
        Noisy(), batch_sampler=BatchSampler(RandomSampler(range(SAMPLES)), BATCH, drop_last=True)
    ),
}


@pytest.mark.parametrize("is_behind", [False, True])
@pytest.mark.parametrize("kind", LOADERS)
def test_each_batch_is_that_of_the_undisturbed_training(
    kind: str, is_behind: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Script(LOADERS[kind], snapshot_behind=is_behind)
    whole = script.train(0, 2 * EPOCH + 3)
    for start in (1, 3, EPOCH - 1, EPOCH, EPOCH + 1, 2 * EPOCH - 2):
        if kind == "can only be iterated" and is_behind and start == EPOCH:
            continue  # its length is not known before its first end
        assert script.train(start, 2 * EPOCH + 3) == whole[start:], start
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("is_behind", [False, True])
@pytest.mark.parametrize("kind", [*LOADERS, "has workers"])
def test_a_script_may_skip_from_the_beginning_of_its_training(
    kind: str, is_behind: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one that reads its loader without an end, and counts what it has been given."""
    loader = LOADERS.get(kind, lambda: shuffled(num_workers=1))
    script = Script(loader, snapshot_behind=is_behind)
    whole = script.train(0, 4 * EPOCH)
    for start in (2, EPOCH, EPOCH + 1, 3 * EPOCH - 2, 3 * EPOCH, 3 * EPOCH + 2):
        if kind == "can only be iterated" and is_behind and start == EPOCH:
            continue  # its length is not known before its first end
        again = script.train(start, 4 * EPOCH, from_beginning=True)
        if "only be iterated" in kind:  # where its end is known is another question
            assert numbers(again) == numbers(whole[start:]), start
        else:
            assert again == whole[start:], start
    assert capsys.readouterr().err == ""


class Counting(Sampler[int]):
    """`Counting` has an order by the number of the epoch, which it counts if nobody sets it."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        drawn = torch.Generator().manual_seed(self.epoch)
        self.epoch += 1
        return iter(torch.randperm(SAMPLES, generator=drawn).tolist())


class SettingEpochs(Script):
    """`SettingEpochs` sets it."""

    @staticmethod
    def _numbered(loader: DataLoader[Tensor], step: int) -> Iterator[tuple[int, Tensor]]:
        while True:
            assert isinstance(loader.sampler, Counting)
            loader.sampler.epoch = step // EPOCH
            for batch in loader:
                yield step, batch
                step += 1


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("start", [EPOCH + 1, EPOCH + 3, 2 * EPOCH - 1])
def test_a_line_says_that_an_order_by_a_count_of_epochs_is_another(
    start: int, workers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def loader() -> DataLoader[Tensor]:
        return DataLoader(Still(), BATCH, sampler=Counting(), num_workers=workers)

    script = Script(loader)
    whole = script.train(0, 2 * EPOCH + 2)
    assert numbers(script.train(start, 2 * EPOCH)) != numbers(whole[start : 2 * EPOCH])
    assert capsys.readouterr().err.count("whose middle the script goes on is another one than it was") == 1
    assert numbers(script.train(start, 2 * EPOCH, from_beginning=True)) == numbers(whole[start : 2 * EPOCH])
    script = SettingEpochs(loader)
    whole = script.train(0, 2 * EPOCH + 2)
    assert numbers(script.train(start, 2 * EPOCH)) == numbers(whole[start : 2 * EPOCH])
    assert capsys.readouterr().err == ""


def _own() -> DataLoader[Tensor]:
    return shuffled(generator=torch.Generator().manual_seed(5))


class Seeding(Script):
    """`Seeding` seeds the loader's generator for each epoch, from 5 on or, if it ``repeats``, always alike."""

    repeats = False

    @classmethod
    def _numbered(cls, loader: DataLoader[Tensor], step: int) -> Iterator[tuple[int, Tensor]]:
        while True:
            assert loader.generator is not None
            loader.generator.manual_seed(5 if cls.repeats else 5 + step // EPOCH)
            for batch in loader:
                yield step, batch
                step += 1


class Repeating(Seeding):
    """`Repeating` is one that has the same order in each epoch."""

    repeats = True


class Evaluating(Script):
    """`Evaluating` goes through another loader twice before each epoch, and trains on none of it."""

    held_out: Dataset[Tensor] = Subset(Noisy(), range(2 * BATCH))

    @classmethod
    def _numbered(cls, loader: DataLoader[Tensor], step: int) -> Iterator[tuple[int, Tensor]]:
        own = torch.Generator().manual_seed(9)
        held_out = DataLoader(cls.held_out, BATCH, shuffle=True, generator=own)
        while True:
            for batch in (*held_out, *held_out):
                torch.rand(int(batch[0, 0]))
            for batch in loader:
                yield step, batch
                step += 1


class EvaluatingAlike(Evaluating):
    """`EvaluatingAlike` has another loader that nobody can tell from the one that it trains on."""

    held_out = Noisy()


class EvaluatingBehind(Script):
    """`EvaluatingBehind` does so once behind each epoch."""

    @staticmethod
    def _numbered(loader: DataLoader[Tensor], step: int) -> Iterator[tuple[int, Tensor]]:
        held_out = shuffled(generator=torch.Generator().manual_seed(9))
        first = step
        while True:
            for batch in loader:
                yield step, batch
                step += 1
            if step > first:
                for batch in held_out:
                    torch.rand(int(batch[0, 0]))


@pytest.mark.parametrize("from_beginning", [False, True])
@pytest.mark.parametrize("is_behind", [False, True])
def test_who_seeds_each_epoch_is_left_alone(*, is_behind: bool, from_beginning: bool) -> None:
    script = Seeding(_own, snapshot_behind=is_behind)
    whole = script.train(0, 4 * EPOCH)
    for start in (EPOCH, 2 * EPOCH, 2 * EPOCH + 1):
        assert script.train(start, 4 * EPOCH, from_beginning=from_beginning) == whole[start:], start


@pytest.mark.parametrize("is_behind", [False, True])
def test_who_has_the_same_order_in_each_epoch_is_left_alone_once_that_is_seen(*, is_behind: bool) -> None:
    script = Repeating(_own, snapshot_behind=is_behind)
    whole = script.train(0, 4 * EPOCH)
    assert numbers(whole[:EPOCH]) == numbers(whole[EPOCH : 2 * EPOCH])
    for start in (2 * EPOCH, 3 * EPOCH):
        assert script.train(start, 4 * EPOCH) == whole[start:], start


@pytest.mark.parametrize("loader", [shuffled, _own])
@pytest.mark.parametrize("kind", [Evaluating, EvaluatingAlike])
def test_what_the_script_does_not_train_on_is_not_skipped(
    kind: type[Script], loader: Callable[[], DataLoader[Tensor]]
) -> None:
    script = kind(loader, snapshot_behind=True)
    whole = script.train(0, 3 * EPOCH)
    for start in (EPOCH, 2 * EPOCH):
        assert script.train(start, 3 * EPOCH) == whole[start:], start


@pytest.mark.parametrize("loaders", [2, 3])
@pytest.mark.parametrize("is_behind", [False, True])
def test_loaders_that_are_taken_in_turn_by_step_go_on(loaders: int, *, is_behind: bool) -> None:
    class InTurn(Script):
        """`InTurn` takes a batch of each loader in turn, two of the last, and goes through each without an end."""

        @staticmethod
        def _numbered(loader: DataLoader[Tensor], step: int) -> Iterator[tuple[int, Tensor]]:
            all_of = [loader, *(shuffled() for _ in range(loaders - 1))]
            batches = [iter(each) for each in all_of]
            while True:
                which = min(step % (loaders + 1), loaders - 1)
                try:
                    batch = next(batches[which])
                except StopIteration:
                    batches[which] = iter(all_of[which])
                    batch = next(batches[which])
                yield step, batch
                step += 1

    script = InTurn(shuffled, snapshot_behind=is_behind)
    until = 2 * loaders * EPOCH
    whole = script.train(0, until)
    for start in (1, 2, 3, 5, loaders * EPOCH, loaders * EPOCH + 2):  # none has just come to its end there
        assert script.train(start, until, from_beginning=True) == whole[start:], start


def test_of_two_loaders_that_nobody_can_tell_apart_each_goes_on_with_its_own_generator() -> None:
    script = EvaluatingBehind(_own)
    whole = script.train(0, 4 * EPOCH)
    for start in (2, EPOCH + 2, 3 * EPOCH - 1):
        assert script.train(start, 4 * EPOCH) == whole[start:], start


class DrawingFirst(Script):
    """`DrawingFirst` reads its loader without an end, and draws before it takes a batch, as for a mixup of it."""

    draws = True

    def train(self, start: int, until: int, *, skips: bool = True, from_beginning: bool = False) -> list[list[float]]:
        assert skips
        model, optimizer, run, loader = self._begun(start)
        first = 0 if from_beginning else start - start % EPOCH
        batches = self._numbered(loader, first)
        for _ in range(first, start):
            next(batches)
        seen = []
        for step in range(start, until):
            if not self._is_behind:
                self._keep(run, step)
            drawn = [random.random(), torch.rand(()).item()] if self.draws else []
            _, batch = next(batches)
            seen.append([*batch.flatten().tolist(), *drawn])
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if self._is_behind:
                self._keep(run, step + 1)
        vars(run).clear()
        return seen


@pytest.mark.parametrize("from_beginning", [False, True])
@pytest.mark.parametrize("is_behind", [False, True])
@pytest.mark.parametrize("loader", [shuffled, _own])
def test_what_the_script_draws_before_it_takes_a_batch_it_draws_once(
    loader: Callable[[], DataLoader[Tensor]], *, is_behind: bool, from_beginning: bool
) -> None:
    script = DrawingFirst(loader, snapshot_behind=is_behind)
    whole = script.train(0, 4 * EPOCH)
    for start in (1, EPOCH - 1, EPOCH, EPOCH + 1, 2 * EPOCH, 3 * EPOCH):
        assert script.train(start, 4 * EPOCH, from_beginning=from_beginning) == whole[start:], start


class Alternating(DrawingFirst):
    """`Alternating` takes its batches of two loaders without an end, of which one has as many as the other has left."""

    @staticmethod
    def _numbered(loader: DataLoader[Tensor], step: int) -> Iterator[tuple[int, Tensor]]:
        shorter = DataLoader(Subset(Noisy(), range(4 * BATCH)), BATCH, shuffle=True)
        whole, part = (DrawingFirst._numbered(each, 0) for each in (loader, shorter))
        while True:
            yield step, next(whole if step % EPOCH in (2, 4) else part)[1]
            step += 1


def test_a_loader_that_is_as_long_as_what_is_left_of_another_is_not_taken_for_that() -> None:
    script = Alternating(shuffled, snapshot_behind=True)
    whole = script.train(0, 4 * EPOCH)
    for start in (EPOCH - 1, EPOCH, EPOCH + 1, 2 * EPOCH):
        assert script.train(start, 4 * EPOCH, from_beginning=True) == whole[start:], start


def test_so_it_does_where_nobody_knows_how_long_an_epoch_is() -> None:
    script = DrawingFirst(lambda: DataLoader(Stream(), BATCH))
    whole = script.train(0, 4 * EPOCH)
    for start in (EPOCH + 1, 2 * EPOCH, 3 * EPOCH):
        assert script.train(start, 4 * EPOCH, from_beginning=True) == whole[start:], start


class TakenOnce(dict[int, Any]):
    """`TakenOnce` has a state until a script takes it over, so that it is kept anew."""

    def __getitem__(self, step: int) -> Any:
        return self.pop(step)


class _Steps:
    """`_Steps` are of one loader: no class of a function, whose cycle would keep workers until it is collected."""

    def __init__(self, loader: DataLoader[Tensor], step: int) -> None:
        self._loader, self._step, self._batches = loader, step, iter(loader)

    def __iter__(self) -> _Steps:
        return self

    def __next__(self) -> tuple[int, Tensor]:
        try:
            return self._step, next(self._batches)
        except StopIteration:
            self._batches = iter(self._loader)
            return self._step, next(self._batches)


class MakingItsIterator(DrawingFirst):
    """`MakingItsIterator` makes one in front of its loop, and at the end of each epoch; it skips in one epoch alone."""

    @staticmethod
    def _numbered(loader: DataLoader[Tensor], step: int) -> Iterator[tuple[int, Tensor]]:
        return _Steps(loader, step)


class BeginningEach(DrawingFirst):
    """`BeginningEach` makes one for each epoch, in front of the place at which it asks for its state."""

    def train(self, start: int, until: int, *, skips: bool = True, from_beginning: bool = False) -> list[list[float]]:
        seen = []
        model, optimizer, run, loader = self._begun(start)
        for epoch in range(0 if from_beginning or not skips else start // EPOCH, until // EPOCH):
            batches = iter(loader)
            for step in range(EPOCH * epoch, EPOCH * (epoch + 1)):
                if step < start:
                    next(batches)
                    continue
                self._keep(run, step)
                drawn = [random.random(), torch.rand(()).item()]
                batch = next(batches)
                seen.append([*batch.flatten().tolist(), *drawn])
                model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        vars(run).clear()
        return seen


class MakingItsIteratorStill(MakingItsIterator):
    """`MakingItsIteratorStill` draws nothing before it takes a batch."""

    draws = False


def _working() -> DataLoader[Tensor]:
    return DataLoader(Still(), BATCH, shuffle=True, num_workers=1)


@pytest.mark.parametrize("loader", [shuffled, _own, _working])
def test_a_script_may_never_ask_for_the_batch_behind_the_last(loader: Callable[[], DataLoader[Tensor]]) -> None:
    script = BeginningEach(loader)
    whole = script.train(0, 4 * EPOCH)
    for start in (2, EPOCH - 1, EPOCH, EPOCH + 2, 2 * EPOCH, 3 * EPOCH - 1):
        assert script.train(start, 4 * EPOCH, from_beginning=True) == whole[start:], start


@pytest.mark.parametrize(
    ("kind", "loader"),
    [
        *((kind, loader) for kind in (MakingItsIterator, BeginningEach) for loader in (shuffled, _own)),
        *((kind, _working) for kind in (MakingItsIteratorStill, BeginningEach)),
    ],
)
def test_an_iterator_that_is_made_behind_restore_and_of_which_nothing_is_skipped_has_the_next_epoch(
    kind: type[DrawingFirst], loader: Callable[[], DataLoader[Tensor]], capsys: pytest.CaptureFixture[str]
) -> None:
    script = kind(loader)
    whole = script.train(0, 4 * EPOCH)
    for start in (EPOCH, EPOCH + 2, 2 * EPOCH, 3 * EPOCH):
        for _ in range(2):  # from what was kept in the first place, and by one that was restarted there
            assert script.train(start, 4 * EPOCH) == whole[start:], start
            script.kept = TakenOnce(script.kept)
            script.train(start, start + EPOCH)
            script.kept = dict(script.kept)
    assert capsys.readouterr().err == ""


def test_a_line_says_that_workers_have_got_an_order_before_the_script_drew(capsys: pytest.CaptureFixture[str]) -> None:
    script = MakingItsIterator(_working)
    script.train(0, 2 * EPOCH)
    script.train(EPOCH, 2 * EPOCH)
    assert "was made before the script drew what it draws in each step" in capsys.readouterr().err


class ReadingAhead(Script):
    """`ReadingAhead` takes all batches of a step before it asks for its state, and trains on them behind that."""

    @staticmethod
    def _numbered(loader: DataLoader[Tensor], step: int) -> Iterator[tuple[int, Tensor]]:
        while True:
            batches = iter(loader)
            for both in zip(batches, batches, strict=True):
                yield step, torch.cat(both)
                step += 1


def test_all_batches_that_were_read_for_a_step_are_read_with_the_same_numbers() -> None:
    script = ReadingAhead(shuffled)
    whole = script.train(0, 2 * EPOCH)
    for start in (0, 1, 2, EPOCH // 2, EPOCH, EPOCH + 1):
        assert script.train(start, 2 * EPOCH, from_beginning=True) == whole[start:], start


def test_a_script_that_accumulates_over_the_end_of_an_epoch_has_not_skipped_the_next_one() -> None:
    """It makes no optimizer step, nor a snapshot, between what it skips and the next epoch, and trains all the same."""
    script = Script(shuffled, snapshot_behind=True, accumulates=4)
    whole = script.train(0, 3 * EPOCH)
    assert script.train(4, 3 * EPOCH) == whole[4:]


def test_what_workers_of_a_loader_draw_is_the_same() -> None:
    script = Script(lambda: shuffled(num_workers=1))
    whole = script.train(0, 2 * EPOCH)
    assert script.train(EPOCH + 2, 2 * EPOCH) == whole[EPOCH + 2 :]


def test_a_script_that_does_not_skip_is_told_once_and_gets_other_orders_from_then_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The order of the epoch once more would show it the same samples after each restart, and never the others."""
    script = Script(shuffled)
    whole = script.train(0, EPOCH)
    again = script.train(3, 5, skips=False)
    said = capsys.readouterr().err
    assert said.startswith("unicron: the script is in the middle of an epoch and has not skipped what it had had of it")
    assert said.count("\n") == 1
    assert numbers(again) == numbers(whole[:2])
    once_more = script.kept[4] | {"epochs": script.kept[4]["epochs"] | {"skips": False}}
    script.kept[4] = once_more
    other = script.train(4, 6, skips=False)
    assert numbers(other) != numbers(whole[:2])
    assert "the state is of the middle of an epoch whose order was drawn" in capsys.readouterr().err


def test_an_order_that_the_script_seeds_by_the_epoch_is_no_reason_to_say_anything(
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = Script(lambda: shuffled(generator=torch.Generator().manual_seed(5)))
    script.train(0, 3)
    script.train(2, 4, skips=False)
    assert capsys.readouterr().err == ""


def test_a_script_that_skips_in_a_way_of_its_own_is_told_that_the_order_may_be_another(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As with a loader that is made for the rest of the epoch."""
    script = Script(shuffled)
    script.train(0, 4)
    script._loader_of = lambda: DataLoader(Subset(Noisy(), range(8)), BATCH, shuffle=True)
    script.train(3, 5, skips=False)
    said = "unicron: the script is in the middle of an epoch and has begun it with another DataLoader"
    assert capsys.readouterr().err.startswith(said)


def test_loaders_that_are_read_in_turn_are_begun_and_skipped_one_after_the_other() -> None:
    """The second begins where the first has given all that it had given."""
    whole, kept = in_turn(None)
    again, _ = in_turn(kept)
    assert again == whole[-len(again) :]


def in_turn(kept: Any) -> tuple[list[list[float]], Any]:
    """Trains on two loaders of different sizes in each step, for four steps; or the last two, from what was kept."""
    torch.manual_seed(3)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.0001)
    run = Run(model=model, optimizer=optimizer)
    if kept is not None:
        run.load_state_dict(kept)
    first, second = iter(shuffled()), iter(DataLoader(Noisy(), 3, shuffle=True))
    seen = []
    for step in range(4):
        both = torch.cat([next(first), next(second)])
        if kept is not None and step < 2:
            continue
        run.snapshot(step)
        if step == 2 and kept is None:
            kept_now = run.state_dict()
        seen.append([*both.flatten().tolist(), torch.rand(()).item()])
        optimizer.zero_grad()
        model(both).sum().backward()
        optimizer.step()
    return seen, kept if kept is not None else kept_now


def test_a_loader_that_is_evaluated_with_meanwhile_is_in_the_middle_of_nothing() -> None:
    run = Run(model=nn.Linear(2, 1))
    held_out = iter(shuffled())
    next(held_out)
    run.snapshot(0)
    run.snapshot(1)
    assert [each["is_recent"] for each in run.state_dict()["epochs"]["epochs"]] == [False]


@pytest.mark.parametrize(("kind", "is_told"), [("shuffle", True), ("in order", False), ("own generator", False)])
def test_a_state_without_the_numbers_of_this_rank_says_so_where_the_order_was_drawn(
    kind: str, is_told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one that was saved; the loader's own generator is in its first epoch, and seeded again by who makes it."""
    script = Script(LOADERS[kind])
    script.train(0, 4)
    script.kept[3]["epochs"] = without_numbers(script.kept[3]["epochs"])
    script.train(3, 5)
    assert ("the state is of the middle of an epoch whose order was drawn" in capsys.readouterr().err) is is_told


def test_batches_of_a_loader_are_read_as_deep_in_its_last_epoch_as_in_its_first() -> None:
    """Its iterator is the same in all of them, where its workers persist."""
    run = Run(model=nn.Linear(2, 1))
    loader = shuffled(num_workers=1, persistent_workers=True)
    depths = []
    for _ in range(3):
        batches = iter(loader)
        plain = type(batches)._next_data
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                type(batches),
                "_next_data",
                lambda self, plain=plain: (depths.append(len(inspect.stack(0))), plain(self))[1],
            )
            assert len(list(batches)) == EPOCH
    assert len(set(depths)) == 1
    del run
