"""The batches of a data loader by number, whoever asks, and however often."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from unicron_elastic.training.data import Key, MicroBatchError, MicroBatches, ReadAhead
from unicron_elastic.training.loader.epoch_plan import EpochPlan
from unicron_elastic.training.loader.sample_order import SampleOrder

_OF_WORKERS = ("prefetch_factor", "pin_memory", "worker_init_fn", "multiprocessing_context")


class NumberedBatches(MicroBatches):
    """`NumberedBatches` are those of a data loader, read as ``MicroBatches`` are, in the order of its own sampler."""

    def __init__(self, loader: Any, plan: EpochPlan, order: SampleOrder, seed: int) -> None:
        super().__init__(
            loader.dataset, 1, plan.per_step, seed=seed, shuffle=False, drop_last=False, collate_fn=loader.collate_fn
        )
        self._plan = plan
        self._order = order

    def samples(self, step: int, index: int) -> list[int]:
        """Return the numbers of its samples. Raises MicroBatchError if the step has no such micro-batch."""
        try:
            return self._order.batch(*self._plan.batch(step, index))
        except (ValueError, IndexError) as error:  # as of an epoch's last step, if what it might have is read ahead
            raise MicroBatchError(step, index, [], str(error)) from error


def numbered_batches(loader: Any, plan: EpochPlan, order: SampleOrder, seed: int) -> NumberedBatches | ReadAhead:
    """Return a loader's batches by step and index, read as the loader reads: ahead, if it has workers."""
    batches = NumberedBatches(loader, plan, order, seed)
    return ReadAhead(batches, loader.num_workers, _options(loader)) if loader.num_workers else batches


def read_in_turn(loader: Any, batches: MicroBatches, keys: Sequence[Key]) -> Iterator[Any]:
    """Yield batches, read as the loader reads: by its number of workers. Raises what ``MicroBatches`` raises."""
    return batches.in_turn(keys, loader.num_workers, _options(loader) if loader.num_workers else {})


def _options(loader: Any) -> dict[str, Any]:
    return {name: value for name in _OF_WORKERS if (value := getattr(loader, name, None)) is not None}
