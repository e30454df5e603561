"""What a callback of a Trainer's says of itself: what it is made with, and its attributes (ExportableState)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


def callback_state(callback: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a callback's attributes, and what it is to be made with, if that can be written as a checkpoint has it."""
    state = callback.state()
    made_with = state.get("args", {})
    return state.get("attributes", {}), made_with if _text_of(made_with) else {}


def take_callback_state(
    callback: Any, attributes: dict[str, Any], made_with: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Have a callback become one that is made so and has these attributes, as transformers does behind a checkpoint.

    It stays the same object, and all else that it has stays.
    """
    if made_with and _text_of(made_with) != _text_of(callback_state(callback)[1]):
        vars(callback).update(vars(type(callback)(**made_with)))
    for attribute, value in attributes.items():
        setattr(callback, attribute, value)


def _text_of(made_with: Mapping[str, Any]) -> str:
    """Return it as text; "" if it cannot be written so."""
    try:
        return json.dumps(dict(made_with), default=float, sort_keys=True)
    except (TypeError, ValueError):
        return ""
