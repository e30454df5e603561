"""unicron-run's own options: flags, their variables, their defaults, and values that cannot be."""

from __future__ import annotations

import argparse
import shlex

import pytest

from unicron_elastic.launcher.config.options import (
    OPTIONS,
    BadOption,
    Options,
    add_arguments,
    from_arguments,
    from_environment,
)


def _parse(line: str, environ: dict[str, str] | None = None) -> Options:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return from_arguments(parser.parse_args(shlex.split(line)), environ or {})


VALUES = [
    ("warm", "off", False),
    ("preload", "a,?b", "a,?b"),
    ("learn", "off", False),
    ("warm_for_next", "600", 600.0),
    ("in_band", "no", False),
    ("console", "plain", "plain"),
    ("ledger", "/logs/incidents.jsonl", "/logs/incidents.jsonl"),
    ("same_failure_limit", "0", 0),
    ("reset_restarts_after_steps", "500", 500),
    ("no_restart_exit_codes", "3, 4", frozenset({3, 4})),
    ("on_fault", "observe", "observe"),
    ("isolate_after", "5", 5),
    ("health", "off", False),
    ("health_command", "check_node.sh -w 80", "check_node.sh -w 80"),
    ("on_hang", "observe", "observe"),
    ("hang_patience", "2.5", 2.5),
    ("attach", "auto", "auto"),
    ("chaos", "kill:rank=1,step=50", "kill:rank=1,step=50"),
    ("metrics_port", "9401", 9401),
    ("metrics_address", "0.0.0.0", "0.0.0.0"),
]
WITHOUT_PREFIX = ("attach", "metrics_port", "metrics_address")


def test_every_option_is_tried_here() -> None:
    assert [name for name, _, _ in VALUES] == [option.name for option in OPTIONS]


def test_without_flags_and_variables_the_defaults_hold() -> None:
    assert _parse("") == Options() == from_environment({})
    assert Options().no_restart_exit_codes == {93}


@pytest.mark.parametrize(("name", "text", "value"), VALUES)
def test_flag_and_variable_mean_the_same(name: str, text: str, value: object) -> None:
    assert value != getattr(Options(), name)
    prefix = "" if name in WITHOUT_PREFIX else "unicron_"
    dashed = f"{prefix}{name}".replace("_", "-")
    for parsed in (
        _parse(f"--{dashed} {shlex.quote(text)}"),
        _parse(f"--{prefix}{name}={shlex.quote(text)}"),
        _parse("", {f"UNICRON_{name.upper()}": text}),
        from_environment({f"UNICRON_{name.upper()}": text}),
    ):
        assert getattr(parsed, name) == value


def test_a_flag_wins_over_its_variable() -> None:
    assert _parse("--unicron-warm on", {"UNICRON_WARM": "off"}).warm is True
    assert _parse("--unicron-console off", {"UNICRON_CONSOLE": "rubbish"}).console == "off"


@pytest.mark.parametrize("text", ["on", "1", "true", "YES", " On "])
def test_words_for_on(text: str) -> None:
    assert from_environment({"UNICRON_WARM": text}).warm is True


@pytest.mark.parametrize("text", ["off", "0", "False", "no"])
def test_words_for_off(text: str) -> None:
    assert from_environment({"UNICRON_WARM": text}).warm is False


def test_an_empty_list_of_exit_codes_is_possible() -> None:
    assert from_environment({"UNICRON_NO_RESTART_EXIT_CODES": ""}).no_restart_exit_codes == frozenset()


@pytest.mark.parametrize(
    ("name", "text", "remedy"),
    [
        ("warm", "maybe", "on or off"),
        ("warm", "", "on or off"),
        ("in-band", "2", "on or off"),
        ("attach", "on", "auto or off"),
        ("console", "fancy", "auto, panel, plain or off"),
        ("same-failure-limit", "-1", "a whole number, 0 or more"),
        ("same-failure-limit", "three", "a whole number, 0 or more"),
        ("reset-restarts-after-steps", "1.5", "a whole number, 0 or more"),
        ("on-hang", "kill", "act, observe or off"),
        ("hang-patience", "-1", "a number of seconds, 0 or more"),
        ("hang-patience", "nan", "a number of seconds, 0 or more"),
        ("hang-patience", "soon", "a number of seconds, 0 or more"),
        ("no-restart-exit-codes", "0", "exit codes from 1 to 255"),
        ("no-restart-exit-codes", "256", "exit codes from 1 to 255"),
        ("no-restart-exit-codes", "3;4", "exit codes from 1 to 255"),
        ("metrics-port", "http", "a port from 1 to 65535, or 0 for none"),
        ("metrics-port", "65536", "a port from 1 to 65535, or 0 for none"),
    ],
)
def test_a_bad_value_is_named_with_its_option_and_remedy(name: str, text: str, remedy: str) -> None:
    variable = "UNICRON_" + name.upper().replace("-", "_")
    flag = f"--{name}" if variable.removeprefix("UNICRON_").lower() in WITHOUT_PREFIX else f"--unicron-{name}"
    for source, parse in (
        (flag, lambda: _parse(f"{flag}={shlex.quote(text)}")),
        (variable, lambda: from_environment({variable: text})),
    ):
        with pytest.raises(BadOption) as caught:
            parse()
        assert str(caught.value).startswith(f"{source}: {text!r} is not valid; give ")
        assert remedy in str(caught.value)


def test_help_names_every_option() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    text = parser.format_help()
    assert all(option.flag in text for option in OPTIONS)
