import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from unicron_elastic import __version__
from unicron_elastic.base.incident import Incident
from unicron_elastic.base.ledger import Ledger, default_ledger
from unicron_elastic.launcher.cli import app
from unicron_elastic.launcher.view.incidents.story import story, table

LONG_REASON = "rank 3 was ended by signal 9 (SIGKILL), which often means that the host ran out of memory, at step 12."
INCIDENT = Incident(
    number=1,
    run_id="old",
    job="train.py",
    host="node-1",
    time="2026-01-01T12:00:00.000+00:00",
    generation=2,
    rank=3,
    status="connection refused or reset",
    severity=3,
    method="process supervision",
    reason=LONG_REASON,
    action="restart",
    decision="Restart 1 of 3.",
    restarts_used=1,
    max_restarts=3,
    exit_code=-9,
    exception_type="RuntimeError",
    message="boom",
    location="train.py:23 in step",
    stack="Traceback (most recent call last):\n  File train.py\nRuntimeError: boom\n",
    step=12,
    consequences=("rank 0 lost its peer.",),
    occurred_at=10.0,
    noticed_at=10.002,
    stopped_at=10.1,
    regrouped_at=10.15,
    first_step_at=11.5,
)
NEW = replace(INCIDENT, run_id="new", time="2026-01-02T12:00:00.000+01:00", reason="rank 5 was killed.")


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("UNICRON_LEDGER", raising=False)
    monkeypatch.delenv("PET_LOG_DIR", raising=False)


@pytest.fixture
def ledger(tmp_path):
    """A ledger of two runs: the newer with incident 1 alone, the older with 1 and 2."""
    path = tmp_path / "logs" / "incidents.jsonl"
    for incident in (NEW, INCIDENT, replace(INCIDENT, number=2, time="2026-01-01T13:00:00+00:00", action="fail")):
        Ledger(path).record(incident)
    return path


def _unicron(*arguments):
    result = CliRunner().invoke(app, ["incidents", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


def test_all_incidents_are_listed_by_run_the_newest_run_last(ledger):
    result = _unicron("--ledger", ledger, "--all")
    assert result.exit_code == 0
    heads = [line for line in result.stdout.splitlines() if line.startswith("Run ")]
    assert heads == ["Run old: train.py, 2 incidents on node-1", "Run new: train.py, 1 incident on node-1"]
    assert "1  2026-01-01 12:00:00     3  SEV3  connection refused or reset  restarted  1,500 ms\n" in result.stdout
    assert "job ended" in result.stdout


def test_without_more_words_the_newest_run_is_listed(ledger):
    result = _unicron("--ledger", ledger)
    heads = [line for line in result.stdout.splitlines() if line.startswith("Run ")]
    assert heads == ["Run new: train.py, 1 incident on node-1"]
    assert result.stdout.endswith("\n1 earlier run has more: unicron incidents --all\n")
    assert len(json.loads(_unicron("--ledger", ledger, "--json").stdout)) == 3
    assert "more:" not in _unicron("--ledger", ledger, "--all").stdout


def test_in_a_pipe_a_reason_is_one_line_without_colour(ledger):
    result = _unicron("--ledger", ledger, "--all")
    assert f"     {LONG_REASON}\n" in result.stdout
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize("width", [80, 100])
def test_no_line_is_wider_than_the_terminal(width):
    text = table([replace(INCIDENT, number=100, first_step_at=99.9)], width) + story(INCIDENT, width)
    assert max(map(len, text.splitlines())) <= width


def test_a_narrow_terminal_cuts_the_status_alone():
    assert "     3  SEV3  connection refused or…   restarted  1,500 ms" in table([INCIDENT], 80)


def test_a_wide_terminal_shows_the_whole_status():
    assert "connection refused or reset" in table([INCIDENT], 100)


def test_several_hosts_of_a_run_are_told_apart():
    text = table([INCIDENT, replace(INCIDENT, host="node-2")], None)
    assert "2 incidents on 2 hosts" in text
    assert "     node-2: rank 3" in text


def test_every_incident_is_listed_by_a_name_that_tells_its_story(tmp_path):
    """Of two nodes, of two agents on one of them, and of an older job with the run ID."""
    path = tmp_path / "incidents.jsonl"
    rows = [("a", 3, 12, 1), ("a", 3, 13, 1), ("b", 4, 13, 1), ("a", 5, 14, 2)]
    for host, rank, hour, number in rows:
        time = f"2026-01-01T{hour}:00:00+00:00"
        Ledger(path).record(replace(INCIDENT, host=host, rank=rank, number=number, time=time, reason=f"rank {rank}."))
    listed = _unicron("--ledger", path).stdout
    names = re.findall(r"^ *(\S+)  2026-01-01", listed, re.MULTILINE)
    assert names == ["1@a#1", "1@a#2", "1@b", "2"]
    for name, (host, rank, hour, number) in zip(names, rows, strict=True):
        for asked in (name, f"old:{name}"):
            heading, _, reason, *_ = _unicron(asked, "--ledger", path).stdout.splitlines()
            assert heading == f"Incident {name} of run old: train.py"
            assert reason.strip() == f"rank {rank}."
            data = json.loads(_unicron(asked, "--ledger", path, "--json").stdout)
            assert (data["host"], data["number"], data["time"][11:13]) == (host, number, str(hour))
    both = _unicron("1", "--ledger", path).stdout
    assert re.findall("^Incident (.*) of run", both, re.MULTILINE) == ["1@a#2", "1@b"]
    assert both.endswith("\nThis number is also that of 1@a#1.\n")
    for missing in ("1@c", "1#3", "2#1", "1@b#1", "new:1@a"):
        assert _unicron(missing, "--ledger", path).exit_code == 1


def test_a_record_with_an_unreadable_time_is_listed_first():
    text = table([INCIDENT, replace(INCIDENT, time="yesterday", number=7)], None)
    assert text.index("yesterday") < text.index("2026-01-01")


def test_the_story_tells_sentence_decision_timeline_and_exception(ledger):
    lines = _unicron("old:1", "--ledger", ledger).stdout.splitlines()
    assert lines[0] == "Incident 1 of run old: train.py"
    assert f"     {LONG_REASON}" in lines
    assert "  noticed by  process supervision" in lines
    assert "  done        restarted. Restart 1 of 3." in lines
    assert "     rank 0 lost its peer." in lines
    assert "  RuntimeError: boom" in lines
    phases = [line.split("  #")[0].split("  |")[0].split() for line in lines[lines.index("Timeline") + 2 :][:5]]
    assert phases == [
        ["occurred", "0.0", "ms"],
        ["noticed", "2.0", "ms", "2.0", "ms"],
        ["stopped", "98.0", "ms", "100", "ms"],
        ["regrouped", "50.0", "ms", "150", "ms"],
        ["first", "step", "1,350", "ms", "1,500", "ms"],
    ]


def test_a_moment_that_did_not_come_is_a_dash():
    lines = story(
        replace(INCIDENT, regrouped_at=None, first_step_at=None, exit_code=None, rank=None), None
    ).splitlines()
    assert [line.split() for line in lines if line.startswith(("  regrouped", "  first"))] == [
        ["regrouped", "-", "-"],
        ["first", "step", "-", "-"],
    ]
    assert any("another node of generation 2" in line for line in lines)


def test_control_characters_of_an_exception_do_not_reach_the_terminal():
    text = story(replace(INCIDENT, reason="a\x1b[2Jb", stack="c\x1b[2J\td\ud800"), None)
    assert text.isascii()
    assert text.replace("\n", "").isprintable()


def test_a_number_means_the_newest_run_that_has_it(ledger):
    assert _unicron("1", "--ledger", ledger).stdout.startswith("Incident 1 of run new")
    assert _unicron("2", "--ledger", ledger).stdout.startswith("Incident 2 of run old")


def test_a_number_that_several_nodes_have_is_told_for_each(ledger):
    Ledger(ledger).record(replace(NEW, host="node-2"))
    told = re.findall("^Incident (.*) of run new", _unicron("1", "--ledger", ledger).stdout, re.MULTILINE)
    assert told == ["1@node-1", "1@node-2"]


def test_json_is_a_list_or_one_object(ledger):
    listed = json.loads(_unicron("--json", "--ledger", ledger).stdout)
    assert [(each["run_id"], each["number"]) for each in listed] == [("new", 1), ("old", 1), ("old", 2)]
    one = json.loads(_unicron("old:1", "--json", "--ledger", ledger).stdout)
    assert one["total_ms"] == pytest.approx(1500)


@pytest.mark.parametrize("variable", ["UNICRON_LEDGER", "PET_LOG_DIR"])
def test_the_environment_says_where_to_read(ledger, monkeypatch, variable):
    monkeypatch.setenv(variable, str(ledger if variable == "UNICRON_LEDGER" else ledger.parent.parent))
    assert "Run new" in _unicron().stdout


def test_an_option_wins_over_the_environment(ledger, monkeypatch, tmp_path):
    monkeypatch.setenv("UNICRON_LEDGER", str(tmp_path / "other"))
    assert "Run new" in _unicron("--log-dir", ledger.parent).stdout


def test_by_default_the_users_state_folder_is_read():
    Ledger(default_ledger("new", None)).record(NEW)
    assert "Run new" in _unicron().stdout


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["9"], 1, "No incident 9 is recorded in the folder {logs}."),
        (["other:1"], 1, "No incident other:1 is recorded in the folder {logs}."),
        (["one"], 2, "'one' names no incident; give a number such as 3, or RUN:3, or 3@HOST."),
        (["old:"], 2, "'old:' names no incident; give a number such as 3, or RUN:3, or 3@HOST."),
        (["²"], 2, "'²' names no incident; give a number such as 3, or RUN:3, or 3@HOST."),
        (["--ledger", "x"], 2, "Give --ledger or --log-dir, not both."),
    ],
)
def test_an_error_is_one_sentence(ledger, arguments, code, sentence):
    result = _unicron(*arguments, "--log-dir", ledger.parent)
    assert result.exit_code == code
    assert result.stderr == f"unicron: {sentence.format(logs=ledger.parent)}\n"
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("option", "kind", "where"), [("--ledger", "file", ""), ("--log-dir", "folder", "the folder ")]
)
def test_a_ledger_that_is_not_there_holds_nothing_and_is_said_not_to_be_there(tmp_path, option, kind, where):
    result = _unicron(option, tmp_path / "absent")
    assert result.exit_code == 1
    assert result.stderr == (
        f"unicron: No incident is recorded in {where}{tmp_path / 'absent'}. "
        f"There is no such {kind} here; the first incident makes it.\n"
    )


def test_a_ledger_that_cannot_be_read_is_an_error(tmp_path):
    result = _unicron("--ledger", tmp_path)
    assert result.exit_code == 2
    assert result.stderr == f"unicron: {tmp_path} cannot be read: Is a directory.\n"


def test_json_stays_json_when_nothing_is_found(tmp_path):
    result = _unicron("--json", "--log-dir", tmp_path)
    assert result.exit_code == 1
    assert json.loads(result.stdout) == []


def test_bad_lines_are_reported_beside_the_good_ones(ledger):
    with open(ledger, "a") as file:
        file.write("{}\n")
    result = _unicron("--ledger", ledger)
    assert result.exit_code == 0
    assert result.stderr.startswith(f"Skipped {ledger}:4: not an incident record")
    assert "Run new" in result.stdout


def test_torch_is_not_imported():
    imported = "unicron_elastic.launcher.cli, unicron_elastic.launcher.view.incidents.story"
    code = f"import sys, {imported}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_commands_are_sorted_by_what_they_are_for() -> None:
    result = CliRunner().invoke(app, ["--help"])
    found = re.findall(r"^(\S.*):$|^  ([a-z]+)  ", result.stdout, re.MULTILINE)
    headings = [heading for heading, _ in found if heading]
    assert headings[1:] == ["See", "Operate", "Run a cluster, to which unicron-run --cluster submits jobs", "Tools"]
    names = [name for _, name in found if name]
    assert names[:3] == ["status", "jobs", "nodes"]
    assert sorted(names) == sorted(get_command(app).commands)


@pytest.mark.parametrize("words", [["--version"], ["version"]])
def test_the_version_is_printed(words: list[str]) -> None:
    result = CliRunner().invoke(app, words)
    assert (result.exit_code, result.output) == (0, f"unicron-elastic {__version__}\n")
