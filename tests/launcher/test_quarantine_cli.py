"""``unicron quarantine``: what an operator types, and what comes back."""

from __future__ import annotations

import getpass
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from unicron_elastic.base.quarantine import Quarantined
from unicron_elastic.launcher.agent.core.quarantine_file import add, default_path, read
from unicron_elastic.launcher.cli import app
from unicron_elastic.launcher.commands import quarantine as quarantine_cli
from unicron_elastic.launcher.commands.quarantine import table

LONG_REASON = "GPU 3 fell off the bus (Xid 79), which needs a reboot of the node, and it has done so twice this week."
SINCE = 1_800_000_000.0  # 2027-01-15 08:00 UTC
ENTRY = Quarantined(node="gpu-7", reason=LONG_REASON, since=SINCE, until=SINCE + 6 * 3600, by="unicron-run")


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the list is unless --file names another; the time of day is UTC, and the operator is ada."""
    for name in ("LOGNAME", "USER"):
        monkeypatch.setenv(name, "ada")
    monkeypatch.setenv("UNICRON_QUARANTINE", str(tmp_path / "quarantine.json"))
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    return tmp_path / "quarantine.json"


@pytest.fixture(autouse=True)
def _own_time_zone_again() -> Any:
    """Begins before the environment is changed and ends after it is as it was."""
    yield
    time.tzset()


@pytest.fixture
def _at_ten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine_cli.time, "time", lambda: SINCE + 2 * 3600)


def _quarantine(*arguments: object) -> Any:
    result = CliRunner().invoke(app, ["quarantine", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.mark.usefixtures("_at_ten")
def test_a_node_is_added_listed_and_lifted(path: Path) -> None:
    added = _quarantine("add", "gpu-7", "--reason", "It smells.", "--for", "6h")
    assert (added.exit_code, added.stderr) == (0, "")
    assert added.stdout == (
        "node gpu-7 is in quarantine since 2027-01-15 10:00 (0 s): It smells; it returns at 16:00.\n"
    )
    now = SINCE + 2 * 3600
    assert read(path) == (Quarantined(node="gpu-7", reason="It smells.", since=now, until=now + 6 * 3600, by="ada"),)
    listed = _quarantine("list")
    assert (listed.exit_code, listed.stderr) == (0, "")
    assert listed.stdout == (
        "node   since             until             by\n"
        "gpu-7  2027-01-15 10:00  2027-01-15 16:00  ada\n"
        "     It smells.\n"
    )
    lifted = _quarantine("lift", "gpu-7")
    assert (lifted.exit_code, lifted.stdout) == (0, "node gpu-7 is no longer in quarantine.\n")
    assert read(path) == ()


@pytest.mark.usefixtures("_at_ten")
def test_without_a_duration_a_node_stays_until_it_is_lifted(path: Path) -> None:
    added = _quarantine("add", "gpu-7", "--reason", "It smells")
    assert added.stdout.endswith(": It smells; it stays there until it is lifted by hand.\n")
    assert read(path)[0].until is None
    assert "lifted by hand" in _quarantine("list").stdout


@pytest.mark.usefixtures("_at_ten")
def test_a_node_that_is_there_already_stays_for_the_longer_time(path: Path) -> None:
    add(path, replace(ENTRY, until=None))
    added = _quarantine("add", "gpu-7", "--reason", "It smells", "--for", "1h")
    assert added.stdout == (
        "node gpu-7 is in quarantine since 2027-01-15 08:00 (2 h): It smells; it stays there until it is lifted by "
        "hand.\n"
    )


def test_what_is_over_is_listed_only_if_asked_for(path: Path) -> None:
    add(path, replace(ENTRY, since=1000.0, until=2000.0))
    assert _quarantine("list").exit_code == 1
    listed = _quarantine("list", "--all")
    assert listed.exit_code == 0
    assert "gpu-7  1970-01-01 00:16  1970-01-01 00:33 (over)  unicron-run\n" in listed.stdout
    (entry,) = json.loads(_quarantine("list", "--all", "--json").stdout)
    assert entry["active"] is False


@pytest.mark.usefixtures("_at_ten")
def test_json_is_a_list_the_newest_last(path: Path) -> None:
    for node, since in (("a", SINCE + 60), ("b", SINCE)):
        add(path, replace(ENTRY, node=node, since=since))
    listed = json.loads(_quarantine("list", "--json").stdout)
    assert listed == [
        {**replace(ENTRY, node="b").to_json(), "active": True},
        {**replace(ENTRY, node="a", since=SINCE + 60).to_json(), "active": True},
    ]


def test_an_empty_list_is_said_and_json_stays_json(path: Path) -> None:
    result = _quarantine("list")
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", "unicron: No node is in quarantine.\n")
    result = _quarantine("list", "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (1, [])
    assert not path.exists()


@pytest.mark.parametrize("width", [80, 100])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    entries = [ENTRY, replace(ENTRY, node="node-17.rack-3.north.example.org", until=None, reason="x" * 300)]
    assert max(map(len, table(entries, SINCE, width).splitlines())) <= width


def test_in_a_pipe_a_reason_is_one_line_of_printable_characters(path: Path) -> None:
    add(path, replace(ENTRY, until=None, reason=f"{LONG_REASON}\n\x1b[2J\ud800"))
    result = _quarantine("list")
    assert f"     {LONG_REASON} [2J\n" in result.stdout
    assert "\x1b" not in result.stdout


def test_all_that_are_there_are_lifted_and_the_others_are_named(path: Path) -> None:
    for node in ("a", "b", "c"):
        add(path, replace(ENTRY, node=node))
    result = _quarantine("lift", "x", "a", "y", "b", "a")
    assert result.exit_code == 1
    assert result.stdout == "node a is no longer in quarantine.\nnode b is no longer in quarantine.\n"
    assert result.stderr == "unicron: Nodes x, y are not in quarantine.\n"
    assert [entry.node for entry in read(path)] == ["c"]
    assert _quarantine("lift", "x").stderr == "unicron: Node x is not in quarantine.\n"


def test_a_file_that_is_named_wins_over_the_environment(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    assert _quarantine("add", "gpu-7", "--reason", "It smells", "--file", other).exit_code == 0
    assert not path.exists()
    assert "gpu-7" in _quarantine("list", "--file", other).stdout
    assert _quarantine("lift", "gpu-7", "--file", other).exit_code == 0


def test_by_default_the_list_is_in_the_users_state_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("UNICRON_QUARANTINE")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert _quarantine("add", "gpu-7", "--reason", "It smells").exit_code == 0
    assert [entry.node for entry in read(default_path())] == ["gpu-7"]
    assert default_path().is_relative_to(tmp_path / "state")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["add", "", "--reason", "x"], "'' names no node; give a name without blanks, such as gpu-7."),
        (["add", "a b", "--reason", "x"], "'a b' names no node; give a name without blanks, such as gpu-7."),
        (["lift", "a", "b\x1b\n"], r"'b\x1b\n' names no node; give a name without blanks, such as gpu-7."),
        (["add", "a", "--reason", " \n"], "--reason is empty; say why, for whoever reads the list."),
        (
            ["add", "a", "--reason", "x", "--for", "1w"],
            "--for: '1w' is not valid; give a number and a unit such as 30s, 15m, 6h or 2d.",
        ),
    ],
)
def test_bad_usage_is_one_sentence_and_changes_nothing(path: Path, arguments: list[str], sentence: str) -> None:
    add(path, replace(ENTRY, node="a", until=None))
    before = path.read_bytes()
    result = _quarantine(*arguments)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"unicron: {sentence}\n")
    assert path.read_bytes() == before


@pytest.mark.parametrize("arguments", [["add", "a"], ["add", "--reason", "x"], ["lift"]])
def test_what_is_missing_is_bad_usage(arguments: list[str]) -> None:
    result = _quarantine(*arguments)
    assert result.exit_code == 2
    assert "Missing" in result.stderr


@pytest.mark.parametrize("arguments", [["list"], ["list", "--json"], ["add", "a", "--reason", "x"], ["lift", "a"]])
def test_a_file_that_is_not_understood_is_one_sentence_and_stays(path: Path, arguments: list[str]) -> None:
    path.write_text('{"version": 1, "nodes": [{"node": 7}]}')
    result = _quarantine(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        f"unicron: {path} is not a list of nodes in quarantine: nodes[0]: node must be a text, not 7.\n"
    )
    assert path.read_text() == '{"version": 1, "nodes": [{"node": 7}]}'


def test_a_user_without_a_name_is_known_by_number(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr(getpass, "getuser", nameless)
    _quarantine("add", "gpu-7", "--reason", "It smells")
    assert read(path)[0].by.startswith("uid ")


def test_torch_is_not_imported() -> None:
    code = "import sys, unicron_elastic.launcher.commands.quarantine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
