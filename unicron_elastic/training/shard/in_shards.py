"""The state of a run whose model is in shards, as it goes from one process to another in the same seat."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from unicron_elastic.state.snapshot.shards import Shards
from unicron_elastic.training.group.sendable import Stateful


class InShards:
    """`InShards` is what ``stateful`` has, with this process's shards in the place of tensors that are divided."""

    def __init__(self, stateful: Stateful, model: nn.Module) -> None:
        self._stateful = stateful
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        """Return it, with shards."""
        state: dict[str, Any] = self._shards().local(self._stateful.state_dict())
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take it over. Raises ValueError for shards of another mesh, and what ``stateful`` raises."""
        self._stateful.load_state_dict(self._shards().whole(state_dict))

    def _shards(self) -> Shards:
        return Shards(dict(self._model.named_parameters()))


def not_served(_key: str) -> NoReturn:
    """Serve nobody: who takes a shard takes it when all meet."""
    raise RuntimeError("shards are not served while the replica trains")
