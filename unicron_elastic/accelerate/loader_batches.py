"""The batches of a prepared loader by step and index, dealt to optimizer steps of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.utils import send_to_device

from unicron_elastic.training.data import ReadAhead
from unicron_elastic.training.loader.epoch_plan import EpochPlan
from unicron_elastic.training.loader.numbered_batches import numbered_batches
from unicron_elastic.training.loader.order_of import order_of
from unicron_elastic.training.optimizer_step import Step
from unicron_elastic.training.run import Run


class LoaderBatches:
    """`LoaderBatches` are read by number, whoever asks; their order is state, which other ranks must have as well.

    ``run`` returns the run, when there is one, whose steps ``steps`` makes.
    """

    def __init__(self, loader: Any, plan: EpochPlan, device: torch.device, seed: int, run: Callable[[], Run]) -> None:
        self.plan = plan
        self._device = device
        self._run = run
        self._order = order_of(loader, seed)
        self._batches = numbered_batches(loader, plan, self._order, seed)
        # What is given away is read in another thread, where nothing may be drawn.
        self._agreed = {"epoch": 0, "digest": self._order.digest(0)}
        self._has_begun = False

    @property
    def steps_per_epoch(self) -> int:
        """Return how many optimizer steps an epoch has."""
        return self.plan.steps

    def steps(self, epoch: int) -> Iterator[Step]:
        """Make the steps of an epoch that are left; its last one may have fewer batches.

        Raises ValueError if the first rank has its samples in another order.
        """
        run, plan = self._run(), self.plan
        total = (epoch + 1) * plan.steps
        if run.step < total:  # else who comes late would list all epochs that it passes by
            self._agreed = {"epoch": epoch, "digest": self._order.digest(epoch)}
            if self._has_begun:
                self.load_state_dict(run.broadcast_object(self._agreed))
        for step in run.steps(total, plan.counts):
            self._has_begun = True
            yield step

    def __call__(self, step: int, index: int) -> Any:
        """Return a batch, on the accelerator's device. Raises MicroBatchError if the step has none of that number."""
        return send_to_device(self._batches(step, index), self._device)

    def close(self) -> None:
        """End the workers that read ahead."""
        if isinstance(self._batches, ReadAhead):
            self._batches.close()

    def state_dict(self) -> dict[str, Any]:
        """Return in which order the samples of the present epoch are."""
        return dict(self._agreed)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Look whether others have the same order. Raises ValueError if they have another."""
        agreed = {name: state_dict[name] for name in ("epoch", "digest")}
        self._order.check(**agreed)
        self._agreed = agreed
