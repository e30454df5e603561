"""The YAML file: what is refused, with the place and what would be right, and what unicron-run makes of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unicron_elastic.launcher import main
from unicron_elastic.launcher.cli import app
from unicron_elastic.launcher.commands import config as config_cli
from unicron_elastic.launcher.config import forwarded as lending
from unicron_elastic.launcher.config import origin as config_origin
from unicron_elastic.launcher.config import table as config_table
from unicron_elastic.launcher.config.file import Entries, read_config
from unicron_elastic.launcher.config.options import BadOption
from unicron_elastic.launcher.config.origin import BadConfig, located
from unicron_elastic.launcher.config.run import with_file, without_config
from unicron_elastic.launcher.node import submission
from unicron_elastic.launcher.node.planned import shared_options


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith(("UNICRON_", "PET_"))]:
        monkeypatch.delenv(name)
    before = dict(os.environ)
    monkeypatch.setattr(config_origin, "_PLACES", {})  # of this process, which runs one command outside of tests
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def read(tmp_path: Path) -> Callable[[str], Entries]:
    def of(text: str | bytes, mode: int = 0o600) -> Entries:
        path = tmp_path / "f.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        path.chmod(mode)
        return read_config(str(path), config_table.SettingsTable())

    return of


def texts(entries: Entries) -> dict[str, str]:
    return {entry.setting.name: entry.text for entry in entries.values()}


def test_values_are_taken_as_they_are_written(read: Callable[[str], Entries]) -> None:
    """Also those that YAML has other ideas of: numbers in base 60, words for true, octal numbers, dates."""
    found = read(
        "run: {nnodes: 2:4, warm: on, role: 0123, rdzv-id: 2026-11-22, log_dir: 'a: b', master-port: 29_500}\n"
        "plan: {what_if: [lose node3, join 2 nodes]}\njobs_set: {pin: 3}\ncluster:\n"
    )
    assert texts(found) == {
        "run.nnodes": "2:4",
        "run.warm": "on",
        "run.role": "0123",
        "run.rdzv_id": "2026-11-22",
        "run.log_dir": "a: b",
        "run.master_port": "29_500",
        "plan.what_if": "lose node3,join 2 nodes",
        "jobs-set.pin": "3",
    }
    assert {entry.place.rpartition(":")[2] for entry in found.values()} == {"1", "2", "3"}
    assert read("") == read("# nothing\n") == read("run:\nagent: {}\n") == {}


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("runn:\n  warm: on", 1, "there is no section 'runn'; is it 'run'?"),
        ("zzz: {}", 1, "there is no section 'zzz'; `unicron config show --all` lists what there is"),
        ("run:\n  warm: on\n  nnode: 2", 3, "run has no setting 'nnode'; is it 'nnodes'?"),
        ("run:\n  unicron-console: off", 2, "is it 'console'?"),
        ("nodes:\n  endpoint: h:1", 2, "nodes has no setting 'endpoint'; the section cluster has one"),
        ("run:\n  max_restarts: -1", 2, "run.max_restarts: '-1' is not valid; give a whole number, 0 or more"),
        ("run:\n  max_restarts: three", 2, "run.max_restarts: 'three' is not valid; give a whole number"),
        ("run:\n  max-restarts: -1", 2, "give a whole number, 0 or more"),
        ("run:\n  monitor_interval: yes", 2, "give a number"),
        ("run:\n  nnodes: 4:2", 2, "give N or MIN:MAX with 0 < MIN <= MAX"),
        ("run:\n  nproc_per_node: 0", 2, "give a number above 0, auto, cpu or gpu"),
        ("run:\n  start_method: thread", 2, "give spawn, fork or forkserver"),
        ("run:\n  standalone: perhaps", 2, "give on or off"),
        ("run:\n  console: fancy", 2, "give auto, panel, plain or off"),
        ("run:\n  hang_patience: -3", 2, "give a number of seconds, 0 or more"),
        ("run:\n  rdzv_conf: x", 2, "give key=value pairs with commas between"),
        ("run:\n  chaos: no", 2, "give a plan of faults"),
        ("agent:\n  metrics_port: 70000", 2, "give a port from 1 to 65535, or 0 for none"),
        ("etcd:\n  port: 70000", 2, "give a whole number, at least 0 and at most 65535"),
        ("simulate:\n  seeds: 0", 2, "give a whole number, at least 1 and at most 10000"),
        ("cluster:\n  endpoint: a b", 2, "give http://HOST:PORT"),
        ("run:\n  warm: on\n  warm: off", 3, "'warm' is there twice, first in line 2"),
        ("run:\n  log_dir: a\n  log-dir: b", 3, "'log-dir' is there twice, first in line 2"),
        ("run: {}\nagent: {}\nrun: {}", 3, "'run' is there twice, first in line 1"),
        ("run:\n  nnodes: [1, 2]", 2, "run.nnodes takes text as on the command line, with commas between several"),
        ("run:\n  max_restarts: {a: 1}", 2, "takes a whole number as on the command line, and not a section"),
        ("run:\n  nnodes:", 2, "run.nnodes has no value; give one, or take the line out"),
        ("run:\n  nnodes: ~", 2, "run.nnodes has no value"),
        ("run:\n  role: !env HOME", 2, "has the tag !env; tags are not for settings"),
        ("run:\n  role: !!python/name:os.system x", 2, "tags are not for settings"),
        ('run:\n  role: "a\\0b"', 2, "must not hold a zero character"),
        ("run: 3", 1, "the section run must have settings, such as nnodes: VALUE"),
        ("- run", 1, "the file must have sections, such as run:"),
        ("run:\n  ? [a]\n  : 1", 2, "the section run must have settings"),
        ("run:\n  <<: {warm: on}", 2, "run has no setting '<<'"),
        ("run: {warm: on", 1, "this is no YAML"),
        ("run:\n\twarm: on", 2, "this is no YAML: found character '\\t' that cannot start any token"),
        ("run: {}\n---\nagent: {}", 2, "this is no YAML"),
        ("run: &a [*b]", 1, "this is no YAML: found undefined alias"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(
    read: Callable[[str], Entries], tmp_path: Path, text: str, line: int, words: str
) -> None:
    with pytest.raises(BadConfig) as caught:
        read(text)
    said = str(caught.value)
    assert said.startswith(f"{tmp_path}/f.yaml:{line}: ")
    assert words in said
    assert "\n" not in said


def test_files_that_are_none(tmp_path: Path, read: Callable[..., Entries]) -> None:
    table = config_table.SettingsTable()
    for path, words in (
        (tmp_path / "none.yaml", "cannot be read: No such file or directory"),
        (tmp_path, "cannot be read: Is a directory"),
        (Path("/dev/null"), "is no regular file"),
    ):
        with pytest.raises(BadConfig, match=words):
            read_config(str(path), table)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadConfig, match="is no regular file"):  # and nobody waits for a writer
        read_config(str(tmp_path / "pipe"), table)
    for raw, words in (
        (b"run: {role: \xff}", "no YAML"),
        (b"run: {role: \x01}", "no YAML"),
        (b"#" * (1 << 20) + b"#", "longer than 1 MiB"),
        (b"[" * 2000, "nested too deeply"),
    ):
        with pytest.raises(BadConfig, match=words) as caught:
            read(raw)
        assert "\n" not in str(caught.value)


def test_a_file_with_a_secret_is_its_owners_alone(read: Callable[..., Entries]) -> None:
    secret = "cluster:\n  etcd_user: u\n  etcd_password: hush\n"
    assert texts(read(secret, 0o600))["cluster.etcd_password"] == "hush"
    for mode in (0o640, 0o604, 0o620, 0o644):
        with pytest.raises(
            BadConfig, match=r"f.yaml:3: cluster.etcd_password is a secret, and others may read"
        ) as told:
            read(secret, mode)
        assert "hush" not in str(told.value)
    assert read("run: {health_command: check}", 0o664)
    with pytest.raises(BadConfig, match="may be changed by everybody, and it says what commands run"):
        read("run: {health_command: check}", 0o666)


def test_a_secret_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f.yaml"
    path.write_text("cluster: {etcd_user: u, etcd_password: hush}")
    path.chmod(0o600)
    monkeypatch.setenv("UNICRON_CONFIG", str(path))
    rows = {each.setting.key: each for each in config_cli.of_command(["nodes"])}
    assert (rows["etcd_password"].shown, rows["etcd_password"].source) == ("(set)", "file")
    assert "hush" not in str([each.to_json() for each in rows.values()])
    monkeypatch.setenv("UNICRON_ETCD_PASSWORD", "quiet")
    rows = {each.setting.key: each for each in config_cli.of_command(["run", "train.py"])}
    assert (rows["etcd_password"].shown, rows["etcd_password"].origin) == ("(set)", "UNICRON_ETCD_PASSWORD")
    assert rows["etcd_password_file"].source == "default"
    assert "quiet" not in str([each.to_json() for each in rows.values()])


def test_a_password_of_the_environment_is_not_joined_by_one_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_text("cluster: {etcd_user: u, etcd_password_file: /p}")
    environ = {"UNICRON_ETCD_PASSWORD": "quiet"}
    with_file(["train.py"], 0, str(path), environ)
    assert environ == {"UNICRON_ETCD_PASSWORD": "quiet", "UNICRON_ETCD_USER": "u"}


# -- unicron-run ---------------------------------------------------------------------------------------------------


def test_a_file_is_put_in_front_and_leaves_no_variables_of_torchrun(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_text(
        "run: {nnodes: 1, nproc-per-node: 2, standalone: true, no_python: false, warm: off, cluster: h:1, weight: 2}\n"
        "cluster: {etcd_ca: /ca.pem}\nagent: {label: rack}\n"
    )
    environ = {"PET_NNODES": "3", "UNICRON_ETCD_CA": " "}
    argv = ["--config", str(path), "--nproc_per_node", "4", "train.py", "--config", "mine"]
    assert with_file(argv, 2, str(path), environ) == [
        "--standalone", "--unicron-warm=off", "--nproc_per_node", "4", "train.py", "--config", "mine"
    ]  # fmt: skip
    assert environ == {
        "PET_NNODES": "3", "UNICRON_ETCD_CA": "/ca.pem", "UNICRON_CLUSTER": "h:1", "UNICRON_WEIGHT": "2"
    }  # fmt: skip


def test_a_submitted_job_has_what_the_file_says_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, path = tmp_path / "train.py", tmp_path / "f.yaml"
    script.write_text("")
    path.write_text("run: {nproc_per_node: 2, max_restarts: 3, hang_patience: 9, metrics_port: 9400, weight: 2}")
    monkeypatch.setenv("UNICRON_CONFIG", str(path))
    args, argv = main._parse(["--cluster", "h:1", "--nnodes=2:4", str(script), "--lr", "1"])
    spec = submission.spec_of(args, argv, weight=os.environ["UNICRON_WEIGHT"], spec_file="")
    assert spec.command == ("unicron-run", "--max-restarts=3", "--unicron-hang-patience=9", str(script), "--lr", "1")
    assert (spec.nproc_per_node, spec.min_nodes, spec.max_nodes, spec.weight) == (2, 2, 4, 2.0)
    assert "UNICRON_CONFIG" not in spec.env
    assert lending.shared_arguments(argv, 2)[:3] == (
        "--nproc-per-node=2", "--max-restarts=3", "--unicron-hang-patience=9"
    )  # fmt: skip


def test_the_file_of_the_documentation_is_right(read: Callable[..., Entries]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    found = texts(read(example, 0o644))
    assert found["run.nnodes"] == "2:4"
    assert found["quarantine-list.all"] == "true"


@pytest.mark.parametrize("words", [["--config", "f"], ["--config=f"], ["--conf", "f"], ["--co=f"]])
def test_other_nodes_are_not_told_of_the_file(words: list[str]) -> None:
    assert without_config([*words, "--nnodes", "2", "t.py", "--config", "g"], 2) == [
        "--nnodes", "2", "t.py", "--config", "g"
    ]  # fmt: skip
    assert shared_options(["--config", "f", "--tee", "3"]) == ["--tee", "3"]
    assert lending.environment({"UNICRON_CONFIG": "f", "UNICRON_WARM": "off"}) == {"UNICRON_WARM": "off"}


def test_a_complaint_about_a_value_of_the_file_names_the_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, path = tmp_path / "train.py", tmp_path / "f.yaml"
    script.write_text("")
    path.write_text(f"run:\n  log_dir: {script}\n")
    assert main._run_command(["--config", str(path), str(script)]) == 1
    assert f"unicron-run: {path}:2: --log-dir: '{script}' is not valid" in capsys.readouterr().err
    path.write_text("run:\n  nnodes: x\n")
    assert main._run_command(["--config", str(path), str(script)]) == 2
    assert f"unicron-run: {path}:2: run.nnodes: 'x' is not valid" in capsys.readouterr().err
    assert main._run_command(["--config", "", str(script)]) == 2
    assert "unicron-run: --config is empty; give a file" in capsys.readouterr().err
    assert located("--no-flag: nothing is known") == "--no-flag: nothing is known"


def test_variables_for_options_that_torchrun_reads_none_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NUMA_BINDING", "socket")  # which torchrun does not read
    assert main.parse_args(["train.py"]).numa_binding is None
    monkeypatch.setenv("UNICRON_NUMA_BINDING", "node")
    assert main.parse_args(["train.py"]).numa_binding == "node"
    assert main.parse_args(["--numa-binding=socket", "train.py"]).numa_binding == "socket"
    monkeypatch.setenv("UNICRON_NUMA_BINDING", "moon")
    with pytest.raises(BadOption, match="UNICRON_NUMA_BINDING: 'moon' is not valid; give node, socket"):
        main.parse_args(["train.py"])


def test_without_a_file_nothing_of_files_is_imported() -> None:
    program = (
        "import sys; from unicron_elastic.launcher import main; main.parse_args(['--standalone', 'train.py'])\n"
        "of_files = tuple('launcher.config.' + name for name in ('file', 'resolve', 'run', 'settings', 'table'))\n"
        "print(*(name for name in sys.modules if name in ('yaml', 'typer', 'torch') or name.endswith(of_files)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []


# -- unicron -------------------------------------------------------------------------------------------------------


def _unicron(*words: str) -> int:
    try:
        code = typer.main.get_command(app).main(list(words), prog_name="unicron", standalone_mode=False)
    except typer.Exit as error:
        return error.exit_code
    return int(code or 0)


def test_a_file_for_unicron_is_named_before_or_after_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, ledger = tmp_path / "f.yaml", tmp_path / "none.jsonl"
    path.write_text(f"run: {{ledger: {ledger}}}\n")
    for words in (["--config", str(path), "incidents"], ["incidents", "--config", str(path)]):
        assert _unicron(*words) == 1
        assert f"No incident is recorded in {ledger}." in capsys.readouterr().err
    assert "UNICRON_LEDGER" not in os.environ  # what a command was given ends with it
    assert "UNICRON_CONFIG" not in os.environ


def test_a_wrong_file_or_variable_ends_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f.yaml"
    path.write_text("agnt: {}\n")
    assert _unicron("nodes", "--config", str(path)) == 2
    assert capsys.readouterr().err == f"unicron: {path}:1: there is no section 'agnt'; is it 'agent'?\n"
    assert _unicron("--config", " ", "nodes") == 2
    assert "--config is empty" in capsys.readouterr().err
    monkeypatch.setenv("UNICRON_SIMULATE_SEEDS", "many")
    assert _unicron("simulate", "trace-a") == 2
    said = "UNICRON_SIMULATE_SEEDS: 'many' is not valid; give a whole number, at least 1 and at most 10000."
    assert said in capsys.readouterr().err


def test_complaints_of_unicron_name_the_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "f.yaml"
    path.write_text("cluster:\n  etcd_cert: /no/cert\n")
    assert _unicron("nodes", "--config", str(path)) == 2
    assert f"unicron: {path}:2: UNICRON_ETCD_CERT needs --etcd-key, too" in capsys.readouterr().err
    assert located("UNICRON_ETCD_CERT needs") == "UNICRON_ETCD_CERT needs"  # the command is over


def test_config_show(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f.yaml"
    path.write_text("run: {tee: 3}\nagent:\n  label: rack 7\n")
    monkeypatch.setenv("PET_NNODES", "2")
    assert _unicron("config", "show", "--config", str(path)) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["run.nnodes", "2", "PET_NNODES"],
        ["run.tee", "3", f"{path}:1"],
        ["agent.label", "rack", "7", f"{path}:3"],
    ]
    assert _unicron("config", "show", "--config", str(path), "agent", "--address", "h") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["agent.address", "h", "--address"] in rows
    assert ["cluster.endpoint", "localhost:2379", "default"] in rows
    assert _unicron("config", "show", "jobs", "set", "--resume") == 0
    assert "jobs-set.pause" in (shown := capsys.readouterr().out)
    assert ["jobs-set.pause", "off", "--resume"] in [line.split() for line in shown.splitlines()]
    assert _unicron("config", "show", "nothing") == 2
    assert "'nothing' is no command; there are agent," in capsys.readouterr().err
    monkeypatch.delenv("PET_NNODES")
    assert _unicron("config", "show") == 1
    assert "Nothing is set" in capsys.readouterr().err


def test_config_show_heeds_the_file_that_the_command_would_be_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_environment, path = tmp_path / "e.yaml", tmp_path / "f.yaml"
    of_environment.write_text("run: {tee: 1, nnodes: 9}\nagent: {label: of the environment, address: nowhere}\n")
    path.write_text("run:\n  tee: 3\n\nagent:\n  label: rack 7\n")
    monkeypatch.setenv("UNICRON_CONFIG", str(of_environment))

    def shown(*words: str) -> list[list[str]]:
        assert _unicron("config", "show", *words) == 0
        return [line.split() for line in capsys.readouterr().out.splitlines()]

    for words in (["--config", str(path)], [f"--config={path}"]):
        rows = shown("agent", *words)
        assert ["agent.label", "rack", "7", f"{path}:5"] in rows
        assert not any("nowhere" in row for row in rows)
    for words in (["--config", str(path)], [f"--config={path}", "--nnodes=2", "train.py", "--config", "none"]):
        rows = shown("run", *words)
        assert ["run.tee", "3", f"{path}:2"] in rows
        assert not any("9" in row for row in rows)
    assert ["run.nnodes", "2", "--nnodes"] in rows
    assert os.environ["UNICRON_CONFIG"] == str(of_environment)


@pytest.mark.parametrize("command", ["agent", "run", "unicron-run"])
def test_config_show_with_a_file_that_is_none_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    missing = tmp_path / "none.yaml"
    for named, why in ((str(missing), f"{missing} cannot be read: No such file or directory."), *EMPTY):
        assert _unicron("config", "show", command, "--config", named) == 2
        told = capsys.readouterr()
        assert (told.out, told.err) == ("", f"unicron: {why}\n")


EMPTY = [(text, "--config is empty; give a file, or leave the option out.") for text in ("", " ")]


YAML = st.recursive(
    st.sampled_from(["on", "2:4", "'x'", "", "~", "&a 1", "*a", "!t y", "- z", "[", "\t", "#"]) | st.text(max_size=8),
    lambda inner: (
        st.tuples(st.sampled_from(["run", "nnodes", "warm", "cluster", "x"]), inner).map(
            lambda pair: f"{pair[0]}: {pair[1]}"
        )
        | st.lists(inner, max_size=3).map(lambda parts: "{" + ", ".join(parts) + "}")
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(YAML | st.binary(max_size=40))
def test_whatever_is_in_a_file_it_is_settings_or_one_sentence(read: Callable[..., Entries], raw: str | bytes) -> None:
    try:
        found = read(raw.encode(errors="replace") if isinstance(raw, str) else raw)
    except BadConfig as error:
        said = str(error)
    else:
        said = "all is well"
        assert all(entry.setting.section in config_table.SettingsTable() for entry in found.values())
    assert said
    assert "\n" not in said
