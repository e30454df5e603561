"""``unicron config show``: every setting, its value, and who has said so."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from unicron_elastic.compat.command_line import TorchMissing
from unicron_elastic.launcher.commands.cluster import print_json
from unicron_elastic.launcher.config.answers import BAD_USAGE, NOTHING_FOUND, fail, show
from unicron_elastic.launcher.config.commands import entries_of, sentence
from unicron_elastic.launcher.config.origin import CONFIG_VARIABLE, NO_FILE, BadConfig
from unicron_elastic.launcher.config.resolve import Resolved, resolve
from unicron_elastic.launcher.config.settings import Use
from unicron_elastic.launcher.config.table import RUN, SettingsTable, Words, all_uses, commands

app = typer.Typer(
    help="Show what is set, and where.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.callback()
def _only_group() -> None:
    """Show what is set, and where."""


@app.command("show", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def show_command(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[COMMAND [ARGUMENTS]]",
            help="All settings of this command, such as run, agent or quarantine list, as it would have them with "
            "these arguments; else what is set of all commands.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: a list.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Also what nothing sets, with its default.")] = False,
) -> None:
    """Show settings: value, and whether a flag, a variable, a line of the file or the default says so.

    A flag goes before the environment, that before the file, that before the default.
    """
    try:
        found = of_command(command) if command else _of_all(every=every)
    except (TorchMissing, ValueError) as error:
        fail(BAD_USAGE, sentence(error))
    if as_json:
        print_json([each.to_json() for each in found])
    elif found:
        show(_table(found))
    if not found:
        fail(NOTHING_FOUND, "Nothing is set: every option has its default.")


def _of_all(*, every: bool) -> list[Resolved]:
    """Raises ValueError for what is set wrongly."""
    environ = os.environ
    entries = entries_of(environ)
    settings = [setting for section in SettingsTable().values() for setting in section.values()]
    found = [resolve(Use(setting), {}, environ, entries) for setting in settings]
    return [each for each in found if every or each.source != "default"]


def of_command(typed: list[str]) -> list[Resolved]:
    """All settings of a command with its arguments, such as ["agent", "--label", "a"].

    Raises ValueError for what is set wrongly, and arguments.TorchMissing. What is no command ends this one.
    """
    words, arguments = _split(typed)
    given, config = _given(words, arguments)
    if config is not None and not config.strip():
        raise BadConfig(NO_FILE)
    environ = os.environ
    entries = entries_of(environ if config is None else {**environ, CONFIG_VARIABLE: config})
    return [resolve(use, given, environ, entries) for use in all_uses(words)]


def _split(typed: list[str]) -> tuple[Words, list[str]]:
    if typed[0] in (RUN, "unicron-run"):
        return (RUN,), typed[1:]
    known = commands()
    words: Words = ()
    for word in typed:
        if (*words, word) not in known:
            break
        words = (*words, word)
    if not words:
        names = sorted({name for name, *_ in known} | {RUN})
        fail(BAD_USAGE, f"{typed[0]!r} is no command; there are {', '.join(names)}.")
    return words, typed[len(words) :]


def _given(words: Words, arguments: list[str]) -> tuple[Mapping[str, tuple[str, str]], str | None]:
    """What the arguments say: flag and text, by the setting's name, and the file; a bad flag ends the command."""
    if words == (RUN,):
        from unicron_elastic.launcher.config.run import config_in, given_in

        return given_in(arguments), config_in(arguments)
    command = commands()[words]
    context = typer.Context(command, info_name=" ".join(("unicron", *words)))
    found, _, order = command.make_parser(context).parse_args(args=list(arguments))
    named = {param.name for param in order}
    told = {}
    for use in all_uses(words):
        if use.parameter in named and (value := found.get(use.parameter)) is not None:
            told[use.setting.name] = _typed(use, value)
    return told, found.get("config")


def _typed(use: Use, value: Any) -> tuple[str, str]:
    if use.takes_value:
        return use.flags[0], ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    is_on = bool(value)
    return use.flags[0] if is_on or not use.off_flags else use.off_flags[0], "on" if is_on else "off"


def _table(found: list[Resolved]) -> str:
    rows = [(each.setting.name, each.shown, each.origin) for each in found]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    widths[1] = min(widths[1], _WIDEST)
    return "\n".join(f"{name:{widths[0]}}  {value:{widths[1]}}  {origin}" for name, value, origin in rows)


_WIDEST = 40  # of the column with values; a longer one pushes the rest of its line
