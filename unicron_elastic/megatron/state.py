"""The training state of one process that trains with Megatron-Core: its part of the model, and what belongs to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


class State:
    """Model chunks, the optimizer, and whatever else has ``state_dict`` and ``load_state_dict``, by name."""

    def __init__(self, chunks: Sequence[torch.nn.Module], optimizer: Any, others: Mapping[str, Any]) -> None:
        self._chunks = chunks
        self._others = {"optimizer": optimizer, **others}
        self._rest: dict[str, Any] = {}  # what was taken, and is still to be loaded

    def state_dict(self) -> dict[str, Any]:
        """The tensors themselves, not copies."""
        chunks = [
            {name: tensor.detach() for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers())}
            for chunk in self._chunks
        ]
        others = {name: each.state_dict() for name, each in self._others.items() if name not in self._rest}
        return {"chunks": chunks, **others, **self._rest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what ``state_dict`` gave, in place where the model is concerned."""
        self.load_behind(state_dict, 0)
        self._rest = {}

    def load_behind(self, state_dict: dict[str, Any], steps: int) -> None:
        """Take over a state of which a script goes on as if it had made the first of these steps itself.

        If it is the only one, the script brings there itself what is not trained, as a scheduler. Else ``load_rest``
        has what is right of that, when the next step begins.
        """
        with torch.no_grad():
            for chunk, tensors in zip(self._chunks, state_dict["chunks"], strict=True):
                for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers()):
                    tensor.copy_(tensors[name])
        load_into(self._others["optimizer"], state_dict["optimizer"])
        self._rest = {name: state_dict[name] for name in self._others if name != "optimizer"}
        if steps != 1:
            self._load(self._rest)

    def load_rest(self) -> None:
        """Take over what is still to be loaded, if anything."""
        rest, self._rest = self._rest, {}
        self._load(rest)

    def _load(self, others: Mapping[str, Any]) -> None:
        for name, state in others.items():
            load_into(self._others[name], state)


class OfScriptBehind:
    """`OfScriptBehind` is the state of a process whose script is so many ``steps`` behind what it takes over."""

    def __init__(self, state: State, steps: int) -> None:
        self._state = state
        self._steps = steps

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return self._state.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take it over."""
        self._state.load_behind(state_dict, self._steps)


def load_into(target: Any, state: Any) -> None:
    """Load into ``target`` what its ``state_dict`` gave, wherever that was."""
    if isinstance(target, OptimizerParamScheduler):
        target.num_steps = 0  # it adds what it loads to what it has (megatron-core 0.16.1)
    target.load_state_dict(state)
