"""Data by number: the same samples for the same (step, index), whoever asks, read here or ahead by workers."""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from unicron_elastic.training.data import MicroBatchError, MicroBatches, ReadAhead, Shuffle


class Numbers(Dataset[int]):
    """Sample i is i; those in ``broken`` cannot be read."""

    def __init__(self, length: int, broken: frozenset[int] = frozenset()) -> None:
        self.length, self.broken = length, broken

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, place: int) -> int:
        if place in self.broken:
            raise OSError(f"file of sample {place} is gone")
        return place


class Readers(Numbers):
    """Sample i is (i, the process that read it)."""

    def __getitem__(self, place: int) -> Any:
        return place, os.getpid()


class Augmented(Numbers):
    """Sample i is what the generators say."""

    def __getitem__(self, place: int) -> Any:
        return random.random(), torch.rand(2), float(np.random.rand()), place


@settings(deadline=None)
@given(length=st.integers(0, 2000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**40))
def test_a_shuffle_is_a_permutation(length: int, seed: int, epoch: int) -> None:
    shuffle = Shuffle(length, seed, epoch)

    assert list(range(length)) == sorted(shuffle[place] for place in range(length))
    for place in (-1, length):
        with pytest.raises(IndexError, match=f"there is no place {place} in a shuffle of {length}"):
            shuffle[place]


@settings(deadline=None)
@given(length=st.integers(2**40, 2**50), places=st.sets(st.integers(0, 2**40 - 1), min_size=2, max_size=50))
def test_a_shuffle_of_a_huge_dataset_takes_no_memory_and_lets_no_two_meet(length: int, places: set[int]) -> None:
    shuffle = Shuffle(length, 1, 2)
    found = {shuffle[place] for place in places}

    assert len(places) == len(found)
    assert all(0 <= number < length for number in found)


@pytest.mark.parametrize("length", [3, 5, 10, 30])
def test_a_shuffle_favours_no_place_and_keeps_no_neighbours(length: int) -> None:
    """Chi-squared per degree of freedom is about 1 for chance; with two turns it was 7 to 75 here."""
    epochs = 4000
    at: Counter[tuple[int, int]] = Counter()
    apart: Counter[int] = Counter()
    for epoch in range(epochs):
        shuffle = Shuffle(length, 1, epoch)
        order = [shuffle[place] for place in range(length)]
        at.update(enumerate(order))
        apart.update((b - a) % length for a, b in itertools.pairwise(order))
    each = epochs / length
    by_place = sum((at[i, j] - each) ** 2 / each for i in range(length) for j in range(length)) / (length - 1) ** 2
    by_distance = sum((apart[d] - epochs) ** 2 / epochs for d in range(1, length)) / (length - 2)

    assert by_place < 2.5
    assert by_distance < 2.5


def test_a_shuffle_is_the_same_in_every_version() -> None:
    """A job that was updated half-way must go on with the data it had."""
    assert [Shuffle(10, 0, 0)[place] for place in range(10)] == [4, 8, 7, 2, 5, 3, 6, 1, 9, 0]
    assert [Shuffle(10**12, 42, 7)[place] for place in range(3)] == [184024199344, 756688613959, 639643100729]


@settings(deadline=None)
@given(
    length=st.integers(1, 60),
    size=st.integers(1, 7),
    micro_batches=st.integers(1, 9),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_each_epoch_has_every_sample_once(
    length: int, size: int, micro_batches: int, shuffle: bool, drop_last: bool
) -> None:
    if drop_last and size > length:
        size = length
    batches = MicroBatches(Numbers(length), size, micro_batches, shuffle=shuffle, drop_last=drop_last)
    numbers = [divmod(g, micro_batches) for g in range(3 * batches.per_epoch)]
    for epoch in range(3):
        part = numbers[epoch * batches.per_epoch : (epoch + 1) * batches.per_epoch]
        samples = [sample for number in part for sample in batches.samples(*number)]
        whole = length // size * size if drop_last else length

        assert len(set(samples)) == len(samples) == whole
        if not shuffle:
            assert list(range(whole)) == samples
    assert all(len(batches.samples(*number)) == size for number in numbers) or not drop_last


def test_epochs_of_whole_steps_end_with_one() -> None:
    batches = MicroBatches(Numbers(47), 3, 4, whole_steps=True)
    assert (batches.per_epoch, batches.steps_per_epoch) == (12, 3)
    for epoch in range(2):
        samples = [batches.samples(3 * epoch + step, index) for step in range(3) for index in range(4)]
        assert len(set(itertools.chain(*samples))) == 36


def test_steps_of_an_epoch_are_a_whole_number_or_refused() -> None:
    assert MicroBatches(Numbers(48), 3, 4).steps_per_epoch == 4
    with pytest.raises(ValueError, match=r"an epoch has 15 micro-batches, .* whole_steps=True"):
        _ = MicroBatches(Numbers(47), 3, 4).steps_per_epoch
    with pytest.raises(ValueError, match="a dataset of 11 samples does not fill one step of 4 micro-batches of 3"):
        MicroBatches(Numbers(11), 3, 4, whole_steps=True)


def test_what_is_asked_for_is_what_comes() -> None:
    batches = MicroBatches(Numbers(1000), 4, 8, seed=3)
    same = MicroBatches(Numbers(1000), 4, 8, seed=3)
    other = MicroBatches(Numbers(1000), 4, 8, seed=4)
    keys = list(itertools.product(range(60), range(8)))

    assert [batches(*key).tolist() for key in keys] == [batches.samples(*key) for key in keys]
    assert [batches.samples(*key) for key in reversed(keys)] == [same.samples(*key) for key in reversed(keys)]
    assert [batches.samples(*key) for key in keys] != [other.samples(*key) for key in keys]
    assert batches.samples(0, 0) != batches.samples(31, 2), "the same place of two epochs"


def test_many_samples_are_read_at_once_where_the_dataset_can_and_batched_as_is_said() -> None:
    asked: list[list[int]] = []

    class Many(Numbers):
        def __getitems__(self, places: list[int]) -> list[int]:
            asked.append(places)
            return places

    batches = MicroBatches(Many(20), 4, 2)
    assert batches(1, 1).tolist() == batches.samples(1, 1)
    assert [batches.samples(1, 1)] == asked
    assert MicroBatches(Numbers(6), 3, 2, shuffle=False, collate_fn=tuple)(0, 1) == (3, 4, 5)
    part = MicroBatches(Subset(TensorDataset(torch.arange(100)), list(range(50, 70))), 4, 2, shuffle=False)
    assert part(0, 1)[0].tolist() == [54, 55, 56, 57]


def test_random_augmentations_are_by_number_and_leave_the_generators_alone() -> None:
    batches = MicroBatches(Augmented(100), 3, 4, seed=1, collate_fn=str)
    first = batches(2, 1)
    for seed in (random.seed, torch.manual_seed, np.random.seed):
        seed(5)
    expected = random.random(), torch.rand(1).item(), np.random.rand()
    for seed in (random.seed, torch.manual_seed, np.random.seed):
        seed(5)

    assert first == batches(2, 1)
    assert first != batches(2, 2)
    assert expected == (random.random(), torch.rand(1).item(), np.random.rand())


def test_a_sample_that_cannot_be_read_is_named() -> None:
    batches = MicroBatches(Numbers(40, frozenset({13})), 4, 5, shuffle=False)
    with pytest.raises(
        MicroBatchError, match=r"^micro-batch 3 of step 0 \(samples 12, 13, 14, 15\) could not be read: OS"
    ):
        batches(0, 3)
    with pytest.raises(MicroBatchError) as caught:
        batches(2, 3)
    assert (caught.value.step, caught.value.index, caught.value.samples) == (2, 3, (12, 13, 14, 15))
    assert isinstance(caught.value.__cause__, OSError)


def test_datasets_without_numbers_are_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield 1

    class Endless:
        def __getitem__(self, place: int) -> int:
            return place

    for dataset in (Stream(), iter([1])):
        with pytest.raises(
            TypeError, match=r"can only be iterated: .* or use a function of \(step, index\) in place of"
        ):
            MicroBatches(dataset, 1, 1)
    with pytest.raises(TypeError, match="Endless has no __len__"):
        MicroBatches(Endless(), 1, 1)


def test_bad_numbers_are_named() -> None:
    with pytest.raises(ValueError, match="a dataset of 3 samples does not fill one micro-batch of 4"):
        MicroBatches(Numbers(3), 4, 1)
    with pytest.raises(ValueError, match="micro_batch_size must be at least 1, not 0"):
        MicroBatches(Numbers(3), 0, 1)
    with pytest.raises(ValueError, match="micro_batches must be at least 1, not -1"):
        MicroBatches(Numbers(3), 1, -1)
    batches = MicroBatches(Numbers(3), 1, 2)
    for key in ((0, 2), (0, -1), (-1, 0)):
        with pytest.raises(
            ValueError, match=f"no micro-batch {key[1]} of step {key[0]}: steps count from 0, these from 0 to 1"
        ):
            batches(*key)
    with pytest.raises(ValueError, match="num_workers must be 0 or more, not -1"):
        batches.loader(num_workers=-1)
    with pytest.raises(ValueError, match="prefetch_factor"):
        batches.loader(num_workers=0, prefetch_factor=2)


def test_without_workers_it_reads_what_it_is_asked_for() -> None:
    batches = MicroBatches(Numbers(12), 2, 3, collate_fn=list)
    loader = batches.loader(num_workers=0)
    for key in [(0, 0), (0, 1), (1, 0), (1, 1), (3, 2), (1, 0)]:
        assert loader(*key) == batches(*key)
    loader.close()
    assert loader(0, 0) == batches(0, 0)


@pytest.fixture
def ahead() -> Iterator[ReadAhead]:
    made = MicroBatches(Readers(4000), 2, 8, collate_fn=list).loader(num_workers=2, multiprocessing_context="fork")
    yield made
    made.close()


def read(ahead: ReadAhead, step: int, index: int) -> bool:
    """Asks, checks what comes, and says whether a worker had read it."""
    samples = ahead(step, index)
    assert ahead.batches.samples(step, index) == [place for place, _ in samples]
    return all(reader != os.getpid() for _, reader in samples)


def test_what_was_asked_for_once_is_read_ahead(ahead: ReadAhead) -> None:
    assert [read(ahead, 0, index) for index in (4, 5, 6, 7)] == [False] * 4
    for step in range(1, 30):
        assert [read(ahead, step, index) for index in (4, 5, 6, 7)] == [True] * 4


def test_what_comes_unexpectedly_is_read_here_and_the_rest_stays_read_ahead(ahead: ReadAhead) -> None:
    for index in (4, 5):
        read(ahead, 0, index)
    assert [read(ahead, 1, index) for index in (4, 0, 5, 1)] == [True, False, True, False]
    # Expected are now 4, 0, 5, 1; the new world gives this rank others, which are then expected.
    assert [read(ahead, 2, index) for index in (4, 6, 7)] == [True, False, False]
    assert [read(ahead, 3, index) for index in (4, 6, 7)] == [True, True, True]
    assert [read(ahead, 4, index) for index in (5, 7)] == [False, True]


def test_any_order_of_asking_gives_what_was_asked_for(ahead: ReadAhead) -> None:
    choice, step = random.Random(0), 5
    for _ in range(40):
        step = max(0, step + choice.choice((0, 1, 1, 1, 1, 3, -1)))
        for _ in range(choice.randrange(6)):
            read(ahead, step, choice.randrange(8))


def test_the_generator_of_the_script_does_not_notice(ahead: ReadAhead) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    for step in range(3):
        read(ahead, step, step)  # another each time, so that the workers' reading begins anew
    assert torch.equal(before, torch.get_rng_state())


def test_augmentations_are_the_same_in_a_worker() -> None:
    batches = MicroBatches(Augmented(400), 2, 4, collate_fn=str)
    ahead = batches.loader(num_workers=1, multiprocessing_context="fork")
    try:
        for step in range(3):
            assert batches(step, 1) == ahead(step, 1)
    finally:
        ahead.close()


def test_what_a_worker_cannot_read_arrives_with_its_number_and_only_when_asked_for() -> None:
    batches = MicroBatches(Numbers(40, frozenset({13, 22})), 2, 5, shuffle=False)  # index 1 of steps 1 and 2
    ahead = batches.loader(num_workers=1, multiprocessing_context="fork")
    try:
        assert [ahead(0, index).tolist() for index in range(3)] == [[0, 1], [2, 3], [4, 5]]
        assert ahead(1, 0).tolist() == [10, 11]
        with pytest.raises(
            MicroBatchError, match=r"micro-batch 1 of step 1 \(samples 12, 13\).*file of sample 13"
        ) as caught:
            ahead(1, 1)
        assert "in __getitem__" in str(caught.value.__cause__)
        assert ahead(1, 2).tolist() == [14, 15]
        assert ahead(2, 2).tolist() == [24, 25]  # and 1 of step 2 is passed over
    finally:
        ahead.close()


def test_a_number_that_does_not_exist_is_not_expected_afterwards(ahead: ReadAhead) -> None:
    read(ahead, 0, 1)
    with pytest.raises(ValueError, match="no micro-batch 8 of step 0"):
        ahead(0, 8)
    assert [read(ahead, step, 1) for step in (1, 2)] == [True, True]


def test_workers_end_when_closed_and_begin_again(ahead: ReadAhead) -> None:
    for step in range(2):
        read(ahead, step, 1)
    (_, worker), *_ = ahead(2, 1)
    assert Path(f"/proc/{worker}").exists()
    ahead.close()
    assert not Path(f"/proc/{worker}").exists()
    assert [read(ahead, step, 1) for step in (3, 4)] == [False, True]
