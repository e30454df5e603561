"""How the commands of ``unicron`` answer: text, complaints and exit codes, the same for all of them."""

from __future__ import annotations

import getpass
import os
import sys
from datetime import datetime, timezone
from typing import NoReturn

import typer

from unicron_elastic.base.quarantine import parse_duration
from unicron_elastic.base.text import one_line, set_apart
from unicron_elastic.launcher.config.origin import located

NOTHING_FOUND, BAD_USAGE = 1, 2
UNREADABLE = 3  # of ``status``: after 0, 1 and 2, which are the verdict's


def show(text: str) -> None:
    """The answer itself, with what the terminal cannot show replaced."""
    encoding = sys.stdout.encoding or "utf-8"
    typer.echo(text.encode(encoding, "replace").decode(encoding))


def say(text: str) -> None:
    """A word beside the answer."""
    typer.echo(f"unicron: {set_apart(text)}", err=True)


def fail(code: int, text: str) -> NoReturn:
    """Says why there is no answer, and ends the command."""
    say(located(text))
    raise typer.Exit(code)


def duration_s(text: str) -> float:
    """Seconds, of what was given with --for; ends the command if it is no duration."""
    try:
        return parse_duration(text)
    except ValueError as error:
        fail(BAD_USAGE, f"--for: {text!a} is not valid; give {error}.")


def operator() -> str:
    """The user's name; the number of one who has none, as in many containers."""
    try:
        name = one_line(getpass.getuser())
    except (KeyError, OSError):
        name = ""
    return name or f"uid {os.getuid()}"


def local_time(moment: float) -> datetime:
    """Unix seconds as this machine's time of day, with the offset of that day."""
    return datetime.fromtimestamp(moment, timezone.utc).astimezone()
