"""``unicron`` with variables and a file: what they say becomes the defaults of a command's options.

The options themselves are declared as ever. The group adds ``--config`` to each command, names the variable of each
option in its help, and gives the command what was set before its own options are looked at.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from unicron_elastic.base.extras import why_missing
from unicron_elastic.launcher.config.answers import BAD_USAGE, fail
from unicron_elastic.launcher.config.meaning import variables_in
from unicron_elastic.launcher.config.origin import CONFIG_VARIABLE, NO_FILE, BadConfig, forget, remember
from unicron_elastic.launcher.config.resolve import from_file, resolve
from unicron_elastic.launcher.config.settings import Use
from unicron_elastic.launcher.config.table import (
    SettingsTable,
    Words,
    all_uses,
    made_variable,
    own_uses,
    settable,
    walk,
)


class ConfiguredGroup(TyperGroup):
    """The commands of ``unicron``, each of which takes variables and a file for its options."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        config = _config_option()
        for words, command in walk(self):
            options = settable(command)
            for option in options:
                if not variables_in(option.help or ""):
                    _name_variable(option, made_variable(words, option))
            if options or hasattr(command, "commands"):
                command.params.append(config)
        self.params.append(config)

    def invoke(self, ctx: Any) -> Any:
        """Run a command, and say in one sentence what is missing that an extra installs."""
        try:
            return super().invoke(ctx)
        except ImportError as error:
            why = why_missing(error)
            if why is None:
                raise
            command = self.commands.get(ctx.invoked_subcommand or "")
            fail(getattr(command, "no_answer", BAD_USAGE), sentence(ImportError(why)))


def _name_variable(option: Any, variable: str) -> None:
    text = (option.help or "").removesuffix(".")
    option.help = f"{text} [env: {variable}]."


def _config_option() -> Any:
    """One more option, made by typer as it makes all others."""
    one = typer.Typer(add_completion=False, rich_markup_mode=None)

    @one.command()
    def _only(
        config: Annotated[
            str | None,
            typer.Option(
                metavar="FILE",
                help="YAML with settings; options and variables go before it [env: UNICRON_CONFIG].",
                is_eager=True,
                callback=_configure,
            ),
        ] = None,
    ) -> None:
        del config

    option = next(param for param in typer.main.get_command(one).params if param.name == "config")
    option.expose_value = False
    return option


def _configure(context: typer.Context, value: str | None) -> None:
    """Before a command's other options are looked at."""
    if context.resilient_parsing:
        return
    words = words_of(context)
    try:
        if value is not None:
            if not value.strip():
                raise BadConfig(NO_FILE)
            _set(context, CONFIG_VARIABLE, value)
        if words:
            _apply(context, words, entries_of(os.environ))
    except ValueError as error:
        context.close()  # nobody else would: it is not entered yet
        fail(BAD_USAGE, sentence(error))


def sentence(error: Exception) -> str:
    """Its text, ended."""
    return str(error) if str(error).endswith("?") else f"{error}."


def words_of(context: Any) -> Words:
    """The command's, without the program's name."""
    words: list[str] = []
    while context.parent is not None:
        words.insert(0, str(context.info_name))
        context = context.parent
    return tuple(words)


def entries_of(environ: Mapping[str, str]) -> Mapping[tuple[str, str], Any]:
    """What the file says that ``environ`` names. Raises BadConfig."""
    path = environ.get(CONFIG_VARIABLE, "").strip()
    if not path:
        return {}
    from unicron_elastic.compat.command_line import TorchMissing
    from unicron_elastic.launcher.config.file import read_config

    try:
        return read_config(path, SettingsTable())
    except TorchMissing as error:
        raise BadConfig(str(error)) from None


def _apply(context: Any, words: Words, entries: Mapping[tuple[str, str], Any]) -> None:
    """Raises ValueError for a value that is not possible, which names its source."""
    defaults: dict[str, Any] = {}
    for use in own_uses(words, context.command):
        found = resolve(use, {}, os.environ, entries)
        if found.source == "file" or (found.source == "environment" and not use.setting.is_read_elsewhere):
            defaults[use.parameter] = _default(use, found.text)
    context.default_map = defaults
    if entries:
        for use in _shared(words):
            entry = from_file(use.setting, os.environ, entries)
            if entry is not None:
                variable = use.setting.variables[0]
                _set(context, variable, entry.text)
                _remember(context, variable, entry.place)


def _shared(words: Words) -> Iterator[Use]:
    section = "-".join(words)
    yield from (use for use in all_uses(words) if use.setting.section != section)


def _default(use: Use, text: str) -> Any:
    if not use.takes_value:
        return use.setting.kind.parse(text)
    return text.split(",") if use.setting.is_many else text


def _set(context: Any, variable: str, text: str) -> None:
    """For this command, and for what it starts."""
    before = os.environ.get(variable)
    os.environ[variable] = text

    def restore() -> None:
        if before is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = before

    context.call_on_close(restore)


def _remember(context: Any, name: str, place: str) -> None:
    remember(name, place)
    context.call_on_close(lambda: forget(name))
