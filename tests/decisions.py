"""Decisions as text: a line at the margin is an event, and the indented lines below it are all that is answered.

A scenario begins with a line that makes what decides. An event is a line by the name and the arguments of one of its
methods. ``pytest --update`` writes the answers anew: read the difference before you commit it.
"""

from __future__ import annotations

import ast
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import pytest

Answer = Callable[[Any, Callable[[], object]], Iterable[str]]


def played(text: str, begins: Mapping[str, Callable[..., Any]], words: Mapping[str, Any], answer: Answer) -> str:
    """Return ``text`` with the answers as they are now.

    ``begins``: what makes one that decides, by the first word of its line. ``words``: what else has a meaning of its
    own. ``answer`` has one decide, by calling what it is given, and yields the lines to be indented.
    """
    lines: list[str] = []
    decides: Any = None
    for line in text.splitlines():
        if line.startswith("    "):
            continue
        lines.append(line)
        if not line or line.startswith(("#", "==")):
            continue
        name, arguments, options = parsed(line, words)
        if name in begins:
            decides = begins[name](*arguments, **options)
        else:
            event = partial(getattr(decides, name), *arguments, **options)
            lines += [f"    {each}" for each in answer(decides, event)]
    return "\n".join(lines) + "\n"


def check(path: Path, now: str, request: pytest.FixtureRequest) -> None:
    """Compare the answers of a file with those of ``now``, or write it with ``--update``."""
    if request.config.getoption("--update"):
        path.write_text(now, encoding="utf-8")
    else:
        assert now == path.read_text(encoding="utf-8"), f"if this is meant: pytest {request.node.path.name} --update"


def never_told(folder: Path, commands: Iterable[type]) -> list[str]:
    """Return the names of those commands that no file of ``folder`` has."""
    lines = [line for path in folder.glob("*.txt") for line in path.read_text(encoding="utf-8").splitlines()]
    told = {line.split()[0].rstrip(":") for line in lines if line.startswith("    ")}
    return sorted(each.__name__ for each in commands if each.__name__ not in told)


def parsed(line: str, words: Mapping[str, Any]) -> tuple[str, list[Any], dict[str, Any]]:
    """Return the method, the arguments and the options of an event's line."""
    name, *rest = shlex.split(line)
    arguments: list[Any] = []
    options: dict[str, Any] = {}
    for word in rest:
        key, is_option, text = word.partition("=")
        if is_option and key.isidentifier():
            options[key] = value(text, words)
        else:
            arguments.append(value(word, words))
    return name, arguments, options


def value(word: str, words: Mapping[str, Any]) -> Any:
    """Return what a word stands for, a number, or else the word itself."""
    if word in words:
        return words[word]
    if "#" in word:  # the name of a member, and no comment
        return word
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word


def names_of(*enums: type[Enum]) -> dict[str, Enum]:
    """Return the members of enumerations by their names, such as Status.OK."""
    return {f"{each.__name__}.{member.name}": member for each in enums for member in each}


def shown(command: Any, short: Callable[[Any], str]) -> str:
    """Return a command as one line: what differs from its defaults, and its reason behind a colon."""
    told = [f"{name}={short(each)}" for name, each in changed(command) if name != "reason"]
    reason = f": {command.reason}" if getattr(command, "reason", "") else ""
    return " ".join([type(command).__name__, *told]) + reason


def changed(command: Any) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a command that are not what they are by default."""
    for field in fields(command):
        found = getattr(command, field.name)
        if field.default is MISSING or found != field.default:
            yield field.name, found
