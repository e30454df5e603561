"""Jobs from command lines to the cluster's store: what is made of them, and what is wrong with those that cannot be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.run as torch_run

from unicron_elastic.launcher import main
from unicron_elastic.launcher.config import arguments
from unicron_elastic.launcher.node import submission
from unicron_elastic.launcher.node.submission import CannotSubmit, spec_of
from unicron_elastic.planning.coordinate.snapshot import JobPhase
from unicron_elastic.planning.model.jobs import GivenRates, JobSpec
from unicron_elastic.rendezvous.records.plan import PhaseRecord, parse_phase, parse_spec, phase_text
from unicron_elastic.rendezvous.records.plan_keys import PlannedJobKeys
from unicron_elastic.rendezvous.store.interface import Store
from unicron_elastic.testing.memory_store import MemoryServer, MemoryStore


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with a script; variables of whoever runs the tests change nothing."""
    for name in list(os.environ):
        if name.startswith(("PET_", "UNICRON_", "NCCL_", "OMP_", "PYTHON", "TORCH", "HF_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return tmp_path


def made(*argv: str, weight: str = "", spec_file: str = "", environ: dict[str, str] | None = None) -> JobSpec:
    args = main.parse_args(argv)
    return spec_of(args, argv, weight=weight, spec_file=spec_file, environ=environ or {})


@pytest.mark.parametrize(
    ("processes", "environ", "is_told"),
    [
        ("2", {}, True),
        ("2", {"OMP_NUM_THREADS": "4"}, False),
        ("1", {}, False),
        ("gpu", {}, False),  # each node says so of itself
    ],
)
def test_how_many_threads_a_process_has_is_told_once_for_all_nodes(
    processes: str, environ: dict[str, str], is_told: bool
) -> None:
    told = submission.threads_told(processes, made("train.py", environ=environ))
    assert told.startswith("OMP_NUM_THREADS is not set: each process of the job gets 1, as torchrun ") is is_told
    assert bool(told) is is_told


@pytest.mark.parametrize(
    ("options", "low", "high"),
    [
        ([], 1, 1),
        (["--nnodes=4"], 4, 4),
        (["--nnodes", "2:4"], 2, 4),
        (["--nno=2:4"], 2, 4),
        (["--nnodes= 2 : 4 "], 2, 4),
    ],
)
def test_how_many_nodes_it_can_use(options: list[str], low: int, high: int) -> None:
    job = made(*options, "train.py")
    assert (job.min_nodes, job.max_nodes) == (low, high)
    assert job.command == ("unicron-run", "train.py")


def test_what_the_nodes_are_told(here: Path) -> None:
    environ = {
        "NCCL_DEBUG": "INFO", "PET_MAX_RESTARTS": "3", "HOME": "/root", "UNICRON_CLUSTER": "h:1", "MY_TOKEN": "t",
        "NCCL_SECRET_KEY": "x", "UNICRON_ETCD_PASSWORD": "y", "UNICRON_SPEC_ENV": "DATA", "DATA": "/data",
        "UNICRON_NODE_NAME": "login", "UNICRON_WEIGHT": "3",
    }  # fmt: skip
    argv = [
        "--cluster=h:1", "--detach", "--rdzv-id", "job 1", "--nproc-per-node=8", "--max-restarts=2", "--role=r",
        "--master-port", "1", "--clus", "h:2", "train.py", "--cluster", "x",
    ]  # fmt: skip
    job = made(*argv, environ=environ)
    assert job.name == "job 1"
    assert job.command == ("unicron-run", "--max-restarts=2", "--role=r", "train.py", "--cluster", "x")
    assert job.directory == str(here)
    assert job.nproc_per_node == 8
    assert job.env == {
        "NCCL_DEBUG": "INFO", "PET_MAX_RESTARTS": "3", "UNICRON_SPEC_ENV": "DATA", "DATA": "/data",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("spec_env", "told"),
    [
        ("", "BATCH, FOO are set here, and train.py names them, but are not sent to the nodes"),
        ("FOO", "BATCH is set here, and train.py names it, but is not sent to the nodes"),
        ("FOO,BATCH", ""),
    ],
)
def test_variables_that_the_script_names_and_does_not_get_are_told(here: Path, spec_env: str, told: str) -> None:
    (here / "train.py").write_text(
        "import os; os.environ[\"FOO\"]; os.getenv('BATCH'); os.environ['HOME'], 'RANK'; 'NCCL_X'"
    )
    environ = {
        "FOO": "1",
        "BATCH": "2",
        "OTHER": "3",
        "HOME": "/h",
        "RANK": "0",
        "NCCL_X": "1",
        "UNICRON_SPEC_ENV": spec_env,
    }
    args = main.parse_args(["train.py"])
    said = submission.not_taken(args, made("train.py", environ=environ), environ)
    assert said.partition(";")[0] == told


def test_of_a_module_it_is_not_known_what_it_names() -> None:
    argv = ["-m", "package.train"]
    assert submission.not_taken(main.parse_args(argv), made(*argv), {"FOO": "1"}) == ""


def test_a_name_is_found_for_a_job_without_one() -> None:
    first, second = made("some/where/train.py"), made("some/where/train.py")
    assert first.name.startswith("train-")
    assert first.name != second.name
    assert made("--no-python", "/bin/.hidden").name.startswith(".hidden-")


def test_a_file_says_more_and_the_command_line_goes_before_with_weight(here: Path) -> None:
    told = {"unit_nodes": 2, "max_nodes": 8, "weight": 2, "throughput": {"rates_flops": [0, 1e12]}, "env": {"B": "2"}}
    (here / "job.json").write_text(json.dumps(told))
    job = made("--nnodes=2:4", "train.py", weight="1.5", spec_file="job.json", environ={"NCCL_A": "1"})
    assert (job.unit_nodes, job.min_nodes, job.max_nodes, job.weight) == (2, 2, 8, 1.5)
    assert job.throughput == GivenRates((0, 1e12))
    assert job.env == {"NCCL_A": "1", "B": "2"}


BAD_FILES = {
    "list.json": "[1]",
    "text.json": "min_nodes: 2",
    "deep.json": "[" * 100_000,
    "bytes.json": "\udcff",
    "unknown.json": '{"colour": "red"}',
    "kind.json": '{"min_nodes": "two"}',
    "nan.json": '{"weight": NaN}',
    "many.json": '{"min_nodes": 5}',
    "command.json": '{"command": ["unicron-run", "--no-such-flag=1", "train.py"]}',
    "word.json": '{"command": "train.py"}',
    "folder.json": '{"directory": "here"}',
    "env.json": '{"env": {"A": 1}}',
    "name.json": '{"name": 5}',
}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nproc-per-node=auto"], ["--nproc-per-node", "'auto'", "number of workers"]),
        (["--nproc-per-node=gpu"], ["--nproc-per-node", "'gpu'"]),
        (["--weight=heavy"], ["--weight", "'heavy'", "a number, 0 or more"]),
        (["--weight=-1"], ["weight", "-1", "0 or more"]),
        (["--weight=nan"], ["weight", "nan", "0 or more"]),
        (["--job-spec=none.json"], ["--job-spec", "none.json", "No such file"]),
        (["--job-spec=."], ["--job-spec", "directory"]),
        (["--job-spec=list.json"], ["--job-spec", "list.json", "an object"]),
        (["--job-spec=text.json"], ["--job-spec", "text.json", "JSON"]),
        (["--job-spec=deep.json"], ["--job-spec", "deep.json", "JSON"]),
        (["--job-spec=bytes.json"], ["--job-spec", "bytes.json", "JSON"]),
        (["--job-spec=unknown.json"], ["colour"]),
        (["--job-spec=kind.json"], ["min_nodes", "two"]),
        (["--job-spec=nan.json"], ["weight", "nan"]),
        (["--job-spec=many.json"], ["min_nodes is 5", "max_nodes, which is 1"]),
        (["--job-spec=command.json"], ["command", "no-such-flag"]),
        (["--job-spec=word.json"], ["command", "a list of words"]),
        (["--job-spec=folder.json"], ["directory", "absolute"]),
        (["--job-spec=env.json"], ["env", "texts"]),
        (["--job-spec=name.json"], ["name"]),
        (["--rdzv-id", "ä" * 150], ["--rdzv-id", "shorter"]),
        (["--rdzv-id", "a" * 201], ["name", "200"]),
        (["--rdzv-id", "\udcff"], ["--rdzv-id"]),
        (["--rdzv-id= "], ["name"]),
        (["--cluster=h:1:2:3"], ["--cluster", "h:1:2:3"]),
        (["--cluster=ftp://h:1"], ["--cluster"]),
    ],
)
def test_what_cannot_be_is_one_sentence(
    here: Path, options: list[str], words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    for name, text in BAD_FILES.items():
        (here / name).write_text(text, errors="surrogateescape")
    assert main._run_command(["--cluster=127.0.0.1:1", *options, "train.py"]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1, err
    assert err.startswith("unicron-run: ")
    for word in words:
        assert word in err


def test_a_cluster_that_is_not_there_is_one_sentence(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "CONNECT_TIMEOUT_S", 0.5)
    for more in ([], ["--detach"]):
        assert main._run_command(["--cluster=127.0.0.1:1", *more, "train.py"]) == 1
        err = capfd.readouterr().err
        assert err.startswith("unicron-run: the job cannot be submitted: ")
        assert len(err.splitlines()) == 1, err


def test_a_mistake_costs_no_import_of_torch(here: Path) -> None:
    program = (
        "import atexit, sys\nfrom unicron_elastic.launcher import main\n"
        "atexit.register(lambda: print('torch' in sys.modules))\nmain.console_script()\n"
    )
    command = [sys.executable, "-c", program, "--cluster=h:1", "--weight=heavy", "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=here)
    assert (done.returncode, done.stdout) == (1, "False\n"), done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


# -- whether it goes to a cluster --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "cluster"),
    [
        ([], "env:1"),
        (["--cluster=line:1"], "line:1"),
        (["--cluster="], ""),
        (["--standalone"], ""),
        (["--rdzv-endpoint=h:1"], ""),
        (["--rdzv-backend=c10d"], ""),
        (["--rdzv-backend=unicron", "--rdzv-endpoint=h:1"], ""),
        (["--nnodes=2", "--rdzv-id=x"], "env:1"),
        (["--standalone", "--cluster=line:1"], "line:1"),
    ],
)
def test_the_variable_counts_unless_the_command_line_says_where_it_runs(
    options: list[str], cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNICRON_CLUSTER", " env:1 ")
    assert main._cluster_of(main.parse_args([*options, "train.py"])) == cluster


@pytest.mark.parametrize("option", ["--detach", "--weight=2", "--job-spec=job.json"])
def test_what_would_be_without_effect_is_no_job(
    option: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNICRON_CLUSTER", "h:1")  # which does not count
    assert main._run_command(["--standalone", option, "train.py"]) == 1
    err = capfd.readouterr().err
    assert err.startswith(f"unicron-run: {option.partition('=')[0]}: ")
    assert "--cluster" in err
    assert len(err.splitlines()) == 1


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("options", "name"),
    [
        (["--standalone"], "--standalone"),
        (["--stand"], "--standalone"),
        (["--rdzv-backend=c10d"], "--rdzv-backend"),
        (["--rdzv_backend", "c10d"], "--rdzv-backend"),
        (["--rdzv-endp", "h:1"], "--rdzv-endpoint"),
        (["--node-rank=1"], "--node-rank"),
        (["--master_addr", "h"], "--master-addr"),
    ],
)
def test_what_the_cluster_decides_is_refused_by_name(
    options: list[str], name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main._run_command(["--cluster=h:1", *options, "train.py"]) == 1
    assert capfd.readouterr().err == (
        f"unicron-run: {name} and --cluster exclude each other: where the nodes of the job meet, and which they are, "
        "the cluster decides\n"
    )


@dataclass
class _Submitted:
    spec: JobSpec
    cluster: str
    detach: bool


@pytest.mark.parametrize(
    ("options", "environ", "wanted"),
    [
        ([], {}, (1.0, False)),
        (["--detach", "--weight=2"], {}, (2.0, True)),
        ([], {"UNICRON_DETACH": "1", "UNICRON_WEIGHT": "3"}, (3.0, True)),
        (["--weight=2"], {"UNICRON_DETACH": "0", "UNICRON_WEIGHT": "3"}, (2.0, False)),
        ([], {"UNICRON_JOB_SPEC": "job.json"}, (4.0, False)),
        (["--job-spec="], {"UNICRON_JOB_SPEC": "job.json"}, (1.0, False)),
    ],
)
def test_options_have_variables(
    here: Path, options: list[str], environ: dict[str, str], wanted: tuple[float, bool], monkeypatch: Any
) -> None:
    (here / "job.json").write_text('{"weight": 4}')
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    found: list[_Submitted] = []

    def submit(spec: JobSpec, cluster: str, *, detach: bool) -> int:
        found.append(_Submitted(spec, cluster, detach))
        return 5

    monkeypatch.setattr(submission, "submit", submit)
    assert main._run_command(["--cluster=h:1", *options, "train.py"]) == 5
    assert [(each.spec.weight, each.detach, each.cluster) for each in found] == [(*wanted, "h:1")]
    assert not {"UNICRON_DETACH", "UNICRON_WEIGHT", "UNICRON_JOB_SPEC"} & set(found[0].spec.env)


def test_standard_input_is_no_script_of_a_cluster() -> None:
    with pytest.raises(CannotSubmit, match="standard input"):
        made("-", "train.py")


# -- its name ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def store() -> Store:
    return MemoryStore(MemoryServer(time.monotonic))


def test_a_name_is_taken_until_its_job_is_over(store: Store) -> None:
    job = made("--rdzv-id=job", "train.py")
    keys = PlannedJobKeys("job")
    submission._write(store, job, None)
    entry = store.read(keys.phase).entry
    assert entry is not None, "where there is none, the store has lost its data"
    record = parse_phase(entry)
    assert record.submission > 0
    submitted = PhaseRecord(phase=JobPhase.SUBMITTED, reason="job was submitted.", submission=record.submission)
    assert record == submitted
    submissions = {record.submission}
    for phase in (None, JobPhase.SUBMITTED, JobPhase.RUNNING):
        if phase is not None:
            store.put(keys.phase, phase_text(PhaseRecord(phase=phase, reason="")))
        else:
            store.delete(keys.phase)
        with pytest.raises(CannotSubmit, match=r"^a job called job is in the cluster already; .*`unicron cancel job`$"):
            submission._write(store, made("--rdzv-id=job", "train.py", "again"), None)
    for phase in (JobPhase.FINISHED, JobPhase.CANCELLED):
        store.put(keys.phase, phase_text(PhaseRecord(phase=phase, reason="", start=7)))
        for number in range(300):  # more than one commit can take
            store.put(keys.refused(f"n{number}"), b"no.")
        submission._write(store, made("--rdzv-id=job", "train.py", phase.value), None)
        entry = store.read(keys.spec).entry
        assert entry is not None
        assert parse_spec(entry).command[-1] == phase.value
        entry = store.read(keys.phase).entry
        assert entry is not None
        record = parse_phase(entry)
        assert (record.phase, record.start) == (JobPhase.SUBMITTED, 7), "no start comes twice"
        submissions.add(record.submission)
        assert {each.key for each in store.read_prefix(keys.prefix).entries} == {keys.spec, keys.phase}
    assert len(submissions) == 3


def test_a_cancelled_job_is_known_and_one_that_is_over_stays_as_it_ended(store: Store) -> None:
    keys = PlannedJobKeys("job")
    record = PhaseRecord(phase=JobPhase.CANCELLED, reason="It was stopped.", signal=2)
    submission._cancel(store, keys, record)
    assert not store.read_prefix(keys.prefix).entries
    submission._write(store, made("--rdzv-id=job", "train.py"), None)
    submission._cancel(store, keys, record)
    entry = store.read(keys.phase).entry
    assert entry is not None
    assert parse_phase(entry) == replace(record, submission=parse_phase(entry).submission)
    submission._cancel(store, keys, PhaseRecord(phase=JobPhase.CANCELLED, reason="Again.", signal=15))
    again = store.read(keys.phase).entry
    assert again == entry


def test_what_is_known_of_a_cancelled_job_goes_after_a_day(store: Store) -> None:
    keys = PlannedJobKeys("job")
    submission._write(store, made("--rdzv-id=job", "train.py"), None)
    for key in (keys.rates, keys.measured, keys.refused("n1")):
        store.put(key, b"{}")
    submission._cancel(store, keys, PhaseRecord(phase=JobPhase.CANCELLED, reason="It was stopped.", signal=2))
    left = store.read_prefix(keys.prefix).entries
    assert len(left) == 5
    (lease_id,) = {entry.lease_id for entry in left}
    assert lease_id is not None
    store.revoke(lease_id)
    assert not store.read_prefix(keys.prefix).entries


# -- torchrun's options mean what they mean there ----------------------------------------------------------------------


def _meanings(parser: Any, prefix: str) -> set[str]:
    exact = parser._option_string_actions.get(prefix)
    if exact is not None:
        return {exact.dest}
    return {found[0].dest for found in parser._get_option_tuples(prefix)}


def _parses(make: Callable[[], Any], word: str) -> tuple[bool, dict[str, Any]]:
    words = [word, "1", "train.py"] if word != "-h" else []
    try:
        return True, vars(make().parse_args(words))
    except SystemExit:
        return False, {}


def test_every_abbreviation_that_torchrun_takes_means_the_same() -> None:
    torchs, ours = torch_run.get_args_parser(), arguments.get_args_parser()
    prefixes = {name[:end] for name in torchs._option_string_actions for end in range(3, len(name) + 1)}
    assert len(prefixes) > 300
    for prefix in sorted(prefixes):
        if len(_meanings(torchs, prefix)) == 1:
            assert _meanings(ours, prefix) == _meanings(torchs, prefix), prefix


@pytest.mark.parametrize(
    "word", ["--nno", "--rdzv-b", "--loc", "--stan", "--virt", "--dup", "--mas", "--w", "--d", "-r"]
)
def test_some_of_them_as_the_parsers_take_them(word: str, capfd: pytest.CaptureFixture[str]) -> None:
    is_torchs, torchs = _parses(torch_run.get_args_parser, word)
    is_ours, ours = _parses(arguments.get_args_parser, word)
    if is_torchs:
        assert is_ours
        assert {name: ours[name] for name in torchs} == torchs
    capfd.readouterr()


def test_what_was_measured_holds_for_a_job_that_runs_the_same_again(store: Store) -> None:
    keys = PlannedJobKeys("job")
    submission._write(store, made("--rdzv-id=job", "train.py", "--lr=1"), None)
    lease_id = store.grant(60.0).lease_id
    for key in (keys.measured, keys.rates, keys.refused("n/1")):
        store.put(key, b"{}", lease_id)
    store.put(keys.phase, phase_text(PhaseRecord(phase=JobPhase.FINISHED, reason="It has ended.", exit_code=0)))
    submission._write(store, made("--rdzv-id=job", "--nnodes=1", "train.py", "--lr=1", weight="3"), None)
    found = {entry.key: entry.lease_id for entry in store.read_prefix(keys.prefix).entries}
    assert found == {keys.spec: None, keys.phase: None, keys.measured: None, keys.rates: None}
    store.put(keys.phase, phase_text(PhaseRecord(phase=JobPhase.CANCELLED, reason="It was cancelled.")))
    submission._write(store, made("--rdzv-id=job", "train.py", "--lr=2"), None)
    assert {entry.key for entry in store.read_prefix(keys.prefix).entries} == {keys.spec, keys.phase}
