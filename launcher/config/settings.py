"""What can be set: one record for each setting, however it is set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

SHARED = "cluster"  # the section of what all commands share

_ON = ("on", "true", "yes", "1")
_OFF = ("off", "false", "no", "0")


@dataclass(frozen=True, slots=True)
class ValueKind:
    """A kind of value. ``parse`` raises ValueError whose text says what would be right."""

    name: str  # such as "whole number"
    parse: Callable[[str], object]
    unit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What has one value for a process, whichever of its sources counts."""

    section: str
    key: str
    variables: tuple[str, ...]  # the first that is set counts
    kind: ValueKind
    help: str
    default: str = ""
    is_secret: bool = False
    is_many: bool = False  # several values, with commas
    blank_counts: bool = False  # a variable that is set to nothing is set
    rivals: tuple[str, ...] = ()  # variables that say the same in another way: if one is set, a file has no word
    by_variable: bool = False  # a file's value takes the place of the variable, not of the option
    is_read_elsewhere: bool = True  # its reader knows its variables

    @property
    def name(self) -> str:
        """Return the name as errors and ``unicron config show`` have it."""
        return f"{self.section}.{self.key}"

    def value(self, text: str, place: str) -> object:
        """The value of ``text``, which stands in ``place``. Raises ValueError: one sentence without a full stop."""
        try:
            return self.kind.parse(text)
        except ValueError as error:
            what = "this value" if self.is_secret else repr(text)
            raise ValueError(f"{place}: {what} is not valid; give {error}") from None

    def variable(self, environ: Mapping[str, str]) -> str:
        """Name the variable that counts; "" if none is set."""
        for name in self.variables:
            if environ.get(name, "").strip() or (self.blank_counts and name in environ):
                return name
        return ""


@dataclass(frozen=True, slots=True)
class Use:
    """A setting as one command has it: by these flags, of which the first is the usual spelling; none: no flag."""

    setting: Setting
    flags: tuple[str, ...] = ()
    parameter: str = ""  # the name by which the command's function has it
    off_flags: tuple[str, ...] = ()  # --resume, of --pause/--resume
    takes_value: bool = True  # on the command line


def parsed_switch(text: str) -> bool:
    """Raises ValueError that says what would be right."""
    word = text.strip().lower()
    if word not in (*_ON, *_OFF):
        raise ValueError("on or off")
    return word in _ON


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("a whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("a number") from None


def text(parse: Callable[[str], object] = str, name: str = "text") -> ValueKind:
    """Any, or what ``parse`` takes."""
    return ValueKind(name, parse)


def switch(parse: Callable[[str], object] = parsed_switch) -> ValueKind:
    """On or off."""
    return ValueKind("on or off", parse)


def whole_number(parse: Callable[[str], object] = _whole_number, unit: str = "") -> ValueKind:
    """One, in ``unit``."""
    return ValueKind("whole number", parse, unit)


def number(parse: Callable[[str], object] = _number, unit: str = "") -> ValueKind:
    """One, in ``unit``."""
    return ValueKind("number", parse, unit)


def choice(words: tuple[str, ...], parse: Callable[[str], object] | None = None) -> ValueKind:
    """One of ``words``."""
    listed = f"{', '.join(words[:-1])} or {words[-1]}"

    def chosen(text: str) -> str:
        if text not in words:
            raise ValueError(listed)
        return text

    return ValueKind(f"one of {', '.join(words)}", parse or chosen)
