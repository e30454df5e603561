"""What a newcomer gets from a member: the state of the run, and what its own script will not have done to the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unicron_elastic.training.joining import HasState
from unicron_elastic.training.trainable import Trainable

__all__ = ["Handover"]


class Handover:
    """Of one process, to others of its job alone: what is saved has the state of the run and no more."""

    def __init__(self, run: HasState, trainable: Trainable) -> None:
        self._run = run
        self._trainable = trainable

    def state_dict(self) -> dict[str, Any]:
        """Both."""
        return {"run": self._run.state_dict(), "model": self._trainable.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes both over. Raises what the run raises, and ValueError for a model of another make."""
        self._run.load_state_dict(state["run"])
        self._trainable.load_state_dict(state["model"])
