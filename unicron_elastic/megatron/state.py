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

    def load_state_dict(self, state_dict: dict[str, Any], behind: int = 0) -> None:
        """Takes over what ``state_dict`` gave, in place where the model is concerned.

        A script that is some steps ``behind`` goes on as if it had made the first of them itself. If it is the only
        one, it brings there itself what is not trained, as a scheduler. What is right of that is loaded by
        ``load_rest`` in any case, when the next step begins.
        """
        with torch.no_grad():
            for chunk, tensors in zip(self._chunks, state_dict["chunks"], strict=True):
                for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers()):
                    tensor.copy_(tensors[name])
        load_into(self._others["optimizer"], state_dict["optimizer"])
        rest = {name: state_dict[name] for name in self._others if name != "optimizer"}
        if behind != 1:
            self._load(rest)
        self._rest = rest if behind else {}

    def load_rest(self) -> None:
        """Take over what is still to be loaded, if anything."""
        rest, self._rest = self._rest, {}
        self._load(rest)

    def _load(self, others: Mapping[str, Any]) -> None:
        for name, state in others.items():
            load_into(self._others[name], state)


def load_into(target: Any, state: Any) -> None:
    """Load into ``target`` what its ``state_dict`` gave, wherever that was."""
    if isinstance(target, OptimizerParamScheduler):
        target.num_steps = 0  # it adds what it loads to what it has (megatron-core 0.16.1)
    target.load_state_dict(state)
