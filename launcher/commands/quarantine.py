"""``unicron quarantine``: which nodes are kept out of jobs, and the operator's way to change it."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from unicron_elastic.base.quarantine import Quarantined, active, check_node, is_active, sentence
from unicron_elastic.base.text import one_line
from unicron_elastic.launcher.agent.core import quarantine_file
from unicron_elastic.launcher.agent.core.quarantine_file import QuarantineFileError
from unicron_elastic.launcher.common.tables import aligned, wrapped
from unicron_elastic.launcher.config.answers import (
    BAD_USAGE,
    NOTHING_FOUND,
    duration_s,
    fail,
    local_time,
    operator,
    say,
    show,
)

_COLUMNS = ("node", "since", "until", "by")
_FLEXIBLE = [_COLUMNS.index("node"), _COLUMNS.index("by")]

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
        show(table(shown, now, shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
    if not shown:
        fail(NOTHING_FOUND, "No node is in quarantine.")


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
        fail(BAD_USAGE, "--reason is empty; say why, for whoever reads the list.")
    now = time.time()
    until = None if duration is None else now + duration_s(duration)
    entry = Quarantined(node=node, reason=reason, since=now, until=until, by=operator())
    try:
        entry = quarantine_file.add(_path(file), entry, say)
    except QuarantineFileError as error:
        fail(BAD_USAGE, f"{error}.")
    show(sentence(entry, now, local_time))


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
            was_there = quarantine_file.lift(_path(file), node, say)
        except QuarantineFileError as error:
            fail(BAD_USAGE, f"{error}.")
        if was_there:
            show(f"node {node} is no longer in quarantine.")
        else:
            absent.append(node)
    if absent:
        who = f"Node {absent[0]} is" if len(absent) == 1 else f"Nodes {', '.join(absent)} are"
        fail(NOTHING_FOUND, f"{who} not in quarantine.")


def table(entries: Sequence[Quarantined], now: float, width: int | None) -> str:
    """A row for each entry and its reason below it. ``width`` in columns; None: nothing is cut or wrapped, for grep."""
    heading, *lines = aligned([_COLUMNS, *(_cells(entry, now) for entry in entries)], width, _FLEXIBLE)
    text = [heading]
    for entry, line in zip(entries, lines, strict=True):
        text += [line, *wrapped(one_line(entry.reason), width)]
    return "\n".join(text)


def _cells(entry: Quarantined, now: float) -> tuple[str, ...]:
    until = "lifted by hand" if entry.until is None else f"{local_time(entry.until):%Y-%m-%d %H:%M}"
    over = "" if is_active(entry, now) else " (over)"
    return entry.node, f"{local_time(entry.since):%Y-%m-%d %H:%M}", until + over, one_line(entry.by)


def _path(file: Path | None) -> Path:
    return quarantine_file.default_path() if file is None else file


def _read(path: Path) -> Iterable[Quarantined]:
    try:
        return quarantine_file.read(path)
    except QuarantineFileError as error:
        fail(BAD_USAGE, f"{error}.")


def _check(node: str) -> None:
    try:
        check_node(node)
    except ValueError:
        fail(BAD_USAGE, f"{node!a} names no node; give a name without blanks, such as gpu-7.")
