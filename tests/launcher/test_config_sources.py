"""Flag, variable, file, default: every option takes each of them, the first one wins, and ``config show`` says so."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from unicron_elastic.launcher import main
from unicron_elastic.launcher.cli import app
from unicron_elastic.launcher.commands import config as config_cli
from unicron_elastic.launcher.config import options
from unicron_elastic.launcher.config import origin as config_origin
from unicron_elastic.launcher.config import table as config_table
from unicron_elastic.launcher.config.file import FileSetting
from unicron_elastic.launcher.config.resolve import SOURCES, resolve
from unicron_elastic.launcher.config.settings import Setting, Use, text

# Values that are possible, where the kind of the option does not say one. Three: for flag, variable and file.
POSSIBLE = {
    "nnodes": ("1:2", "2", "2:4"),
    "nproc_per_node": ("2", "auto", "cpu"),
    "redirects": ("1", "2", "0:1,1:2"),
    "tee": ("3", "2", "0:1"),
    "local_ranks_filter": ("0", "1", "0,1"),
    "rdzv_conf": ("a=b", "c=d", "timeout=5,x=y"),
    "signals_to_handle": ("SIGTERM", "SIGINT", "SIGTERM,SIGHUP"),
    "no_restart_exit_codes": ("3", "4", "5,6"),
    "chaos": ("kill:rank=1,step=50", "hang:rank=0", "segv:rank=1"),
    "metrics_port": ("9401", "9402", "9403"),
    "web_port": ("9404", "9405", "9406"),
    "port": ("9407", "9408", "9409"),
    "endpoint": ("a:1", "b:2", "https://c:3"),
    "duplicate_stdout_filters": ("a", "b", "c,d"),
    "duplicate_stderr_filters": ("a", "b", "c,d"),
}
FLAG, VARIABLE, FILE = range(3)


@cache
def samples(setting: Setting) -> tuple[str, str, str]:
    """Three values, none of which is the default."""
    if setting.key in POSSIBLE:
        return POSSIBLE[setting.key]
    name = setting.kind.name
    if name == "on or off":
        return ("off", "off", "off") if setting.default == "on" else ("on", "on", "on")
    if name.startswith("one of "):
        words = [word for word in name.removeprefix("one of ").split(", ") if word != setting.default]
        return tuple(itertools.islice(itertools.cycle(words), 3))  # type: ignore[return-value]
    if name in ("whole number", "number"):
        return "7", "8", "9"
    return f"{setting.key}-f", f"{setting.key}-v", "a text, of the file"


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith(("UNICRON_", "PET_"))]:
        monkeypatch.delenv(name)
    before = dict(os.environ)
    monkeypatch.setattr(config_origin, "_PLACES", {})  # of this process, which runs one command outside of tests
    yield
    os.environ.clear()
    os.environ.update(before)


def word(use: Use, value: str) -> list[str]:
    """As it is typed."""
    if use.takes_value:
        return [f"{use.flags[0]}={value}"]
    return [use.flags[0]] if value == "on" else []


def variable_text(use: Use, value: str) -> str:
    return value if use.takes_value else str(int(value == "on"))


def write(path: Path, values: Mapping[Setting, str]) -> str:
    sections: dict[str, dict[str, str]] = {}
    for setting, value in values.items():
        sections.setdefault(setting.section, {})[setting.key] = value
    path.write_text(yaml.safe_dump(sections))
    path.chmod(0o600)
    return str(path)


# -- unicron-run ---------------------------------------------------------------------------------------------------


def used_by_run(argv: list[str]) -> dict[str, object]:
    """What unicron-run goes by, by the setting's name."""
    args, _ = main._parse(argv)
    chosen = asdict(options.from_arguments(args))
    found: dict[str, object] = {}
    for use in config_table.run_uses():
        setting = use.setting
        if setting.by_variable:
            of_flag = getattr(args, setting.key, None) if setting.section == "run" else None
            text = os.environ.get(setting.variables[0], "")
            found[setting.name] = (str(of_flag) if use.takes_value else "1") if of_flag is not None else text
        else:
            found[setting.name] = chosen.get(setting.key, getattr(args, setting.key, None))
    return found


def test_every_option_of_unicron_run_takes_flag_variable_and_file(tmp_path: Path) -> None:
    uses = config_table.run_uses()
    flags = [part for use in uses if use.flags for part in word(use, samples(use.setting)[FLAG])]
    variables = {use.setting.variables[0]: variable_text(use, samples(use.setting)[FLAG]) for use in uses}
    in_file = {use.setting: samples(use.setting)[FLAG] for use in uses}
    del in_file[config_table.shared()["etcd_password_file"]]  # as the file has the password itself
    defaults = used_by_run(["train.py"])
    by_flag = used_by_run([*flags, "train.py"])
    by_file = used_by_run(["--config", write(tmp_path / "f.yaml", in_file), "train.py"])
    for use in uses:
        os.environ.pop(use.setting.variables[0], None)
    os.environ.update(variables)
    by_variable = used_by_run(["train.py"])
    for use in uses:
        name = use.setting.name
        assert by_variable[name] != defaults[name], name
        if use.flags:
            assert by_flag[name] == by_variable[name], name
        if use.setting in in_file:
            assert by_file[name] == by_variable[name], name


WELL_MIXED = st.dictionaries(
    st.sampled_from(["run.nnodes", "run.max_restarts", "run.log_dir", "run.standalone", "run.numa_binding",
        "run.console", "run.hang_patience", "run.no_restart_exit_codes", "run.metrics_port", "run.weight",
        "run.cluster", "cluster.endpoint", "cluster.etcd_ca", "cluster.quarantine"]),
    st.sets(st.sampled_from([FLAG, VARIABLE, FILE]), min_size=1),
    min_size=1,
)  # fmt: skip


@settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(WELL_MIXED)
def test_the_first_source_wins_and_show_says_so(chosen: dict[str, set[int]]) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        uses = {use.setting.name: use for use in config_table.run_uses()}
        chosen = {name: sources - ({FLAG} if not uses[name].flags else set()) for name, sources in chosen.items()}
        values = {name: samples(uses[name].setting) for name in chosen}
        flags = [part for name in chosen if FLAG in chosen[name] for part in word(uses[name], values[name][FLAG])]
        for name in (name for name in chosen if VARIABLE in chosen[name]):
            use = uses[name]
            patch.setenv(use.setting.variables[0], variable_text(use, values[name][VARIABLE]))
        in_file = {uses[name].setting: values[name][FILE] for name in chosen if FILE in chosen[name]}
        patch.setenv("UNICRON_CONFIG", write(Path(folder) / "f.yaml", in_file))
        said = {each.setting.name: each for each in config_cli.of_command(["run", *flags, "train.py"])}
        before = dict(os.environ)
        used = used_by_run([*flags, "train.py"])
        os.environ.clear()
        os.environ.update(before)
        for name, shown in said.items():
            source = SOURCES[min(chosen.get(name, set()), default=len(SOURCES) - 1)]
            assert shown.source == source, name
            if source != "default":
                setting, value = uses[name].setting, values[name][SOURCES.index(source)]
                assert setting.kind.parse(shown.text) == setting.kind.parse(value)
                assert used[name] in (value, setting.kind.parse(value)) or (used[name], value) == ("1", "on"), name


SETTING = Setting(section="s", key="k", variables=("A", "B"), rivals=("R",), kind=text(), help="", default="d")


@given(st.lists(st.booleans(), min_size=5, max_size=5))
def test_who_has_the_word(there: list[bool]) -> None:
    flag, a, b, rival, file = there
    found = resolve(
        Use(SETTING, ("--k",)),
        {"s.k": ("--k", "f")} if flag else {},
        {name: name.lower() for name, is_set in (("A", a), ("B", b), ("R", rival)) if is_set},
        {("s", "k"): FileSetting(SETTING, "in-file", "f.yaml:3")} if file else {},
    )
    if flag:
        wanted = ("f", "flag", "--k")
    elif a or b:
        wanted = ("a", "environment", "A") if a else ("b", "environment", "B")
    elif file and not rival:
        wanted = ("in-file", "file", "f.yaml:3")
    else:
        wanted = ("d", "default", "default")
    assert (found.text, found.source, found.origin) == wanted


# -- unicron -------------------------------------------------------------------------------------------------------


COMMANDS = [words for words, command in config_table.commands().items() if config_table.own_uses(words, command)]


@cache
def root() -> Any:
    return typer.main.get_command(app)


def used_by(words: tuple[str, ...], argv: list[str], uses: list[Use]) -> dict[str, tuple[object, str | None]]:
    """What a command's function is called with, and the variable that it finds, by the setting's name."""
    command = root()
    for each in words:
        command = command.commands[each]
    caught: dict[str, Any] = {}

    def catch(**values: object) -> None:
        caught.update(values)
        caught.update({name: os.environ.get(name) for use in uses for name in use.setting.variables})

    before, command.callback = command.callback, catch
    try:
        needed = ["1" for param in command.params if param.param_type_name == "argument" and param.required]
        root().main([*words, *argv, *needed], prog_name="unicron", standalone_mode=False)
    finally:
        command.callback = before
    return {use.setting.name: (caught.get(use.parameter), caught[use.setting.variables[0]]) for use in uses}


def sources(words: tuple[str, ...], argv: list[str], uses: list[Use]) -> set[str]:
    """What ``config show`` says of them."""
    names = {use.setting.name for use in uses}
    return {each.source for each in config_cli.of_command([*words, *argv]) if each.setting.name in names}


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_option_of_a_command_takes_flag_variable_and_file(words: tuple[str, ...], tmp_path: Path) -> None:
    uses = [use for use in config_table.all_uses(words) if not use.setting.is_secret]
    values = {use.setting.name: samples(use.setting)[FLAG] for use in uses}
    flags = [part for use in uses for part in word(use, values[use.setting.name])]
    by_flag = used_by(words, flags, uses)
    assert sources(words, flags, uses) == {"flag"}
    path = write(tmp_path / "f.yaml", {use.setting: values[use.setting.name] for use in uses})
    by_file = used_by(words, ["--config", path], uses)
    os.environ["UNICRON_CONFIG"] = path
    assert sources(words, [], uses) == {"file"}
    for use in uses:
        os.environ[use.setting.variables[0]] = variable_text(use, values[use.setting.name])
    by_variable = used_by(words, [], uses)
    assert sources(words, [], uses) == {"environment"}
    for use in uses:
        name, variable = use.setting.name, variable_text(use, values[use.setting.name])
        value, _ = by_flag[name]
        assert value not in (None, False, use.setting.default), name
        if not use.setting.is_read_elsewhere:
            assert (by_variable[name], by_file[name]) == ((value, variable), (value, None)), name
        else:  # its reader looks at the variable if the option was not given
            assert by_variable[name] in ((None, variable), ("", variable)), name
            assert by_file[name] in ((None, variable), ("", variable), (value, None)), name


def test_what_two_sections_have_has_two_variables() -> None:
    """But ports, of which each process has its own."""
    seen: dict[str, str] = {}
    for section in config_table.SettingsTable().values():
        for setting in section.values():
            if setting.key not in ("metrics_port", "metrics_address", "web_port", "web_address"):
                assert setting.variables[0] not in seen, (setting.name, seen)
                seen[setting.variables[0]] = setting.name
            assert setting.help


def test_no_command_has_the_name_of_a_section() -> None:
    words = {config_table.section_of(words) for words in config_table.commands()}
    assert len(words) == len(config_table.commands())
    assert not words & {"run", "cluster"}


def test_the_table_has_every_option() -> None:
    from unicron_elastic.launcher.config.arguments import get_args_parser

    flags = {flag for use in config_table.run_uses() for flag in use.flags}
    assert flags == {flag for each in get_args_parser()._actions for flag in each.option_strings} - {
        "-h", "--help", "--version", "--config", "--print-completion", "--print_completion"
    }  # fmt: skip
    for words, command in config_table.commands().items():
        declared = {flag for param in command.params if param.param_type_name == "option" for flag in param.opts}
        assert {flag for use in config_table.all_uses(words) for flag in use.flags} == declared - {"--help", "--config"}
