"""``unicron quarantine``: which nodes are kept out of jobs, and the operator's way to change it."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from unicron_elastic.faults.text import one_line, shorten
from unicron_elastic.launcher import quarantine
from unicron_elastic.launcher.quarantine import QuarantineFileError
from unicron_elastic.recovery.quarantine import Quarantined, active, check_node, is_active, parse_duration, sentence

__all__ = ["app", "table"]

NOTHING_FOUND, BAD_USAGE = 1, 2
_COLUMNS = ("node", "since", "until", "by")
_GAP = "  "
_INDENT = "     "
_NARROWEST = 40  # columns; below it a reason is not wrapped further

app = typer.Typer(
    help="Keep nodes out of jobs, and let them in again. Nodes share the list if all see the same file.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_File = Annotated[
    Path | None,
    typer.Option("--file", metavar="FILE", help="The list; by default the user's own [env: UNICRON_QUARANTINE]."),
]


@app.command("list")
def list_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: a list.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Also nodes whose quarantine is over.")] = False,
    file: _File = None,
) -> None:
    """List the nodes in quarantine, the newest last."""
    now = time.time()
    entries = _read(_path(file))
    shown = sorted(entries if every else active(entries, now), key=lambda entry: (entry.since, entry.node))
    if as_json:
        typer.echo(json.dumps([{**each.to_json(), "active": is_active(each, now)} for each in shown], indent=2))
    elif shown:
        _print(table(shown, now, shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
    if not shown:
        _fail(NOTHING_FOUND, "No node is in quarantine.")


@app.command("add")
def add_command(
    node: Annotated[str, typer.Argument(metavar="NODE", help="Its name, as the command hostname prints it there.")],
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why, for whoever reads the list.")],
    duration: Annotated[
        str | None, typer.Option("--for", metavar="DURATION", help="30s, 15m, 6h or 2d; else until it is lifted.")
    ] = None,
    file: _File = None,
) -> None:
    """Put a node into quarantine. One that is there already gets the new reason, and the later end of the two."""
    _check(node)
    if not one_line(reason):
        _fail(BAD_USAGE, "--reason is empty; say why, for whoever reads the list.")
    now = time.time()
    until = None if duration is None else now + _seconds(duration)
    entry = Quarantined(node=node, reason=reason, since=now, until=until, by=_operator())
    try:
        entry = quarantine.add(_path(file), entry, _say)
    except QuarantineFileError as error:
        _fail(BAD_USAGE, f"{error}.")
    _print(sentence(entry, now, _local))


@app.command("lift")
def lift_command(
    nodes: Annotated[list[str], typer.Argument(metavar="NODE...", help="Their names, as in the list.")],
    file: _File = None,
) -> None:
    """Let nodes into jobs again."""
    for node in nodes:
        _check(node)
    absent = []
    for node in dict.fromkeys(nodes):
        try:
            was_there = quarantine.lift(_path(file), node, _say)
        except QuarantineFileError as error:
            _fail(BAD_USAGE, f"{error}.")
        if was_there:
            _print(f"node {node} is no longer in quarantine.")
        else:
            absent.append(node)
    if absent:
        who = f"Node {absent[0]} is" if len(absent) == 1 else f"Nodes {', '.join(absent)} are"
        _fail(NOTHING_FOUND, f"{who} not in quarantine.")


def table(entries: Sequence[Quarantined], now: float, width: int | None) -> str:
    """A row for each entry and its reason below it. ``width`` in columns; None: nothing is cut or wrapped, for grep."""
    rows = [_COLUMNS, *(_cells(entry, now) for entry in entries)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    heading, *lines = [_GAP.join(map(str.ljust, row, widths)).rstrip() for row in rows]
    text = [heading if width is None else shorten(heading, width)]
    for entry, line in zip(entries, lines, strict=True):
        text += [line if width is None else shorten(line, width), *_wrapped(one_line(entry.reason), width)]
    return "\n".join(text)


def _cells(entry: Quarantined, now: float) -> tuple[str, ...]:
    until = "lifted by hand" if entry.until is None else f"{_local(entry.until):%Y-%m-%d %H:%M}"
    over = "" if is_active(entry, now) else " (over)"
    return entry.node, f"{_local(entry.since):%Y-%m-%d %H:%M}", until + over, one_line(entry.by)


def _wrapped(text: str, width: int | None) -> list[str]:
    if width is None:
        return [_INDENT + text]
    return textwrap.wrap(text, max(width, _NARROWEST), initial_indent=_INDENT, subsequent_indent=_INDENT)


def _local(moment: float) -> datetime:
    """Unix seconds as this machine's time of day, with the offset of that day."""
    return datetime.fromtimestamp(moment, timezone.utc).astimezone()


def _path(file: Path | None) -> Path:
    return quarantine.default_path() if file is None else file


def _read(path: Path) -> Iterable[Quarantined]:
    try:
        return quarantine.read(path)
    except QuarantineFileError as error:
        _fail(BAD_USAGE, f"{error}.")


def _check(node: str) -> None:
    try:
        check_node(node)
    except ValueError:
        _fail(BAD_USAGE, f"{node!a} names no node; give a name without blanks, such as gpu-7.")


def _seconds(duration: str) -> float:
    try:
        return parse_duration(duration)
    except ValueError as error:
        _fail(BAD_USAGE, f"--for: {duration!a} is not possible here; it takes {error}.")


def _operator() -> str:
    """The user's name; the number of one who has none, as in many containers."""
    try:
        name = one_line(getpass.getuser())
    except (KeyError, OSError):
        name = ""
    return name or f"uid {os.getuid()}"


def _print(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    typer.echo(text.encode(encoding, "replace").decode(encoding))


def _say(text: str) -> None:
    typer.echo(f"unicron: {text}", err=True)


def _fail(code: int, text: str) -> NoReturn:
    _say(text)
    raise typer.Exit(code)
