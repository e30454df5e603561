"""What a callback of a Trainer's says of itself: what it is made with, and its attributes (ExportableState)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_NOTHING: Mapping[str, Any] = MappingProxyType({})


def callback_state(callback: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a callback's attributes, and what it is to be made with, if that can be written as a checkpoint has it."""
    state = callback.state()
    made_with = state.get("args", {})
    return state.get("attributes", {}), made_with if _text_of(made_with) else {}


def take_callback_state(callback: Any, attributes: dict[str, Any], made_with: Mapping[str, Any] = _NOTHING) -> None:
    """Have a callback become one that is made so and has these attributes, as transformers does behind a checkpoint.

    The training has begun, other than there: so it stays the same object, and what it has of that stays.
    """
    own = callback_state(callback)[1]
    if own and made_with and _text_of(made_with) != _text_of(own):
        ours = vars(type(callback)(**own))
        for name, value in vars(type(callback)(**made_with)).items():
            if _text_of(value) not in ("", _text_of(ours.get(name))):
                setattr(callback, name, value)
    for attribute, value in attributes.items():
        setattr(callback, attribute, value)


def _text_of(value: Any) -> str:
    """Return plain data as text; "" for what is none."""
    try:
        return json.dumps(value, default=float, sort_keys=True)
    except (TypeError, ValueError):
        return ""
