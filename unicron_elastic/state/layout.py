"""What a training state is made of: its tensors, and a skeleton of all the rest, which fits into JSON.

``flatten`` takes a state apart and copies nothing that lies in one piece; ``rebuild`` puts one together. Two processes
whose layouts have the same digest can exchange their tensors as bytes, one after the other, without a word about them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from unicron_elastic.state import skeleton as skeletons
from unicron_elastic.state.nested import Assembler, Dismantler

TEXT_CHARACTERS_MAX = 64 * 1024 * 1024
TENSORS_MAX = 1_000_000
DIMENSIONS_MAX = 64
BYTES_MAX = 2**50
ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex32": 4, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor: the name of its type in torch, its shape, and how many bytes its elements take in one piece."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """The description of a tensor."""
        name = str(tensor.dtype).removeprefix("torch.")
        return cls(name, tuple(tensor.shape), tensor.numel() * tensor.element_size())

    @classmethod
    def parse(cls, told: Any) -> TensorSpec:
        """The description in ``[dtype, shape]``. Raises ValueError."""
        if not isinstance(told, list) or len(told) != 2 or not isinstance(told[1], list):
            raise ValueError("a tensor is described by something other than its type and its shape")
        dtype, shape = told
        if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
            raise ValueError(
                f"a tensor is of the type {str(dtype)[:40]!r}, which torch does not have or we do not send"
            )
        if len(shape) > DIMENSIONS_MAX or not all(type(n) is int and 0 <= n <= BYTES_MAX for n in shape):
            raise ValueError(f"a tensor's shape is not up to {DIMENSIONS_MAX} numbers from 0 to {BYTES_MAX}")
        return cls(dtype, tuple(shape), math.prod(shape) * ITEM_BYTES[dtype])


@dataclass(frozen=True, eq=False)
class Layout:
    """A state without the contents of its tensors.

    ``skeleton`` is of JSON's values, as ``skeleton.py`` describes, and refers to tensors by their place in ``specs``.
    """

    skeleton: Any
    specs: tuple[TensorSpec, ...]

    @cached_property
    def total_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(spec.bytes for spec in self.specs)

    @cached_property
    def digest(self) -> str:
        """Equal for equal layouts alone: SHA-256 of the text, in 64 hexadecimal digits."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """The layout as ASCII text, always the same for the same layout."""
        specs = [[spec.dtype, spec.shape] for spec in self.specs]
        return json.dumps({"skeleton": self.skeleton, "tensors": specs}, separators=(",", ":"), allow_nan=False)

    @classmethod
    def parse(cls, text: str) -> Layout:
        """The layout in ``text``, which need not be trusted. Raises ValueError that says what is wrong with it."""
        if len(text) > TEXT_CHARACTERS_MAX:
            raise ValueError(f"a layout of more than {TEXT_CHARACTERS_MAX} characters")
        try:
            told = json.loads(text)
        except RecursionError as error:
            raise ValueError(f"a layout that is nested deeper than {skeletons.DEPTH_MAX} levels") from error
        except ValueError as error:
            raise ValueError(f"a layout that is no JSON: {error}") from error
        if not isinstance(told, dict) or told.keys() != {"skeleton", "tensors"}:
            raise ValueError("a layout is a JSON object with skeleton and tensors and nothing else")
        listed = told["tensors"]
        if not isinstance(listed, list) or len(listed) > TENSORS_MAX:
            raise ValueError(f"the tensors of a layout are a list of at most {TENSORS_MAX}")
        layout = cls(told["skeleton"], tuple(map(TensorSpec.parse, listed)))
        if layout.total_bytes > BYTES_MAX:
            raise ValueError(f"a layout of more than {BYTES_MAX} bytes")
        skeletons.check(layout.skeleton, [len(spec.shape) for spec in layout.specs])
        return layout

    def __eq__(self, other: object) -> bool:
        # By text: in Python True == 1 == 1.0, which are different states.
        return isinstance(other, Layout) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


def flatten(state: Any, *, takes_parts: bool = False) -> tuple[Layout, list[torch.Tensor]]:
    """The layout of a state and its tensors, each once, in the order in which they are met.

    The tensors are the state's own memory if that has no gaps, with the dimensions in the order in which they lie there
    (a channels_last tensor has the channels last), and copies of it otherwise. Views of the same memory are one tensor
    if they have the same shape then. NumPy's arrays are copied, as they do not count their changes. Raises TypeError
    that names the place of a value which cannot be sent. That is a DTensor as well, but with ``takes_parts``, where it
    stands for this rank's part of it.
    """
    dismantler = Dismantler(frozenset(ITEM_BYTES), takes_parts=takes_parts)
    skeleton = dismantler.take(state)
    return Layout(skeleton, tuple(map(TensorSpec.of, dismantler.tensors))), dismantler.tensors


def rebuild(layout: Layout, tensors: Sequence[torch.Tensor]) -> Any:
    """The state with this layout, made of ``tensors`` themselves, which have their numbers already: some are read here.

    Raises ValueError if they are not the layout's.
    """
    check_tensors(layout, tensors)
    return Assembler(tensors).make(layout.skeleton)


def empty_tensors(layout: Layout, device: torch.device | str = "cpu") -> list[torch.Tensor]:
    """Memory for the tensors of a layout, with nothing in it yet, which it must have before a state is made of them."""
    return [torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device) for spec in layout.specs]


def check_tensors(layout: Layout, tensors: Sequence[torch.Tensor]) -> None:
    """Raises ValueError unless ``tensors`` have the types and shapes of the layout, in its order."""
    if len(tensors) != len(layout.specs):
        raise ValueError(f"the layout has {len(layout.specs)} tensors, and {len(tensors)} were given")
    for number, (spec, tensor) in enumerate(zip(layout.specs, tensors, strict=True)):
        given = TensorSpec.of(tensor)
        if given != spec:
            wanted = f"{spec.dtype} {list(spec.shape)}"
            raise ValueError(f"tensor {number} is {given.dtype} {list(given.shape)}, and the layout has {wanted}")
