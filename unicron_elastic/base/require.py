"""Bad input gives one clear error: what is wrong, and what would be right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from unicron_elastic.base.text import one_line


def require(is_met: bool, text: str) -> None:
    """Raises ``ValueError`` with ``text`` unless the condition is met; what it cites is made printable."""
    if not is_met:
        raise ValueError(text if text.isprintable() else one_line(text))


def require_count(name: str, value: object, least: int = 0) -> None:
    """Raises ``ValueError`` unless ``value`` is a whole number of at least ``least``."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    require(is_whole and int(str(value)) >= least, f"{name} is {value!r}: it must be a whole number, at least {least}")


def require_keys(options: Mapping[str, object], known: Sequence[str], what: str, needed: Sequence[str]) -> None:
    """Raises ``ValueError`` for a key of ``what`` that is not known, and for one that is needed and not there."""
    for key in options:
        if key in known:
            continue
        near = get_close_matches(str(key), known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
        require(False, f"{what} has the unknown key {key!r}: {hint}")
    for key in needed:
        require(key in options, f"{what} has no {key}: it must be given")
