"""States with sharded tensors: each rank's own shard is what its snapshot has, and what it takes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unicron_elastic.compat.tensors import split_of, strided_shard

MARK = "unicron:shard"


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """``value`` with ``change`` done to all that is in its dicts, lists and tuples."""
    if isinstance(value, dict):
        made = {key: map_leaves(each, change) for key, each in value.items()}
        return made if type(value) is dict else _as(value, made)
    if type(value) in (list, tuple):
        return type(value)(map_leaves(each, change) for each in value)
    return change(value)


def has_shards(value: Any) -> bool:
    """Whether there is a DTensor in it."""
    found = []
    map_leaves(value, lambda leaf: found.append(leaf) if _is_dtensor(leaf) else None)
    return bool(found)


class Shards:
    """Takes DTensors apart and puts them together again, over the meshes of the model that is there now."""

    def __init__(self, model_state: Any) -> None:
        """``model_state``: in which all meshes are found, in the same order in each process of the same rank."""
        self._meshes: list[Any] = []
        map_leaves(model_state, self._learn)

    def local(self, state: Any) -> Any:
        """``state`` with each DTensor replaced by this rank's shard and how it is sharded. Raises TypeError."""
        return map_leaves(state, self._take)

    def whole(self, state: Any) -> Any:
        """Undoes ``local``. Raises ValueError for another mesh."""
        return _replaced(state, self._make)

    def gathered(self, state: Any, parts: list[Any]) -> Any:
        """``state`` with each DTensor replaced by what it is like; the DTensors themselves are added to ``parts``."""

        def take(leaf: Any) -> Any:
            if not _is_dtensor(leaf):
                return leaf
            parts.append(leaf)
            mark = self._take(leaf)
            return {**mark, "shard": str(leaf.dtype).removeprefix("torch.")}

        return map_leaves(state, take)

    def spread(self, state: Any, parts: list[Any]) -> Any:
        """Undoes ``gathered`` with new DTensors of zeros, over the meshes that are there now; adds them to ``parts``.

        Raises ValueError for another mesh.
        """
        from torch.distributed.tensor import zeros

        def make(mark: dict[str, Any]) -> Any:
            dtype = getattr(torch, mark["shard"])
            mesh, placements = self._mesh(mark)
            parts.append(zeros(mark["shape"], dtype=dtype, device_mesh=mesh, placements=placements))
            return parts[-1]

        return _replaced(state, make)

    def _learn(self, leaf: Any) -> None:
        if _is_dtensor(leaf) and leaf.device_mesh not in self._meshes:
            self._meshes.append(leaf.device_mesh)

    def _take(self, leaf: Any) -> Any:
        if not _is_dtensor(leaf):
            return leaf
        self._learn(leaf)
        return {
            "kind": MARK,
            "mesh": self._meshes.index(leaf.device_mesh),
            "placements": [_placement_text(each) for each in leaf.placements],
            "shape": list(leaf.shape),
            "stride": list(leaf.stride()),
            "shard": leaf.to_local().detach(),
        }

    def _make(self, mark: dict[str, Any]) -> Any:
        from torch.distributed.tensor import DTensor

        mesh, placements = self._mesh(mark)
        shard: Tensor = mark["shard"].to(mesh.device_type)
        shape, stride = torch.Size(mark["shape"]), tuple(mark["stride"])
        return DTensor.from_local(shard, mesh, placements, run_check=False, shape=shape, stride=stride)

    def _mesh(self, mark: dict[str, Any]) -> tuple[Any, list[Any]]:
        placements = [_placement(text) for text in mark["placements"]]
        if mark["mesh"] >= len(self._meshes) or self._meshes[mark["mesh"]].ndim != len(placements):
            raise ValueError("the state was sharded over a device mesh that the model here has not")
        return self._meshes[mark["mesh"]], placements


def _replaced(state: Any, make: Callable[[dict[str, Any]], Any]) -> Any:
    """``state`` with something made of each mark of a DTensor."""
    if isinstance(state, dict) and state.get("kind") == MARK:
        return make(state)
    if isinstance(state, dict):
        made = {key: _replaced(each, make) for key, each in state.items()}
        return made if type(state) is dict else _as(state, made)
    if type(state) in (list, tuple):
        return type(state)(_replaced(each, make) for each in state)
    return state


def _is_dtensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and hasattr(leaf, "device_mesh") and hasattr(leaf, "placements")


def _placement_text(placement: Any) -> str:
    if placement.is_replicate():
        return "replicate"
    if (split := split_of(placement)) is not None:
        return f"shard {placement.dim} of {split}"
    if type(placement).__name__ == "Shard":
        return f"shard {placement.dim}"
    raise TypeError(f"a tensor that is placed as {placement} cannot be kept in a snapshot; replicated and sharded can")


def _placement(text: str) -> Any:
    from torch.distributed.tensor import Replicate, Shard

    match text.split():
        case ["replicate"]:
            return Replicate()
        case ["shard", dim, "of", split]:
            return strided_shard(int(dim), int(split))
        case ["shard", dim]:
            return Shard(int(dim))
    raise ValueError(f"a state has a tensor that is placed as {text}, which is known to no version here")


def _as(like: Any, made: dict[Any, Any]) -> Any:
    """Return the same kind of mapping, such as an OrderedDict with torch's metadata."""
    again = type(like)()
    again.update(made)
    return again
