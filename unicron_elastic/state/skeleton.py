"""The part of a state that is no tensor, as plain JSON values: how it is written and what a valid one looks like.

``None``, bools, ints of 64 bits, finite floats and texts stand for themselves. All else is an array that begins with
its kind: ``["list", ...]``, ``["tuple", ...]``, ``["dict", [key, value], ...]``, ``["tensor", number]`` and so on. A
tensor whose dimensions lie in memory in another order is ``["turned", number, dimension, ...]``, the outermost first.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Sequence
from typing import Any

DEPTH_MAX = 100
INLINE_BYTES_MAX = 4096  # longer ones travel as a tensor, as JSON would take a third more room for them
WIDE_INT_DIGITS_MAX = 4096
_INT_MAX = 2**63

SEQUENCES = frozenset({"list", "tuple", "size"})
MAPPINGS = frozenset({"dict", "ordered", "counter"})
NUMBERED = frozenset({"tensor", "ndarray", "scalar", "blob"})
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def is_plain(value: Any) -> bool:
    """Whether a value stands for itself."""
    if value is None or type(value) in (bool, str):
        return True
    if type(value) is int:
        return -_INT_MAX <= value < _INT_MAX
    return type(value) is float and math.isfinite(value)


def float_text(value: float) -> str:
    """The name of a float that JSON has no number for."""
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def float_of(name: str) -> float:
    """The float with this name."""
    return _FLOATS[name]


def wide_int(text: str) -> int:
    """The integer of more than 64 bits that ``text`` writes in hexadecimal digits. Raises ValueError."""
    return int(text, 16)


def check(value: Any, tensors: Sequence[int]) -> None:
    """Raises ValueError unless ``value`` is a skeleton of tensors that have so many dimensions, and of no others."""
    _check(value, tensors, "the state", DEPTH_MAX)


def _check(value: Any, tensors: Sequence[int], where: str, depth: int) -> None:
    """Checks ``value``, which stands at ``where``."""
    if depth == 0:
        raise ValueError(f"a state is nested deeper than {DEPTH_MAX} levels")
    if is_plain(value):
        return
    if not isinstance(value, tuple | list) or not value or not isinstance(value[0], str):
        raise ValueError(f"{where} is neither a plain value nor an array that begins with its kind")
    kind, *parts = value
    if kind in SEQUENCES:
        for index, part in enumerate(parts):
            _check(part, tensors, f"{where}[{index}]", depth - 1)
        if kind == "size" and not all(type(part) is int and part >= 0 for part in parts):
            raise ValueError(f"{where} is a size of something other than numbers")
    elif kind in MAPPINGS:
        _check_items(parts, tensors, where, depth)
    elif kind == "module" and len(parts) == 2:
        _check(parts[0], tensors, f"the metadata of {where}", depth - 1)
        _check(parts[1], tensors, where, depth - 1)
        if not isinstance(parts[1], tuple | list) or parts[1][0] != "ordered":
            raise ValueError(f"{where} is a module's state without its items")
    elif kind == "turned" and parts and _is_leaf("tensor", parts[0], tensors):
        if not all(type(part) is int for part in parts) or sorted(parts[1:]) != list(range(tensors[parts[0]])):
            raise ValueError(f"{where} is a tensor whose dimensions are not each named once")
    elif not (len(parts) == 1 and _is_leaf(kind, parts[0], tensors)):
        raise ValueError(f"{where} is of the kind {kind[:40]!r}, which does not exist or has other parts")


def _check_items(items: list[Any], tensors: Sequence[int], where: str, depth: int) -> None:
    """Checks the items of a mapping."""
    seen: set[str | int] = set()
    for item in items:
        if not isinstance(item, tuple | list) or len(item) != 2 or type(item[0]) not in (str, int):
            raise ValueError(f"{where} has an item that is not a key (text or integer) with its value")
        if item[0] in seen or not is_plain(item[0]):
            raise ValueError(f"{where} has a key twice, or one of more than 64 bits")
        seen.add(item[0])
        _check(item[1], tensors, f"{where}[{item[0]!r:.60}]", depth - 1)


def _is_leaf(kind: str, part: Any, tensors: Sequence[int]) -> bool:
    """Whether ``part`` is what this kind has as its only part."""
    if kind in NUMBERED:
        return type(part) is int and 0 <= part < len(tensors)
    if not isinstance(part, str):
        return False
    if kind == "float":
        return part in _FLOATS
    try:
        if kind == "bytes":
            return len(base64.b64decode(part, validate=True)) <= INLINE_BYTES_MAX
        return kind == "int" and len(part) <= WIDE_INT_DIGITS_MAX and not is_plain(wide_int(part))
    except (ValueError, binascii.Error):
        return False
