"""Recognising the same failure at the same place, so that a deterministic bug is not retried for ever."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from unicron_elastic.base.fault import Failure
from unicron_elastic.base.text import LONGEST_TEXT, one_line
from unicron_elastic.faults.exit_status import signal_of

_LONGEST_MESSAGE = 300  # characters after normalising; the rest of a text seldom tells two failures apart

_ADDRESS = re.compile(r"\b0x[0-9a-f]+", re.IGNORECASE)  # of an object, in its repr: another one in each process

# What differs between two runs of the same failure, in the order in which it is replaced: addresses and identifiers
# before numbers, because they contain digits.
_CHANGING: Mapping[re.Pattern[str], str] = MappingProxyType(
    {
        # C++ frames: their order is stable, their addresses and library paths are not, and they fill the length.
        re.compile(r"\n[ \t]{0,8}(?:Exception raised from |frame #\d).*", re.DOTALL): "",
        re.compile(r"(?:/private)?/(?:tmp|var/tmp|var/folders|dev/shm)/[^\s'\",:;)\]]+"): "<tmp>",
        re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", re.IGNORECASE): "<id>",
        # IPv6, with or without zone; at least two colons and a hexadecimal end, so "c10d::Store" stays.
        re.compile(r"(?<![\w:])(?:[0-9a-f]{0,4}:){2,7}[0-9a-f]{1,4}(?:%\w+)?(?![\w:])", re.IGNORECASE): "<ip>",
        _ADDRESS: "#",
        re.compile(r"\b(?=[a-f]{0,64}\d)[0-9a-f]{8,64}\b", re.IGNORECASE): "#",
        re.compile(r"(?<![\w)])[-+](?=\d)"): "",
        re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?", re.IGNORECASE): "#",
        re.compile(r"# ?(?:[KMGTPE]i?B|bytes)\b"): "#",  # a size may cross a unit between two runs
        re.compile(r"#(?:(?:, ?|\.|x)#)+"): "#",  # shapes, lists of ranks, dotted addresses
    }
)
_TEMPORARY = next(pattern for pattern, mark in _CHANGING.items() if mark == "<tmp>")


def signature(failure: Failure, *, is_exact: bool = False) -> str:
    """An identity that stays the same when the same failure happens again at the same place.

    Made of the exception's type, the place in the user's code and the message without numbers, addresses, ports and
    temporary paths; without an exception, of how the process ended. Rank, host, process and step are left out: a bug in
    the script may strike any rank at any step. Equal signatures are therefore a strong hint, not a proof. With
    ``is_exact`` the message counts as it is, but for addresses of objects (0x...).
    """
    message = failure.message or ""
    message = one_line(_ADDRESS.sub("#", message), LONGEST_TEXT) if is_exact else _normalise(message)
    if failure.exception_type:
        place = _TEMPORARY.sub("<tmp>", one_line(failure.location or ""))
        return f"{one_line(failure.exception_type)} | {place} | {message}"
    return f"{_end(failure.exit_code)} | {message}"


def _normalise(message: str) -> str:
    text = message[:LONGEST_TEXT]
    for pattern, mark in _CHANGING.items():
        text = pattern.sub(mark, text)
    return one_line(text, _LONGEST_MESSAGE)


def _end(exit_code: int | None) -> str:
    if exit_code is None:
        return "no exit"
    number = signal_of(exit_code)
    return f"exit {exit_code}" if number is None else f"signal {number}"
