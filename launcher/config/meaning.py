"""What help texts say of an option: its variables, its default and its kind of value. It stands there alone."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

from unicron_elastic.launcher.config.settings import (
    ValueKind,
    choice,
    number,
    parsed_switch,
    switch,
    text,
    whole_number,
)


def variables_in(words: str) -> tuple[str, ...]:
    """Return the variables of ``[env: A, B]``."""
    found = re.search(r"\[env: ([^]]*)\]", " ".join(words.split()))
    return () if found is None else tuple(re.findall(r"\b(?:UNICRON|PET)_[A-Z_]*[A-Z]", found[1]))


def meaning(words: str) -> str:
    """A help text without its default and its variables."""
    found = re.sub(r"\s*\(default: [^()]*\)", "", re.sub(r"\s*\[env: [^]]*\]", "", " ".join(words.split())))
    return found.strip().removesuffix(".")


def default_in(words: str) -> str:
    """The default that a help text tells; "" if it tells none."""
    found = re.search(r"\(default: ([^()]*)\)", " ".join(words.split()))
    return "" if found is None or found[1] == "none" else found[1]


def kind_of(metavar: str, parse: Callable[[str], object] | None) -> ValueKind:
    """The kind of value that a metavar stands for; ``parse`` is its option's own."""
    if metavar == "on|off":
        return switch(parse or parsed_switch)
    if "|" in metavar:
        return choice(tuple(metavar.split("|")), parse)
    if metavar in ("N", "PORT"):
        return whole_number(parse or whole_number().parse)
    if metavar in ("SECONDS", "W"):
        return number(parse or number().parse, "s" if metavar == "SECONDS" else "")
    return text(parse or str)


def shown(value: object) -> str:
    """A value as it would be typed."""
    if value is None or value in ("", [], argparse.SUPPRESS):
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, frozenset | list | tuple):
        return ",".join(map(str, sorted(value)))
    return f"{value:g}" if isinstance(value, float) else str(value)
