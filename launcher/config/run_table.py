"""The options of ``unicron-run`` as settings: torchrun's from torch's parser, ours from ``options``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache

from unicron_elastic.compat.command_line import is_setting, reads_variable
from unicron_elastic.launcher.config.help import default_in, kind_of, meaning, shown, variables_in
from unicron_elastic.launcher.config.settings import (
    Kind,
    Setting,
    Use,
    choice,
    number,
    parsed_switch,
    switch,
    text,
    whole_number,
)

RUN = "run"
_OF_JOBS = ("cluster", "detach", "weight", "job_spec")
_UNITS = {"monitor_interval": "s", "shutdown_timeout": "s"}


@cache
def option_uses() -> tuple[Use, ...]:
    """All that have a flag. Raises arguments.TorchMissing."""
    return (*_torch_uses(), *_own_uses(), *_job_uses())


def _torch_uses() -> Iterator[Use]:
    for action in _torch_parser()._actions:
        if not is_setting(action):
            continue
        with_variable = reads_variable(action)
        yield Use(
            Setting(
                section=RUN,
                key=action.dest,
                variables=(f"{'PET' if with_variable else 'UNICRON'}_{action.dest.upper()}",),
                kind=_torch_kind(action),
                help=" ".join((action.help or "").split()),
                default=shown(action.default),
                blank_counts=with_variable,
            ),
            _long_first(action.option_strings),
            takes_value=action.nargs != 0,
        )


def _torch_parser() -> argparse.ArgumentParser:
    """torch's, with torch's own defaults: it takes variables for defaults while it is made."""
    from unicron_elastic.compat.command_line import torchrun_parser

    held = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("PET_")}
    try:
        return torchrun_parser()
    finally:
        os.environ.update(held)


def _long_first(flags: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted(flags, key=lambda flag: (not flag.startswith("--"), "_" in flag)))


def _torch_kind(action: argparse.Action) -> Kind:
    unit = _UNITS.get(action.dest, "")
    if action.nargs == 0:
        return switch(_torch_switch)
    if action.choices:
        return choice(tuple(map(str, action.choices)))
    if action.type is int:
        return whole_number(_checked(action.dest, whole_number().parse), unit)
    if action.type is float:
        return number(_checked(action.dest, number().parse), unit)
    return text(_checked(action.dest, str))


def _torch_switch(word: str) -> bool:
    """torch reads its variables as numbers."""
    return bool(int(word)) if word.strip().isdecimal() else parsed_switch(word)


def _checked(dest: str, parse: Callable[[str], object]) -> Callable[[str], object]:
    """As ``checks`` does it before a job starts, without what depends on this machine."""

    def checked(value: str) -> object:
        from unicron_elastic.launcher.checks import BadArgument, check_value

        found = parse(value)
        try:
            check_value(dest, found)
        except BadArgument as error:
            raise ValueError(str(error).rpartition("; it takes ")[2]) from None
        return found

    return checked


def _own_uses() -> Iterator[Use]:
    from unicron_elastic.launcher.options import OPTIONS, Options

    defaults = Options()
    for option in OPTIONS:
        setting = Setting(
            section=RUN,
            key=option.name,
            variables=(option.variable,),
            kind=kind_of(option.metavar, option.parse),
            help=meaning(option.help),
            default=shown(getattr(defaults, option.name)) or default_in(option.help),
            blank_counts=True,
        )
        yield Use(setting, option.flags)


def _job_uses() -> Iterator[Use]:
    from unicron_elastic.launcher.options import add_cluster_arguments

    parser = argparse.ArgumentParser(add_help=False)
    add_cluster_arguments(parser)
    for action in parser._actions:
        if action.dest not in _OF_JOBS:
            continue
        setting = Setting(
            section=RUN,
            key=action.dest,
            variables=variables_in(action.help or ""),
            kind=switch() if action.nargs == 0 else kind_of(str(action.metavar), None),
            help=meaning(action.help or ""),
            default=default_in(action.help or ""),
            by_variable=True,
        )
        yield Use(setting, tuple(action.option_strings), takes_value=action.nargs != 0)
