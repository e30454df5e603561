"""Takes nested values apart into a skeleton and tensors, and puts them together again."""

from __future__ import annotations

import base64
import sys
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from unicron_elastic.compat.tensors import local_of
from unicron_elastic.state import skeleton as skeletons

SUPPORTED = (
    "None, bool, int, float, str, bytes, torch.Tensor, torch.Size, NumPy arrays and scalars of numbers, "
    "and lists, tuples and dicts of these with keys that are str or int"
)


def place_of(path: str, key: str | int) -> str:
    """What the part of a dict at ``path`` is called that has this key."""
    is_name = isinstance(key, str) and key.isidentifier()
    return f"{path}.{key}".lstrip(".") if is_name else f"{path}[{key!r}]"


def memory_order(tensor: torch.Tensor) -> list[int]:
    """The dimensions as they lie in memory, the outermost first; [] if that is their own order, or leaves gaps."""
    if tensor.layout != torch.strided or tensor.is_contiguous():
        return []
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return order if tensor.permute(order).is_contiguous() else []


def flat_like(like: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor of the shape of ``like``, in the order in which those of ``like`` lie in memory, 1-D."""
    order = memory_order(like)
    return (tensor.permute(order) if order else tensor).reshape(-1)


def shaped_like(like: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """``flat``, which has as many numbers as ``like``, in its shape and the order of its memory: undoes flat_like."""
    order = memory_order(like)
    return turned(flat.view([like.shape[dimension] for dimension in order]), order) if order else flat.view(like.shape)


def turned(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """The tensor whose dimensions lie in memory in this order, which is that of ``tensor``."""
    return tensor.permute([order.index(dimension) for dimension in range(len(order))])


class Dismantler:
    """Takes one state apart. ``dtypes``: the names of torch's types that can be sent."""

    def __init__(self, dtypes: frozenset[str], *, takes_parts: bool = False) -> None:
        """Take this rank's part of a DTensor where ``takes_parts``; others refuse it."""
        self._takes_parts = takes_parts
        self.tensors: list[torch.Tensor] = []
        self._dtypes = dtypes
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._arrays: dict[tuple[Any, ...], Any] = {}

    def take(self, value: Any, path: str = "", depth: int = skeletons.DEPTH_MAX) -> Any:
        """The skeleton of ``value``, which stands at ``path``; its tensors are added. Raises TypeError."""
        if depth == 0:
            raise TypeError(f"{_named(path)[:200]} is nested deeper than {skeletons.DEPTH_MAX} levels, or holds itself")
        if skeletons.is_plain(value):
            return value
        if isinstance(value, torch.Tensor):
            return self._take_tensor(value, path)
        if isinstance(value, dict):
            return self._take_dict(value, path, depth)
        kind = {list: "list", tuple: "tuple", torch.Size: "size"}.get(type(value))
        if kind is not None:
            return (kind, *(self.take(part, f"{path}[{index}]", depth - 1) for index, part in enumerate(value)))
        return self._take_leaf(value, path)

    def _take_leaf(self, value: Any, path: str) -> tuple[Any, ...]:
        """The skeleton of a value without parts that JSON does not have."""
        if type(value) is float:
            return ("float", skeletons.float_text(value))
        if type(value) is int and value.bit_length() <= 4 * skeletons.WIDE_INT_DIGITS_MAX - 8:
            return ("int", hex(value))
        if type(value) is bytes:
            return self._take_bytes(value)
        numpy = sys.modules.get("numpy")
        if numpy is not None and type(value) is numpy.ndarray:
            return ("ndarray", self._add(_from_numpy(numpy, self._copied(value), path)))
        if numpy is not None and isinstance(value, numpy.generic):
            return ("scalar", self._add(_from_numpy(numpy, numpy.array(value), path)))
        raise _unsupported(value, path)

    def _copied(self, array: Any) -> Any:
        """A copy of an array, the same for the same one: nothing tells whether it is changed while it is on its way."""
        place = (array.__array_interface__["data"][0], array.dtype, array.shape, array.strides)
        if place not in self._arrays:
            self._arrays[place] = array.copy(order="C")
        return self._arrays[place]

    def _take_bytes(self, value: bytes) -> tuple[Any, ...]:
        """The skeleton of bytes, which become a tensor if there are many of them."""
        if len(value) <= skeletons.INLINE_BYTES_MAX:
            return ("bytes", base64.b64encode(value).decode())
        return ("blob", self._add(torch.frombuffer(bytearray(value), dtype=torch.uint8)))

    def _take_dict(self, value: dict[Any, Any], path: str, depth: int) -> tuple[Any, ...]:
        """The skeleton of any kind of dict; the state of a torch module keeps the versions that come with it."""
        items = []
        for key, part in value.items():
            if type(key) not in (str, int) or not skeletons.is_plain(key):
                raise TypeError(
                    f"{_named(path)} has the key {key!r:.60}; keys that can be sent are str, or int of 64 bits"
                )
            items.append((key, self.take(part, place_of(path, key), depth - 1)))
        kind = "ordered" if isinstance(value, OrderedDict) else "counter" if isinstance(value, Counter) else "dict"
        metadata = getattr(value, "_metadata", None)
        if kind == "ordered" and metadata is not None:
            return ("module", self.take(metadata, f"{path}._metadata", depth - 1), (kind, *items))
        return (kind, *items)

    def _take_tensor(self, tensor: torch.Tensor, path: str) -> tuple[Any, ...]:
        """The skeleton of a tensor, which is added."""
        if self._takes_parts:
            tensor = local_of(tensor)
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
            raise _unsupported(tensor, path)
        if tensor.is_quantized or tensor.is_meta or str(tensor.dtype).removeprefix("torch.") not in self._dtypes:
            raise _unsupported(tensor, path)
        tensor = tensor.detach()
        order = memory_order(tensor)
        return ("turned", self._add(tensor.permute(order)), *order) if order else ("tensor", self._add(tensor))

    def _add(self, tensor: torch.Tensor) -> int:
        """The number of a tensor, which is added if it is new."""
        place: tuple[Any, ...] = (tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride())
        place = (*place, tensor.is_conj(), tensor.is_neg())
        number = self._numbers.get(place, len(self.tensors)) if tensor.numel() else len(self.tensors)
        if number == len(self.tensors):
            self._numbers[place] = number
            self.tensors.append(tensor.resolve_conj().resolve_neg().contiguous())
        return number


class Assembler:
    """Makes values of a skeleton that has been checked."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors

    def make(self, skeleton: Any) -> Any:
        """The value of which this is the skeleton."""
        if skeletons.is_plain(skeleton):
            return skeleton
        kind, *parts = skeleton
        if kind in skeletons.SEQUENCES:
            made = [self.make(part) for part in parts]
            return made if kind == "list" else tuple(made) if kind == "tuple" else torch.Size(made)
        if kind in skeletons.MAPPINGS:
            items = {key: self.make(part) for key, part in parts}
            return items if kind == "dict" else OrderedDict(items) if kind == "ordered" else Counter(items)
        if kind == "module":
            state = self.make(parts[1])
            state._metadata = self.make(parts[0])
            return state
        if kind == "turned":
            number, *order = parts
            return turned(self._tensors[number], order)
        return self._make_leaf(kind, parts[0])

    def _make_leaf(self, kind: str, part: Any) -> Any:
        """The value of a kind that has one part."""
        match kind:
            case "tensor":
                return self._tensors[part]
            case "ndarray":
                return self._tensors[part].cpu().numpy()
            case "scalar":
                return self._tensors[part].cpu().numpy()[()]
            case "blob":
                return bytes(self._tensors[part].cpu().tolist())
            case "bytes":
                return base64.b64decode(part)
            case "float":
                return skeletons.float_of(part)
            case _:
                return skeletons.wide_int(part)


def _from_numpy(numpy: Any, array: Any, path: str) -> torch.Tensor:
    """The memory of an array of numbers, which lies in one piece, as a tensor."""
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        dtype = numpy.dtype(array.dtype).name
        raise TypeError(
            f"{_named(path)} is an array of {dtype}, which cannot be sent; supported are {SUPPORTED}"
        ) from error


def _unsupported(value: Any, path: str) -> TypeError:
    """The complaint about a value."""
    name = type(value).__name__
    if isinstance(value, torch.Tensor):
        name = f"{name} ({value.layout}, {value.dtype}, {value.device.type})".replace("torch.", "")
    article = "an" if name[0] in "AEIOUaeiou" else "a"
    return TypeError(f"{_named(path)} is {article} {name}, which cannot be sent; supported are {SUPPORTED}")


def _named(path: str) -> str:
    """What a place is called; the whole state has no path, and that of a part of a list begins with a bracket."""
    return f"the state{path}" if path[:1] in ("", "[") else path
