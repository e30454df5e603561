"""What Lightning's Trainer has counted, logged and found best, as state that a replacement gets from the others."""

from __future__ import annotations

from typing import Any

from unicron_elastic.lightning.logged_values import LogExchange
from unicron_elastic.lightning.parts import folders_of, loop_state, take_folders, take_loop_state
from unicron_elastic.training.loader.sample_order import SampleOrder


class LightningProgress:
    """`LightningProgress` is the state of a Trainer's loop, callbacks and loggers, with the order of the samples.

    Who has the samples of the epoch in another order than the state that it is given refuses it.
    """

    follows_first = True  # in the middle of an epoch the others have not yet what it has saved and found best

    def __init__(self, trainer: Any, order: SampleOrder, exchange: LogExchange, steps_per_epoch: int) -> None:
        self._trainer = trainer
        self._order = order
        self._exchange = exchange
        self._steps_per_epoch = steps_per_epoch
        self._folders: dict[str, Any] | None = None  # to which all would write, when they know it of each other

    @property
    def knows_folders(self) -> bool:
        """Return whether the ranks have agreed to which folders the first one writes."""
        return self._folders is not None

    def news(self) -> dict[str, Any]:
        """Return all of it, with the folders of this rank if nobody has told any."""
        return {**self.state_dict(), "folders": self._folders or folders_of(self._trainer)}

    def state_dict(self) -> dict[str, Any]:
        """Return all of it."""
        epoch = self._trainer.global_step // self._steps_per_epoch
        order = {"epoch": epoch, "digest": self._order.digest(epoch)}
        return {
            "order": order,
            "ways": dict(self._exchange.ways),
            "folders": self._folders,
            **loop_state(self._trainer),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what ``state_dict`` gave. Raises ValueError if it cannot belong to this rank."""
        self._order.check(**state_dict["order"])
        self._exchange.ways = dict(state_dict["ways"])
        self.take_folders(state_dict)
        take_loop_state(self._trainer, state_dict)

    def take_folders(self, state_dict: dict[str, Any]) -> None:
        """Take over to which folders the first rank writes, if it is known."""
        if (folders := state_dict["folders"]) is not None:
            self._folders = dict(folders)
            take_folders(self._trainer, folders)
