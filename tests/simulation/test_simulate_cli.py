"""``unicron simulate``, as people call it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from unicron_elastic.launcher.cli import app

SMALL = {
    "name": "ours",
    "nodes": 3,
    "jobs": [{"name": "a", "throughput": {"rates_flops": [0.0, 1e12, 2e12, 3e12]}}],
    "history": {"preset": "trace-b", "days": 1},
}


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    path = tmp_path / "ours.json"
    path.write_text(json.dumps(SMALL))
    return str(path)


def simulate(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["simulate", *map(str, arguments), "--processes", "1"])


def test_a_table_compares_policies_with_the_baseline(scenario: str) -> None:
    found = simulate(scenario, "--seeds", 2, "--policies", "unicron, megatron")
    assert found.exit_code == 0, found.output
    assert "ours: 24 GPUs on 3 nodes" in found.stdout
    assert "unicron" in found.stdout
    assert "of megatron" in found.stdout


def test_results_are_written(scenario: str, tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("all.json", "all.csv", "incidents.csv")}
    found = simulate(
        *(scenario, "--seeds", 2, "--policies", "unicron,megatron"),
        *("--json", files["all.json"], "--csv", files["all.csv"], "--incidents", files["incidents.csv"]),
    )
    assert found.exit_code == 0, found.output
    assert [each["policy"] for each in json.loads(files["all.json"].read_text())["policies"]] == ["unicron", "megatron"]
    assert len(files["all.csv"].read_text().splitlines()) == 1 + 4
    assert "NVLink error" in files["incidents.csv"].read_text() or "time-out" in files["incidents.csv"].read_text()


def test_a_sensitivity_is_one_table_for_each_value_and_one_file_for_all(scenario: str, tmp_path: Path) -> None:
    found = simulate(
        *(scenario, "--seeds", 1, "--policies", "megatron", "--sensitivity", "spares", "--values", "0,2"),
        *("--csv", tmp_path / "all.csv", "--json", tmp_path / "all.json"),
    )
    assert found.exit_code == 0, found.output
    assert "spares 2 nodes" in found.stdout
    assert len((tmp_path / "all.csv").read_text().splitlines()) == 1 + 2
    assert len(json.loads((tmp_path / "all.json").read_text())) == 2


def test_presets_take_a_set_of_jobs_and_spares() -> None:
    found = simulate(
        "trace-a", "--jobs", "case-1", "--spares", 1, "--seeds", 1, "--policies", "oracle", "--baseline", "oracle"
    )
    assert found.exit_code == 0, found.output
    assert "136 GPUs on 17 nodes" in found.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("trace-z",), "'trace-z' is neither a file nor a preset. Presets are trace-a, "),
        (("trace-a", "--policies", "unicorn"), "There is no policy 'unicorn'. Known are unicron, "),
        (("trace-a", "--policies", ","), "No policy is named."),
        (("trace-a", "--jobs", "case-9"), "there are no jobs 'case-9': known are case-1"),
        (
            ("trace-a", "--sensitivity", "weather"),
            "--sensitivity 'weather' is not possible: known are checkpoint-interval",
        ),
        (("trace-a", "--sensitivity", "spares", "--values", "many"), "--values 'many' must be numbers"),
        (("trace-a", "--sensitivity", "spares", "--values", "0.5"), "0.5 spares: it must be a whole number."),
        (("trace-a", "--values", "3"), "--values needs --sensitivity"),
    ],
)
def test_mistakes_are_told_in_a_sentence(arguments: tuple[object, ...], told: str) -> None:
    found = simulate(*arguments)
    assert found.exit_code == 2
    assert told in found.stderr
    assert "Traceback" not in found.output


def test_a_file_that_is_wrong_is_told_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("at_s,event,node\nsoon,fault,1\n")
    found = simulate(path)
    assert found.exit_code == 2
    assert "bad.csv:2" in found.stderr
    path = tmp_path / "bad.json"
    path.write_text("{}")
    found = simulate(path)
    assert found.exit_code == 2
    assert "bad.json: a scenario has no name" in found.stderr


def test_a_place_that_cannot_be_written_to_is_told(scenario: str, tmp_path: Path) -> None:
    found = simulate(scenario, "--seeds", 1, "--policies", "oracle", "--json", tmp_path / "no" / "all.json")
    assert found.exit_code == 2
    assert "No such file or directory" in found.stderr
