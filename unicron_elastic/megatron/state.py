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
        self._taken: dict[str, Any] | None = None
        self._again: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """The tensors themselves, not copies."""
        chunks = [
            {name: tensor.detach() for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers())}
            for chunk in self._chunks
        ]
        return {"chunks": chunks, **{name: each.state_dict() for name, each in self._others.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what ``state_dict`` gave, in place where the model is concerned."""
        with torch.no_grad():
            for chunk, tensors in zip(self._chunks, state_dict["chunks"], strict=True):
                for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers()):
                    tensor.copy_(tensors[name])
        for name in self._others:
            load_into(self._others[name], state_dict[name])
        self._taken = {name: state_dict[name] for name in self._others if name != "optimizer"}

    def load_again_later(self) -> None:
        """The script is about to go on as if it had made a step itself, which is in what was taken already."""
        self._again = self._taken

    def load_again(self) -> None:
        """Takes over once more what the script has changed since, if anything."""
        for name, state in (self._again or {}).items():
            load_into(self._others[name], state)
        self._again = self._taken = None


def load_into(target: Any, state: Any) -> None:
    """Load into ``target`` what its ``state_dict`` gave, wherever that was."""
    if isinstance(target, OptimizerParamScheduler):
        target.num_steps = 0  # it adds what it loads to what it has (megatron-core 0.16.1)
    target.load_state_dict(state)
