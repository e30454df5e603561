"""Small text tools of this package: one line out of many, and the exceptions inside a formatted traceback."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches

# Characters of a message or traceback that are looked at, from its start. C++ stacks run to megabytes and say nothing.
LONGEST_TEXT = 20_000

# The two sentences by which Python's traceback module joins the exceptions of a chain, oldest first.
_CHAIN = re.compile(
    r"^(?:The above exception was the direct cause of the following exception:|"
    r"During handling of the above exception, another exception occurred:)$",
    re.MULTILINE,
)
_TYPE_AND_TEXT = re.compile(r"([A-Za-z_][\w.]*)(?::\s?(.*))?", re.DOTALL)


def one_line(text: str) -> str:
    """`text` on one line of printable characters: breaks, tabs, escapes and lone surrogates become single spaces."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def shorten(text: str, limit: int) -> str:
    """`text`, cut to at most `limit` characters with an ellipsis where something was lost."""
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"


def shown(value: object, limit: int = 80) -> str:
    """What somebody else wrote, for a sentence: on one line, at most `limit` characters, texts in quotes.

    Its kind alone where it cannot be written: lists in lists may be nested deeper than that goes.
    """
    try:
        return shorten(one_line(repr(value)), limit)
    except (RecursionError, ValueError):  # ValueError: a number of thousands of digits
        return type(value).__name__


def chained_exceptions(stack: str) -> list[tuple[str, str]]:
    """(type, text) of each exception in a formatted traceback, oldest first.

    Frames and source lines are indented, so that a line of code which merely mentions an error is never read as one.
    """
    found = []
    for part in _CHAIN.split(stack[-LONGEST_TEXT:]):
        lines = [line for line in part.splitlines() if line and not line[0].isspace()]
        kept = "\n".join(line for line in lines if not line.startswith("Traceback (most recent call last)"))
        if match := _TYPE_AND_TEXT.match(kept):
            found.append((match[1], match[2] or ""))
    return found


# Bad input gives one clear error: what is wrong, and what would be right.


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
