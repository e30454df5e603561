"""The training state of one process that trains with Megatron-Core: its part of the model, and what belongs to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ["State"]


class State:
    """Model chunks, the optimizer, and whatever else has ``state_dict`` and ``load_state_dict``, by name."""

    def __init__(self, chunks: Sequence[torch.nn.Module], optimizer: Any, others: Mapping[str, Any]) -> None:
        self._chunks = chunks
        self._others = {"optimizer": optimizer, **others}

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
        for name, each in self._others.items():
            each.load_state_dict(state_dict[name])
