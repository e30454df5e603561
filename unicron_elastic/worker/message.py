"""What processes of ours say to one another: one class a message, sent as JSON with file descriptors beside it.

A script may write to a channel of ours as well: ``heard`` takes nothing that a process of ours cannot have said. How
long a list may be needs no limit of its own, as a message has one (``channel.BODY_BYTES_MAX``).
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

_KIND = "is"
_BESIDE = "fds"

Descriptors = tuple[int, ...]  # the type of a field ``fds``, which travels beside the text


class Message:
    """`Message` is anything that one process says to another.

    Its ``fds`` stay the sender's; those of a message that was heard are for its reader to close.
    """

    @property
    def fds(self) -> Descriptors:
        """The descriptors that come with it; none, unless its class has a field of that name."""
        return ()

    def message(self) -> dict[str, Any]:
        """Return it as it is sent."""
        return {_KIND: type(self).__name__, **_plain_fields(self)}


@dataclass(frozen=True, slots=True)
class Odd(Message):
    """`Odd` is what no process of ours says; ``why`` names what is wrong."""

    why: str


Kind = TypeVar("Kind", bound=Message)
_Read = Callable[[Any], Any]  # what is read of plain data; raises ValueError with the end of a sentence


def heard(body: Mapping[str, Any], kinds: Sequence[type[Kind]], fds: Sequence[int] = ()) -> Kind | Odd:
    """Return what was said, with ``fds`` if its kind has some; `Odd` for what is none of these ``kinds``."""
    name = body.get(_KIND)
    kind = next((each for each in kinds if each.__name__ == name), None)
    if kind is None:
        return Odd("it is of no kind that is known here")
    try:
        said: Kind = _made(kind, body, fds)
    except ValueError as error:
        return Odd(f"{name}{error}")
    return said


def _plain_fields(value: Any) -> dict[str, Any]:
    return {each.name: _plain(getattr(value, each.name)) for each in fields(value) if each.name != _BESIDE}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, int | float | str):
        return value
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    own = getattr(value, "to_message", None)
    return _plain_fields(value) if own is None else own()


def _made(kind: Any, body: Mapping[str, Any], fds: Sequence[int] = ()) -> Any:
    values: dict[str, Any] = {}
    for each, read in _readers(kind):
        if each.name == _BESIDE:
            values[_BESIDE] = tuple(fds)
        elif each.name in body:
            values[each.name] = _within(f".{each.name}", read, body[each.name])
        elif each.default is MISSING and each.default_factory is MISSING:
            raise ValueError(f".{each.name} is missing")
    return kind(**values)


@cache
def _readers(kind: Any) -> tuple[tuple[Field[Any], _Read], ...]:
    types_of = get_type_hints(kind)
    return tuple((each, _reader(types_of[each.name])) for each in fields(kind))


def _within(where: str, read: _Read, value: Any) -> Any:
    try:
        return read(value)
    except ValueError as error:
        raise ValueError(f"{where}{error}") from None


def _reader(type_: Any) -> _Read:
    """Return what reads a value of this type."""
    if type_ in _SCALARS:
        return _SCALARS[type_]
    origin, inside = get_origin(type_), get_args(type_)
    if origin is types.UnionType and inside[1:] == (types.NoneType,):
        return _or_none(_reader(inside[0]))
    if origin is tuple:
        return _list_of(_reader(inside[0])) if inside[1:] == (Ellipsis,) else _row_of(list(map(_reader, inside)))
    if origin is dict and inside[0] is str:
        return _table_of(_reader(inside[1]))
    own = getattr(type_, "from_message", None)
    if own is not None:
        return _read_by_itself(own)
    if not is_dataclass(type_):
        raise TypeError(f"{type_} cannot be sent")
    return lambda value: _made(type_, _table(value))


def _whole(value: Any) -> int:
    if type(value) is int and abs(value) < 2**63:
        return value
    raise ValueError(" is not a whole number")


def _number(value: Any) -> float:
    if (type(value) is int and abs(value) < 2**63) or (type(value) is float and math.isfinite(value)):
        return float(value)
    raise ValueError(" is not a number")


def _text(value: Any) -> str:
    if type(value) is str:
        return value
    raise ValueError(" is not a text")


def _truth(value: Any) -> bool:
    if type(value) is bool:
        return value
    raise ValueError(" is not true or false")


def _anything(value: Any) -> Any:
    return value


_SCALARS: Mapping[Any, _Read] = {int: _whole, float: _number, str: _text, bool: _truth, Any: _anything}


def _table(value: Any) -> dict[str, Any]:
    if type(value) is dict:
        return value
    raise ValueError(" is not a table")


def _list(value: Any) -> Sequence[Any]:
    if type(value) in (list, tuple):
        return value  # type: ignore[no-any-return]
    raise ValueError(" is not a list")


def _or_none(read: _Read) -> _Read:
    return lambda value: None if value is None else read(value)


def _list_of(read: _Read) -> _Read:
    return lambda value: tuple(_within(f"[{place}]", read, each) for place, each in enumerate(_list(value)))


def _row_of(reads: Sequence[_Read]) -> _Read:
    def read_it(value: Any) -> Any:
        if len(_list(value)) != len(reads):
            raise ValueError(f" is not a list of {len(reads)}")
        return tuple(
            _within(f"[{place}]", read, each) for place, (read, each) in enumerate(zip(reads, value, strict=True))
        )

    return read_it


def _table_of(read: _Read) -> _Read:
    return lambda value: {key: _within(f"[{key!r}]", read, each) for key, each in _table(value).items()}


def _read_by_itself(read: _Read) -> _Read:
    def read_it(value: Any) -> Any:
        try:
            return read(value)
        except ValueError as error:
            raise ValueError(f": {error}") from None

    return read_it
