"""``unicron-run`` with a file: what it says of options is put in front of the command line, the rest into variables.

What was typed stands after it and wins, the command that other nodes get has all of it, and no worker finds torchrun's
variables in its environment that nobody has set there: a torchrun inside of a script would read them.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import MutableMapping, Sequence
from typing import Any

from unicron_elastic.launcher.config.arguments import get_args_parser
from unicron_elastic.launcher.config.file import read_config
from unicron_elastic.launcher.config.origin import NO_FILE, BadConfig, remember
from unicron_elastic.launcher.config.resolve import from_file
from unicron_elastic.launcher.config.settings import parsed_switch
from unicron_elastic.launcher.config.table import SettingsTable, run_uses

FLAG = "--config"
_SHORTEST = 4  # of an abbreviation; --c could be --cluster


def with_file(
    argv: Sequence[str], of_script: int, path: str, environ: MutableMapping[str, str] = os.environ
) -> list[str]:
    """The command line with the settings of ``path``, which is not named in it any more.

    The last ``of_script`` words are the script's arguments. Sets variables in ``environ``. Raises BadConfig and
    arguments.TorchMissing.
    """
    if not path.strip():
        raise BadConfig(NO_FILE)
    entries = read_config(path, SettingsTable())
    given = given_in(argv)
    options: list[str] = []
    for use in run_uses():
        entry = from_file(use.setting, environ, entries)
        if entry is None or use.setting.name in given:
            continue
        flag, is_on = next(iter(use.flags), ""), use.takes_value or parsed_switch(entry.text)
        if use.setting.by_variable:
            name = use.setting.variables[0]
            environ[name] = entry.text if use.takes_value else str(int(is_on))
            remember(name, entry.place)
        elif is_on:
            options.append(f"{flag}={entry.text}" if use.takes_value else flag)
            remember(flag, entry.place)
    return [*options, *without_config(argv, of_script)]


def without_config(argv: Sequence[str], of_script: int) -> list[str]:
    """The command line without the option that names the file: it is read once, where it was typed."""
    own = len(argv) - of_script
    kept: list[str] = []
    skips = False
    for word in argv[:own]:
        name, equals, _ = word.partition("=")
        if skips:
            skips = False
        elif len(name) >= _SHORTEST and FLAG.startswith(name):
            skips = not equals
        else:
            kept.append(word)
    return [*kept, *argv[own:]]


def given_in(argv: Sequence[str]) -> dict[str, tuple[str, str]]:
    """What a command line says: flag and text, by the setting's name. Exits with code 2 on a bad flag, as argparse."""
    parser, found = _typed(argv)
    told: dict[str, tuple[str, str]] = {}
    for use in run_uses():
        dest = parser._option_string_actions[use.flags[0]].dest if use.flags else ""
        if dest in found:
            told[use.setting.name] = use.flags[0], found[dest] if use.takes_value else "on"
    return told


def config_in(argv: Sequence[str]) -> str | None:
    """The file that a command line names. Exits as ``given_in``."""
    return _typed(argv)[1].get("config")


def _typed(argv: Sequence[str]) -> tuple[argparse.ArgumentParser, dict[str, Any]]:
    """The parser, and by its names what was typed."""
    parser = get_args_parser()
    for action in parser._actions:
        action.default = argparse.SUPPRESS
        if action.option_strings:
            action.type = None  # what was typed
        elif action.nargs is None:
            action.nargs, action.required = "?", False  # the script
    return parser, vars(parser.parse_args(list(argv)))
