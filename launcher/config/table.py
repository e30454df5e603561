"""The table of all settings, made from what the command lines declare. Nothing of it is written down a second time.

torchrun's options come from torch's parser, ours from ``options.OPTIONS`` and the commands of ``unicron``. An option
whose help ends in ``[env: NAME]`` is read from that variable by its own code; every other one of ``unicron`` has the
variable ``UNICRON_<COMMAND>_<OPTION>``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, get_args

from unicron_elastic.compat.command_line import is_setting, reads_variable
from unicron_elastic.launcher.config.forwarded import SECRET_WORDS
from unicron_elastic.launcher.config.meaning import default_in, kind_of, meaning, shown, variables_in
from unicron_elastic.launcher.config.settings import (
    SHARED,
    Setting,
    Use,
    ValueKind,
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


def _torch_kind(action: argparse.Action) -> ValueKind:
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
    """Check as ``checks`` does before a job starts, without what depends on this machine."""

    def checked(value: str) -> object:
        from unicron_elastic.launcher.config.checks import BadArgument, check_value

        found = parse(value)
        try:
            check_value(dest, found)
        except BadArgument as error:
            raise ValueError(str(error).partition("; give ")[2]) from None
        return found

    return checked


def _own_uses() -> Iterator[Use]:
    from unicron_elastic.launcher.config.options import OPTIONS, Options

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
    from unicron_elastic.launcher.config.options import add_cluster_arguments

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


Words = tuple[str, ...]  # of a command of unicron
# A process has ports of its own: each command has these in its own section.
_OF_EACH = ("UNICRON_METRICS_PORT", "UNICRON_METRICS_ADDRESS")
_OF_RUN = {"UNICRON_LEDGER": "ledger", "PET_LOG_DIR": "log_dir"}  # and commands that read what unicron-run writes
_PREFIXES = {"etcd": "ETCD_SERVER"}  # UNICRON_ETCD_ is what all have that talk to one
_UNSAID = {"metrics_port": "0", "metrics_address": "127.0.0.1", "web_port": "0", "web_address": "127.0.0.1"}
_NOT_SET = ("help", "config", "version")
_ETCD = ("endpoint", "etcd_ca", "etcd_cert", "etcd_key", "etcd_user", "etcd_password_file")


@cache
def shared() -> dict[str, Setting]:
    """Return by key: where the cluster is, how to be let in, and what else no command has alone."""
    from unicron_elastic.launcher.config.cluster_options import HINTS
    from unicron_elastic.rendezvous.store.options import DEFAULT_ENDPOINT, PASSWORD_VARIABLE

    helps = {name: str(get_args(hint)[1].help) for name, hint in HINTS.items()}
    found = {name: _shared(name, variables_in(words), meaning(words)) for name, words in helps.items()}
    others = (
        ("etcd_password", PASSWORD_VARIABLE, "the password itself, where a file would be one more thing to keep"),
        ("quarantine", "UNICRON_QUARANTINE", "the file with the nodes in quarantine; else the user's own"),
        ("node_name", "UNICRON_NODE_NAME", "what this node is called; else its host name"),
        ("in_place", "UNICRON_IN_PLACE", "`force`: ranks go on in place on any back end, not on gloo alone; untested"),
        ("spec_env", "UNICRON_SPEC_ENV", "names of further variables, with commas, that go along with a job"),
    )
    for key, variable, words in others:
        found[key] = _shared(key, (variable,), words)
    found["endpoint"] = replace(found["endpoint"], kind=text(_endpoint), default=DEFAULT_ENDPOINT)
    file, itself = found["etcd_password_file"], found["etcd_password"]
    found["etcd_password_file"] = replace(file, variables=file.variables[:1], rivals=itself.variables)
    found["etcd_password"] = replace(itself, rivals=file.variables[:1], is_secret=True)
    return found


def _shared(key: str, variables: tuple[str, ...], words: str) -> Setting:
    return Setting(section=SHARED, key=key, variables=variables, kind=text(), help=words, by_variable=True)


def _endpoint(value: str) -> str:
    from unicron_elastic.rendezvous.store.address import StoreAddress

    try:
        StoreAddress.parse(value.replace("https://", "http://"))  # whether TLS is given is not the endpoint's business
    except ValueError:
        raise ValueError("http://HOST:PORT, https://HOST:PORT or HOST:PORT, several with commas") from None
    return value


class _Declared:
    """What was said of the commands, which stand above this room and import it."""

    load: Callable[[], Any]


def declare_commands(load: Callable[[], Any]) -> None:
    """Say where the typer application with the commands of ``unicron`` comes from; ``load`` is called when needed."""
    _Declared.load = load


@cache
def commands() -> dict[Words, Any]:
    """Each command of ``unicron`` by its words."""
    import typer

    return dict(walk(typer.main.get_command(_Declared.load())))


def walk(command: Any, words: Words = ()) -> Iterator[tuple[Words, Any]]:
    """A command's commands, and theirs, by their words."""
    for name, child in getattr(command, "commands", {}).items():
        yield (*words, name), child
        yield from walk(child, (*words, name))


def section_of(words: Words) -> str:
    """The section of a file that a command has for itself."""
    return "-".join(words)


@cache
def run_uses() -> tuple[Use, ...]:
    """All that ``unicron-run`` uses. Raises arguments.TorchMissing."""
    return (*option_uses(), *map(Use, shared().values()))


def own_uses(words: Words, command: Any) -> list[Use]:
    """A command's own settings, without those that it shares."""
    return [_use(words, param) for param in settable(command) if not _home(param)]


def all_uses(words: Words) -> list[Use]:
    """All that a command uses. Raises arguments.TorchMissing, and KeyError for no command."""
    if words == (RUN,):
        return list(run_uses())
    found = list[Use]()
    for param in settable(commands()[words]):
        if not (home := _home(param)):
            found.append(_use(words, param))
            continue
        where, key = home
        setting = shared()[key] if where == SHARED else _of_run()[key]
        found.append(Use(setting, tuple(param.opts), param.name))
        if key == "etcd_user":
            found.append(Use(shared()["etcd_password"]))
    return found


class SettingsTable(Mapping[str, Mapping[str, Setting]]):
    """All settings by section and key: what may stand in a file. Reading it raises arguments.TorchMissing.

    The commands of ``unicron`` are imported when one of their sections is asked for, for which ``unicron-run`` has no
    time otherwise.
    """

    def __getitem__(self, section: str) -> Mapping[str, Setting]:
        return shared() if section == SHARED else _of_run() if section == RUN else _of_commands()[section]

    def __iter__(self) -> Iterator[str]:
        return iter((SHARED, RUN, *_of_commands()))

    def __len__(self) -> int:
        return 2 + len(_of_commands())


@cache
def _of_run() -> dict[str, Setting]:
    return {use.setting.key: use.setting for use in option_uses()}


@cache
def _of_commands() -> dict[str, dict[str, Setting]]:
    found = {}
    for words, command in commands().items():
        if own := {use.setting.key: use.setting for use in own_uses(words, command)}:
            found[section_of(words)] = own
    return found


def settable(command: Any) -> list[Any]:
    """The options of a command that are settings."""
    return [param for param in command.params if param.param_type_name == "option" and param.name not in _NOT_SET]


def _home(param: Any) -> tuple[str, str] | None:
    """Section and key of an option that is set for several commands at once."""
    names = variables_in(param.help or "")
    if not names or names[0] in _OF_EACH:
        return None
    if names[0] in _OF_RUN:
        return RUN, _OF_RUN[names[0]]
    key = names[0].removeprefix("UNICRON_").lower()
    if key == "etcd_endpoint":
        return SHARED, "endpoint"
    return (SHARED, key) if key in (*_ETCD, "quarantine", "node_name") else None


def _use(words: Words, param: Any) -> Use:
    key = _key(param)
    declared = variables_in(param.help or "")
    made = made_variable(words, param)
    default = param.default if not callable(param.default) else None
    setting = Setting(
        section=section_of(words),
        key=key,
        variables=declared or (made,),
        kind=_param_kind(param),
        help=meaning(param.help or ""),
        default=shown(default) or default_in(param.help or "") or _UNSAID.get(key, ""),
        is_secret=_is_secret(key) and not param.is_flag,
        is_many=bool(param.multiple),
        is_read_elsewhere=bool(declared) and declared != (made,),
    )
    is_flag = bool(param.is_flag)
    return Use(setting, tuple(param.opts), param.name, tuple(param.secondary_opts), takes_value=not is_flag)


def _is_secret(key: str) -> bool:
    return any(word.lower() in key for word in SECRET_WORDS) and not key.endswith("_file")


def _key(param: Any) -> str:
    return str(param.opts[0].lstrip("-").replace("-", "_"))


def made_variable(words: Words, param: Any) -> str:
    """The variable of an option whose help names none."""
    parts = (*(_PREFIXES.get(word, word) for word in words), _key(param))
    return "UNICRON_" + "_".join(parts).replace("-", "_").upper()


def _param_kind(param: Any) -> ValueKind:
    """What the option makes of a number says what it takes."""
    sample = _made_of("1", param)
    if param.is_flag:
        return switch()
    if str(param.metavar) == "PORT" and isinstance(sample, str):
        from unicron_elastic.launcher.config.options import port

        return whole_number(port)
    if isinstance(sample, int):
        return whole_number(_parser(param, f"a whole number{_range_of(param)}"))
    if isinstance(sample, float):
        return number(_parser(param, f"a number{_range_of(param)}"))
    return text(_parser(param, ""))


def _parser(param: Any, right: str) -> Callable[[str], object]:
    def parsed(value: str) -> object:
        found = _made_of(value, param)
        if isinstance(found, Exception):
            raise ValueError(right or str(getattr(found, "message", found)))
        return found

    return parsed


def _made_of(value: str, param: Any) -> object:
    """What typer makes of it, or what it says against it; its versions have different exceptions, with a message."""
    try:
        found: object = param.process_value(None, [value] if param.multiple else value)
    except Exception as error:
        if not hasattr(error, "message"):
            raise
        return error
    return found


def _range_of(param: Any) -> str:
    low, high = (getattr(param, name, getattr(getattr(param, "type", None), name, None)) for name in ("min", "max"))
    bounds = [f"{word} {bound}" for word, bound in (("at least", low), ("at most", high)) if bound is not None]
    return f", {' and '.join(bounds)}" if bounds else ""
