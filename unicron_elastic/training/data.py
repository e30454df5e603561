"""Data by number: (step, micro-batch index) always means the same samples, whoever asks, and however often.

    batches = MicroBatches(dataset, micro_batch_size=8, micro_batches=64)
    for step in run.steps(total=10_000, micro_batches=64):
        for index in step:
            loss = loss_fn(model(batches(step.number, index)))

A rank that takes over the micro-batches of another asks by the same numbers. The position in the data is a function of
the step, so there is nothing to save. Nothing here knows of ranks: it is the same in one process and in many.

Micro-batch ``index`` of step ``s``, the first step being 0, is number ``g = s * micro_batches + index`` of one endless
row. With ``n = len(dataset) // micro_batch_size`` of them in an epoch it is number ``g % n`` of epoch ``g // n``; so an
epoch may end within a step, but with ``whole_steps=True``, for which ``n`` is rounded down to a multiple of
``micro_batches``. ``Shuffle`` says which samples stand there.

A dataset that can only be iterated has no number to ask by, and is refused: what a lost rank has read from it could not
be read again by another. Give it an index (a table from number to file and offset), or use a function of your own in
place of ``MicroBatches``: any that returns the same samples for the same (step, index) on every rank will do.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from math import isqrt
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from unicron_elastic.training.step.randomness import Generators

Key = tuple[int, int]  # step and index of a micro-batch

_WORD = (1 << 64) - 1
_TURNS = 6  # of five numbers, all 120 orders come about equally often; with four turns not quite


class MicroBatchError(RuntimeError):
    """A micro-batch could not be read: ``step``, ``index`` and ``samples`` say which, ``__cause__`` why."""

    def __init__(self, step: int, index: int, samples: Sequence[int], why: str) -> None:
        super().__init__(step, index, samples, why)  # what pickle makes it from again, when it comes from a worker
        self.step = step
        self.index = index
        self.samples = tuple(samples)
        self.why = why
        self.stack = ""  # of the worker that raised it

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.samples[:8])) + (", ..." if len(self.samples) > 8 else "")
        return f"micro-batch {self.index} of step {self.step} (samples {shown}) could not be read: {self.why}"


class Shuffle:
    """A permutation of 0..length-1 that is a function of (seed, epoch) and takes no memory: ``shuffle[place]``.

    A Feistel network: the place is written as a pair (left, right), each below about ``sqrt(length)``, and in turns a
    hash of the one is added to the other. Each turn can be undone, so no two places meet. There are a few more pairs
    than places; who lands on one of those goes on until he lands on a place, which keeps it a permutation.
    """

    def __init__(self, length: int, seed: int, epoch: int) -> None:
        self.length = length
        self._lefts = isqrt(max(length, 1) - 1) + 1
        self._rights = -(-length // self._lefts)
        key = _mixed(_mixed(seed) ^ epoch)
        self._keys = [(_mixed(key + 2 * turn + 1), _mixed(key + 2 * turn + 2)) for turn in range(_TURNS)]

    def __getitem__(self, place: int) -> int:
        """What stands at ``place``. Raises IndexError beyond the ends."""
        if not 0 <= place < self.length:
            raise IndexError(f"there is no place {place} in a shuffle of {self.length}")
        value = self._once(place)
        while value >= self.length:
            value = self._once(value)
        return value

    def _once(self, value: int) -> int:
        left, right = divmod(value, self._rights)
        for left_key, right_key in self._keys:
            left = (left + _mixed(left_key ^ right)) % self._lefts
            right = (right + _mixed(right_key ^ left)) % self._rights
        return left * self._rights + right


_shuffle = lru_cache(maxsize=8)(Shuffle)


class MicroBatches:
    """The micro-batches of a map-style dataset by number: ``batches(step, index)``.

    Random augmentations are the same, too, as far as the dataset draws from the global generators of ``random``,
    ``torch`` or ``numpy``: these are seeded for each micro-batch and put back, which takes 0.3 ms. So what the training
    itself draws does not depend on whether a micro-batch was read here or in a worker.
    """

    def __init__(
        self,
        dataset: Any,
        micro_batch_size: int,
        micro_batches: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        whole_steps: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        """Look at the dataset's length, and read nothing yet.

        Args:
            dataset: has ``__len__`` and ``__getitem__``; its ``__getitems__`` is used if it has one.
            micro_batch_size: samples in each.
            micro_batches: in each step, over all ranks, as in ``run.steps``.
            seed: of the shuffle.
            shuffle: another order in each epoch; else always the dataset's own.
            drop_last: leave out the samples at an epoch's end that fill no micro-batch; else that one is smaller, and
                its samples weigh more in the mean over micro-batches.
            whole_steps: leave out the micro-batches at an epoch's end that fill no step, for scripts that do something
                at the end of each, and ask for ``steps_per_epoch``; else an epoch may end within a step.
            collate_fn: makes a batch from a list of samples; by default torch's ``default_collate``.

        Raises:
            TypeError: the dataset has no index or no length.
            ValueError: it has too few samples for one micro-batch or whole step, or a number is below one.
        """
        _check_dataset(dataset)
        for name, number in (("micro_batch_size", micro_batch_size), ("micro_batches", micro_batches)):
            if number < 1:
                raise ValueError(f"{name} must be at least 1, not {number}")
        self._length = len(dataset)
        self.per_epoch = self._length // micro_batch_size if drop_last else -(-self._length // micro_batch_size)
        if self.per_epoch == 0:
            raise ValueError(f"a dataset of {self._length} samples does not fill one micro-batch of {micro_batch_size}")
        if whole_steps:
            if self.per_epoch < micro_batches:
                raise ValueError(
                    f"a dataset of {self._length} samples does not fill one step of {micro_batches} micro-batches of "
                    f"{micro_batch_size}"
                )
            self.per_epoch -= self.per_epoch % micro_batches
        self.dataset, self.seed, self.shuffle = dataset, seed, shuffle
        self.micro_batch_size, self.micro_batches = micro_batch_size, micro_batches
        self._collate = collate_fn or default_collate

    def __call__(self, step: int, index: int) -> Any:
        """Read a micro-batch; raises ValueError if there is none, MicroBatchError if the dataset or collate_fn does."""
        samples = self.samples(step, index)
        read_all = getattr(self.dataset, "__getitems__", None)
        try:
            with Generators().kept(_mixed(_mixed(_mixed(self.seed) ^ step) ^ index)):  # of the CPU, and of no GPU
                return self._collate(read_all(samples) if read_all else [self.dataset[sample] for sample in samples])
        except Exception as error:
            raise MicroBatchError(step, index, samples, f"{type(error).__name__}: {error}") from error

    @property
    def steps_per_epoch(self) -> int:
        """How many steps are in each epoch. Raises ValueError if epochs end within steps: see ``whole_steps``."""
        steps, rest = divmod(self.per_epoch, self.micro_batches)
        if rest:
            raise ValueError(
                f"an epoch has {self.per_epoch} micro-batches, which are no whole number of steps of "
                f"{self.micro_batches}: MicroBatches(..., whole_steps=True) leaves out the rest"
            )
        return steps

    def samples(self, step: int, index: int) -> list[int]:
        """The numbers of its samples in the dataset; raises ValueError if there is no such micro-batch."""
        if step < 0 or not 0 <= index < self.micro_batches:
            last = self.micro_batches - 1
            raise ValueError(
                f"there is no micro-batch {index} of step {step}: steps count from 0, these from 0 to {last}"
            )
        epoch, number = divmod(step * self.micro_batches + index, self.per_epoch)
        start = number * self.micro_batch_size
        places = range(start, min(start + self.micro_batch_size, self._length))
        shuffled = _shuffle(self._length, self.seed, epoch) if self.shuffle else range(self._length)
        return [shuffled[place] for place in places]

    def loader(self, *, num_workers: int, **options: Any) -> ReadAhead:
        """The same micro-batches, called in the same way, read ahead by ``num_workers`` processes; 0: when asked for.

        ``options`` are those of torch's DataLoader that say how workers read: ``prefetch_factor``, ``pin_memory``,
        ``worker_init_fn``, ``multiprocessing_context``. Raises ValueError for those that need a worker where there is
        to be none, and for numbers below 0.
        """
        return ReadAhead(self, num_workers, options)

    def in_turn(self, keys: Sequence[Key], num_workers: int, options: dict[str, Any]) -> Iterator[Any]:
        """Yield these micro-batches one after the other, read ahead if there are workers, which end with it."""
        for _, item in _reading(self, keys, num_workers, options):
            yield _checked(item)


class ReadAhead:
    """Micro-batches by number, those that will probably be asked for next read ahead: ``ahead(step, index)``.

    It expects of each step what it was asked for in the step before, and without workers nothing. So the first step is
    read when it is asked for, and so is what comes unexpectedly, as a lost peer's micro-batches do. What it returns
    never depends on this.
    """

    def __init__(self, batches: MicroBatches, num_workers: int, options: dict[str, Any]) -> None:
        if num_workers < 0:
            raise ValueError(f"num_workers must be 0 or more, not {num_workers}")
        self.batches = batches
        self._step = -1
        self._asked: dict[int, None] = {}  # the indices of this step so far, in order
        self._expected = _Expected()
        self._next: Key = (0, 0)  # step, and place in the plan, of what the workers deliver next
        self._items: Iterator[tuple[Key, Any]] = iter(())
        options = {"persistent_workers": num_workers > 0, **options}
        self._loader = _reading(batches, self._expected, num_workers, options)

    def __call__(self, step: int, index: int) -> Any:
        """Return a micro-batch; raises what ``MicroBatches`` raises, and RuntimeError if a worker died."""
        if step != self._step:
            self._begin(step)
        item = self._found(step, index)
        self._asked[index] = None
        return item

    def _found(self, step: int, index: int) -> Any:
        plan = self._expected.plan
        if index not in plan or (step, plan.index(index)) < self._next:
            return self.batches(step, index)
        for key, item in self._items:
            self._next = (key[0], plan.index(key[1]) + 1)
            if key == (step, index):
                return _checked(item)
        raise AssertionError("the expected have no end")

    def close(self) -> None:
        """End the workers. Micro-batches can still be asked for: this begins anew."""
        self._step, self._expected.plan, self._items = -1, (), iter(())
        self._asked.clear()
        self._loader._iterator = None

    def _begin(self, step: int) -> None:
        plan, follows = tuple(self._asked), step == self._step + 1
        self._step, self._asked = step, {}
        if plan and self._loader.num_workers and not (follows and plan == self._expected.plan):
            self._expected.plan, self._expected.step, self._next = plan, step, (step, 0)
            self._items = iter(self._loader)  # the workers stay; what they have read is dropped


class _Expected:
    """The loader's sampler: the plan of one step, of that step and all that follow."""

    step = 0
    plan: tuple[int, ...] = ()

    def __iter__(self) -> Iterator[Key]:
        plan = self.plan
        return ((step, index) for step in itertools.count(self.step) for index in plan)


class _Reader:
    """The loader's dataset: whole micro-batches, read in a worker. One that fails matters only if it is asked for."""

    def __init__(self, batches: MicroBatches) -> None:
        self._batches = batches

    def __getitem__(self, key: Key) -> tuple[Key, Any]:
        try:
            return key, self._batches(*key)
        except MicroBatchError as error:
            error.stack = traceback.format_exc()  # the exception's own would be lost on the way
            return key, error


def _reading(batches: MicroBatches, keys: Iterable[Key], workers: int, options: dict[str, Any]) -> DataLoader[Any]:
    """Return a loader of keys and micro-batches."""
    return DataLoader(
        _Reader(batches),
        batch_size=None,
        sampler=keys,
        collate_fn=_unchanged,
        num_workers=workers,
        generator=torch.Generator(),  # a loader draws a seed at each start, which the script's is not to notice
        **options,
    )


def _checked(item: Any) -> Any:
    """Return what was read. Raises MicroBatchError if that is one."""
    if isinstance(item, MicroBatchError):
        raise item from item.__cause__ or RuntimeError(f"in a worker that reads ahead:\n\n{item.stack}")
    return item


def _unchanged(item: Any) -> Any:
    return item


def _check_dataset(dataset: Any) -> None:
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"{name} can only be iterated: its samples have no numbers by which another rank could read them when this"
            " one is lost. Give it __getitem__ and __len__, or use a function of (step, index) in place of MicroBatches"
        )
    if not hasattr(dataset, "__len__"):
        raise TypeError(f"{name} has no __len__, which MicroBatches needs to divide it into epochs")


def _mixed(number: int) -> int:
    """A hash of 64 bits: the finalizer of SplitMix64."""
    number = (number + 0x9E3779B97F4A7C15) & _WORD
    number = ((number ^ number >> 30) * 0xBF58476D1CE4E5B9) & _WORD
    number = ((number ^ number >> 27) * 0x94D049BB133111EB) & _WORD
    return number ^ number >> 31
