"""Whether two places of what is registered are one object: a state that is put back has two, which then part."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer

from unicron_elastic.compat.tensors import local_of

_Key: TypeAlias = tuple[str, int]  # of an object, or of the memory of a tensor or an array


def found_twice(dicts: Mapping[str, dict[str, Any]], others: Mapping[str, Any]) -> str:
    """Say which two places of the registered ``dicts``, or of one and a module or an optimizer, are one; "" if none."""
    seen: dict[_Key, str] = {}
    for name, values in dicts.items():
        for place, key in _parts(values, name):
            if key in seen:
                return _sentence(seen[key], place)
            seen[key] = place
    if any(kind == "memory" for kind, _ in seen):
        for name, each in others.items():
            for tensor in _tensors(each):
                if (found := _memory(tensor)) is not None and found in seen:
                    return _sentence(f"a tensor of {name}", seen[found])
    return ""


def _sentence(one: str, other: str) -> str:
    return (
        f"{one} and {other} are one object, and a state that is put back would have two: register copies, as of "
        "copy.deepcopy(model.state_dict())"
    )


def _parts(value: Any, place: str) -> Iterator[tuple[str, _Key]]:
    """Yield all that can be changed in place in a value, and where it is; of what holds itself the first round."""
    ahead, entered = [(value, place)], set[int]()
    while ahead:
        here, where = ahead.pop()
        if isinstance(here, dict | list):
            yield where, ("object", id(here))
        if isinstance(here, dict | list | tuple) and id(here) not in entered:
            entered.add(id(here))
            items = here.items() if isinstance(here, dict) else enumerate(here)
            ahead += [(part, f"{where}[{key!r}]") for key, part in items]
        elif (key := _memory(here)) is not None:
            yield where, key


def _memory(value: Any) -> _Key | None:
    """Return whose memory a tensor or an array is in; None of what has none."""
    numpy = sys.modules.get("numpy")
    while numpy is not None and isinstance(value, numpy.ndarray):
        if value.base is None or not isinstance(value.base, numpy.ndarray | Tensor):
            return ("memory", int(value.__array_interface__["data"][0])) if value.size else None
        value = value.base
    if not isinstance(value, Tensor):
        return None
    try:
        address = local_of(value).untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse, say
        return None
    return ("memory", address) if address else None


def _tensors(registered: Any) -> Iterator[Tensor]:
    if isinstance(registered, nn.Module):
        yield from registered.parameters()
        yield from registered.buffers()
    elif isinstance(registered, Optimizer):
        for group in (*registered.param_groups, *registered.state.values()):
            yield from (each for each in group.values() if isinstance(each, Tensor))
