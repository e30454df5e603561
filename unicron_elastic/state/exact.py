"""Has objects take over a state as it is: what was received is what is loaded, types and bits.

``torch.optim.Optimizer.load_state_dict`` casts the state of a parameter to the parameter's type, which turns the fp32
moments and master weights of bf16 parameters into bf16; of a text there it makes that of a generator, and of each kind
of dict a plain one. Who goes on with that trains something else than who gave them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from unicron_elastic.state.nested import place_of

_MADE_OF_PARTS = "<generator object "  # what str() makes of a generator of a text's characters
_DICTS = (OrderedDict, Counter)  # whose kind is sent
CHUNK_BYTES = 64 * 2**20  # of a tensor, compared at once
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def load_exactly(target: Any, state: Any, name: str) -> None:
    """Load into ``target`` the ``state``, which is that of ``name`` in messages.

    Raises what its ``load_state_dict`` raises, and ValueError that names the entry which is not what was received.
    """
    target.load_state_dict(state)
    _put_back(target.state_dict(), state)
    check_same(target.state_dict(), state, name)


def check_same(loaded: Any, received: Any, name: str) -> None:
    """Raises ValueError that names the tensor which was received and is not what was loaded."""
    found = dict(tensors_of(loaded, name))
    for place, tensor in tensors_of(received, name):
        if place not in found:
            raise ValueError(f"{place} was received and is not there after load_state_dict")
        if (difference := _difference(found[place], tensor)) is not None:
            raise ValueError(f"{place} was received {difference} after load_state_dict")


def tensors_of(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors in the dicts, lists and tuples of ``value``, with the names of their places."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from tensors_of(part, place_of(path, key))
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from tensors_of(part, f"{path}[{index}]")


def bits(tensor: Tensor) -> Tensor:
    """The same memory as integers, in which NaN is equal to itself and 0.0 is not -0.0."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()])


def _put_back(loaded: Any, received: Any) -> Any:
    """What is to stand in the place of ``loaded``: itself, with all in it that torch made another replaced as received.

    The dicts in an optimizer's ``state_dict()`` are its own, so that what is put there is its state.
    """
    if isinstance(loaded, Tensor) and isinstance(received, Tensor):
        is_cast = loaded.dtype != received.dtype and loaded.shape == received.shape
        return received.to(loaded.device) if is_cast else loaded
    if isinstance(loaded, str) and isinstance(received, str):
        return received if loaded.startswith(_MADE_OF_PARTS) else loaded
    if isinstance(loaded, dict) and isinstance(received, dict):
        for key in loaded.keys() & received.keys():
            if (right := _put_back(loaded[key], received[key])) is not loaded[key]:
                loaded[key] = right
        if type(loaded) is dict and type(received) in _DICTS and loaded.keys() == received.keys():
            return type(received)(loaded)
    elif type(loaded) in (list, tuple) and type(received) in (list, tuple) and len(loaded) == len(received):
        parts = [_put_back(mine, theirs) for mine, theirs in zip(loaded, received, strict=True)]
        if type(loaded) is list:
            loaded[:] = parts
        elif any(right is not part for right, part in zip(parts, loaded, strict=True)):
            return tuple(parts)
    return loaded


def _difference(loaded: Tensor, received: Tensor) -> str | None:
    """What ``loaded`` is instead of ``received``; None if they are the same."""
    if loaded.dtype != received.dtype:
        return f"as {_short(received.dtype)} and is {_short(loaded.dtype)}"
    if loaded.shape != received.shape:
        return f"in the shape {list(received.shape)} and is {list(loaded.shape)}"
    return None if _is_same(loaded, received) else "with other values than it has"


def _is_same(loaded: Tensor, received: Tensor) -> bool:
    """Whether all bits are equal; ``loaded`` may be on another device."""
    mine, theirs = (each.to_local() if hasattr(each, "to_local") else each for each in (loaded, received))
    if mine is theirs or mine.numel() == 0:
        return True
    if mine.layout != theirs.layout or mine.shape != theirs.shape:
        return False
    mine, theirs = (bits(torch.atleast_1d(each)) for each in (mine, theirs))
    rows = max(1, CHUNK_BYTES * len(mine) // mine.nbytes)
    return all(
        torch.equal(part, other.to(part.device))
        for part, other in zip(mine.split(rows), theirs.split(rows), strict=True)
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
