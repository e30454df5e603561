"""What a function of torch takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

__all__ = ["accepts", "only_accepted"]


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Return whether ``function`` has a parameter ``name``; false of what does not tell its parameters."""
    return name in _parameters(function)


def only_accepted(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Return those of the keyword arguments that ``function`` has parameters for."""
    return {name: value for name, value in arguments.items() if accepts(function, name)}


@lru_cache(maxsize=64)
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # it is written in C++
        return frozenset()
