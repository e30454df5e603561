"""What a Trainer has counted and logged, as state that a replacement gets from the others."""

from __future__ import annotations

import json
from typing import Any

import torch

from unicron_elastic.training.loader.sample_order import SampleOrder
from unicron_elastic.transformers.parts import set_state_values, state_values


class TrainerProgress:
    """`TrainerProgress` is a Trainer's own state and that of its callbacks, with the order of the epoch's samples.

    It is sent as text, as a log is longer than what may be sent as lists. Who has the samples of the epoch in another
    order than the state that it is given refuses it.
    """

    follows_first = True  # others take over what it has logged and found best where all agree

    def __init__(self, trainer: Any, order: SampleOrder, steps_per_epoch: int) -> None:
        self._trainer = trainer
        self._order = order
        self._steps_per_epoch = steps_per_epoch
        self._agreed = 0  # so many lines of the log are the same on all ranks

    def state_dict(self) -> dict[str, Any]:
        """Return all of it."""
        return self._given(0)

    def news(self) -> dict[str, Any]:
        """Return all of it but what of the log the others have."""
        return self._given(self._agreed)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what ``state_dict`` or ``news`` gave. Raises ValueError if it cannot belong to this rank."""
        values = json.loads(bytes(state_dict["text"].tolist()))
        self._order.check(*values["order"])
        set_state_values(self._trainer, values)
        log = self._trainer.state.log_history
        log[values["from"] :] = values["log"]
        self._agreed = len(log)

    def _given(self, begin: int) -> dict[str, Any]:
        state = self._trainer.state
        epoch = state.global_step // self._steps_per_epoch
        values = {
            **state_values(self._trainer),
            "from": begin,
            "log": state.log_history[begin:],
            "order": [epoch, self._order.digest(epoch)],
        }
        text = json.dumps(values, default=_number, sort_keys=True).encode()
        return {"text": torch.frombuffer(bytearray(text), dtype=torch.uint8)}


def _number(value: Any) -> float:
    """Return a number of NumPy's or torch's as one of Python's. Raises TypeError for what is none."""
    return float(value)
