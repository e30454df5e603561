"""What scripts give a run, checked when they give it: a wrong type is said with the argument's name."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, SupportsFloat

from torch import nn

from unicron_elastic.base.text import one_line

_CHARACTERS = 40


def whole_number(name: str, value: Any) -> int:
    """Return it as an int, also 1e4, or a number of NumPy's or torch's. Raises TypeError that names the argument."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, and not {shown(value)}") from None


def check_ranks(ranks: Any) -> None:
    """Raise TypeError or ValueError for what is no number of ranks; None is as many as there are."""
    if ranks is not None and whole_number("ranks", ranks) < 1:
        raise ValueError(f"ranks must be 1 or more, got {ranks}")


def seconds(name: str, value: Any) -> float:
    """Return it as a float. Raises TypeError that names the argument."""
    if not isinstance(value, SupportsFloat):
        raise TypeError(f"{name} must be a number of seconds, and not {shown(value)}")
    return float(value)


def function(name: str, value: Any) -> Callable[[], None]:
    """Return what can be called; None is what does nothing. Raises TypeError that names the argument."""
    if value is None:
        return lambda: None
    if not callable(value):
        raise TypeError(f"{name} must be a function without arguments, and not {shown(value)}")
    called: Callable[[], None] = value
    return called


def check_module(name: str, value: Any) -> None:
    """Raise TypeError that names the argument for what is no module of torch's."""
    if not isinstance(value, nn.Module):
        raise TypeError(f"{name} must be a torch.nn.Module, and not {shown(value)}")


def shown(value: Any) -> str:
    """Return what a script gave, for people."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"{one_line(repr(value), _CHARACTERS)}, a {type(value).__name__}"
