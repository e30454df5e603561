"""Makes of something valid what is almost valid: bytes are changed, and, where it is JSON, values, keys and nesting."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from typing import Any

__all__ = ["DEEPEST", "mutated"]

DEEPEST = 1000  # about where Python's own reader of JSON gives up
_BYTES_MAX = 64 * 1024
_DEEP = "as deep as "  # and a number, in place of lists that json.dumps could not write
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400, 0.5, -0.0, 1e308, 1e-320, float("nan"),
    float("inf"), float("-inf"), "", " ", "0", "-1", "1e5", "nan", "x" * 5000, "\0", "\n\x1b[2J", "\ud800", "\u202e",
    "ü" * 300, "../../etc/passwd", "/", "%2F", "node", "0x10", [], {}, [[]], [None], {"": None}, [1] * 3000,
]  # fmt: skip
_TOKENS = [
    b"\0", b"\n", b"\r\n", b"\xff", b"\xfe\xff", b"\xef\xbb\xbf", b"\xed\xa0\x80", b'"', b"\\u0000", b"\\ud800", b"{}",
    b"[]", b"null", b"NaN", b"Infinity", b"-", b"1e999", b"9" * 5000, b"#", b",", b",,", b":", b"[" * DEEPEST,
    b'{"a":' * DEEPEST, b"\xc3\xbc", b" ", b"\t", b"add", b"remove", b"%s", b"'", b"=", b";", b"&a [*a]", b"!!python/",
]  # fmt: skip


def mutated(seed: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    """Something near ``seed``; parts of ``others`` may get into it. At most 64 KiB."""
    data = seed
    told = _json_of(seed)
    if told is not None and chance.random() < 0.75:
        for _ in range(chance.choice((1, 1, 1, 2, 3, 6))):
            told = _changed(told, chance)
        data = _text(told, chance)
        if chance.random() < 0.8:
            return data[:_BYTES_MAX]
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        data = _bytes_changed(data, others, chance)
    return data[:_BYTES_MAX]


def _json_of(seed: bytes) -> Any:
    try:
        return json.loads(seed)
    except (ValueError, RecursionError):
        return None


def _text(told: Any, chance: random.Random) -> bytes:
    text = json.dumps(told, ensure_ascii=chance.random() < 0.5, separators=chance.choice((None, (",", ":"))))
    text = re.sub(f'"{_DEEP}([0-9]+)"', lambda found: "[" * int(found[1]) + "]" * int(found[1]), text)
    return text.encode(errors="surrogatepass")


def _changed(told: Any, chance: random.Random) -> Any:
    """The same with one thing changed somewhere."""
    if isinstance(told, dict) and told and chance.random() < 0.8:
        name = chance.choice(list(told))
        match chance.randrange(10):
            case 0:
                return {key: value for key, value in told.items() if key != name}
            case 1:
                return {**told, _odd_name(chance): told[name]}
            case 2:
                return {**told, name: told[chance.choice(list(told))]}
            case _:
                return {**told, name: _changed(told[name], chance)}
    if isinstance(told, list) and told and chance.random() < 0.8:
        place = chance.randrange(len(told))
        match chance.randrange(8):
            case 0:
                return told[:place] + told[place + 1 :]
            case 1:
                return told[:place] + [told[place]] * chance.choice((2, 2, 50, 3000)) + told[place:]
            case 2:
                return chance.sample(told, len(told))
            case _:
                return [*told[:place], _changed(told[place], chance), *told[place + 1 :]]
    return _instead(told, chance)


def _instead(told: Any, chance: random.Random) -> Any:
    """Another value: odd ones, near ones, the same one level deeper, and lists in lists as deep as can be read."""
    if isinstance(told, bool) or told is None or chance.random() < 0.5:
        return chance.choice(ODD)
    if isinstance(told, int | float) and chance.random() < 0.7:
        return chance.choice((told + 1, told - 1, -told, told * 2, float(told) if abs(told) < 1e300 else 0, str(told)))
    if isinstance(told, str) and chance.random() < 0.7:
        return chance.choice((told + "x", told[:-1], told.upper(), told * 50, f"{told}\0", f" {told}\n", [told]))
    return chance.choice(([told], {"a": told}, f"{_DEEP}{DEEPEST - chance.randrange(60)}"))


def _odd_name(chance: random.Random) -> str:
    return chance.choice(("", "a", "\0", "\ud800", "__class__", "x" * 300, "node", "1"))


def _bytes_changed(data: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    at, end = sorted((chance.randrange(len(data) + 1), chance.randrange(len(data) + 1)))
    match chance.randrange(9):
        case 0 if data:
            place = chance.randrange(len(data))
            return data[:place] + bytes((data[place] ^ 1 << chance.randrange(8),)) + data[place + 1 :]
        case 1:
            return data[:at] + chance.randbytes(chance.randrange(1, 9)) + data[at:]
        case 2:
            return data[:at] + data[at : at + chance.randrange(1, 9)] * 2 + data[at:]
        case 3:
            return data[:at] + data[at + chance.randrange(1, 9) :]
        case 4:
            return data[:at]
        case 5:
            return data[:at] + data[end:]
        case 6 if others:
            other = chance.choice(others)
            place = chance.randrange(len(other) + 1)
            return data[:at] + other[place : place + chance.randrange(1, 60)] + data[end:]
        case 7:
            lines = data.split(b"\n")
            chance.shuffle(lines)
            return b"\n".join(lines)
        case _:
            return data[:at] + chance.choice(_TOKENS) + data[at:]
