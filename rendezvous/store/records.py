"""Reads records of the store as what they must be: a JSON object with fields of known kinds, all of them bounded."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

from unicron_elastic.base.text import one_line
from unicron_elastic.rendezvous.store.interface import Entry

_ERROR_CHARACTERS = 300
_DIGITS_MAX = 19  # below 2^63
_PLAIN_BYTES = 64 * 1024
_COMPRESSED = b"\x78"  # with which zlib's begin, and no JSON object


def large_text(told: Mapping[str, Any]) -> bytes:
    """What a key holds of an object that may be large: etcd takes no more than 1.5 MiB. ``object_in`` reads it."""
    text = json.dumps(told).encode()
    return text if len(text) <= _PLAIN_BYTES else zlib.compress(text)


def object_in(entry: Entry, max_bytes: int) -> Mapping[str, Any]:
    """Raises ValueError that names the key. ``max_bytes`` are those of the JSON."""
    try:
        value = _inflated(entry.value, max_bytes)
    except zlib.error:
        value = b""
    if len(value) > max_bytes:
        held = len(entry.value) if value is entry.value else "more"
        raise ValueError(f"{_name(entry)} holds {held} bytes, and at most {max_bytes} are read")
    try:
        told = json.loads(value)
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict):
        raise ValueError(f"{_name(entry)} holds no JSON object")
    return told


def _inflated(value: bytes, max_bytes: int) -> bytes:
    """Return what was compressed, no more than one byte above the bound. Raises zlib.error."""
    return zlib.decompressobj().decompress(value, max_bytes + 1) if value.startswith(_COMPRESSED) else value


def odd(entry: Entry, what: str, error: Exception) -> ValueError:
    """What to raise for a key that does not hold ``what``."""
    return ValueError(f"{_name(entry)} holds no {what}: {one_line(str(error), _ERROR_CHARACTERS)}")


def _name(entry: Entry) -> str:
    return one_line(entry.key, _ERROR_CHARACTERS)


def text_in(told: Mapping[str, Any], name: str, characters: int | None = None) -> str:
    """The first ``characters`` of it. Raises ValueError."""
    value = told.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a text")
    return value[:characters]


def sentence_in(told: Mapping[str, Any], name: str, characters: int) -> str:
    """What it says to people, as one line of at most so many characters. Raises ValueError."""
    return one_line(text_in(told, name), characters)


def number_in(told: Mapping[str, Any], name: str, least: int = 0, bits: int = 62) -> int:
    """Return a number of ``least`` at the least and less than 2^``bits``. Raises ValueError."""
    value = told.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**bits:
        raise ValueError(f"{name} must be a whole number, at least {least} and below 2^{bits}")
    return value


def whole_number(value: bytes) -> int | None:
    """Read the number of a key that holds nothing else; None for what is none, or not below 2^63."""
    number = int(value) if value.isdigit() and len(value) <= _DIGITS_MAX else None
    return number if number is not None and number < 2**63 else None
