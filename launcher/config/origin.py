"""Where settings of this process came from, for complaints: a file's settings stand in for options and variables.

All that a start without a file needs to know of files.
"""

from __future__ import annotations

CONFIG_VARIABLE = "UNICRON_CONFIG"
NO_FILE = "--config is empty; give a file, or leave the option out"

_PLACES: dict[str, str] = {}  # FILE:LINE by the option or variable that a complaint about it begins with


class BadConfig(ValueError):
    """The file cannot be used; the text is one sentence without a full stop, and begins with FILE or FILE:LINE."""


def remember(name: str, place: str) -> None:
    """The option or variable ``name`` has its value from ``place``, FILE:LINE."""
    _PLACES[name] = place


def forget(name: str) -> None:
    """Forget where the value of NAME came from."""
    _PLACES.pop(name, None)


def located(text: str) -> str:
    """A complaint, with the place in front if it begins with an option or variable that a file has set."""
    place = _PLACES.get(text.partition(" ")[0].rstrip(":")) if _PLACES else None
    return f"{place}: {text}" if place else text
