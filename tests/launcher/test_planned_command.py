"""The command line of a node's part of a planned job, its environment, and why a node cannot run it."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from unicron_elastic.launcher.config.arguments import get_args_parser
from unicron_elastic.launcher.config.forwarded import PLANNED_JOB
from unicron_elastic.launcher.node import children
from unicron_elastic.launcher.node.children import Child
from unicron_elastic.launcher.node.planned import (
    MOST_NODES,
    child_command,
    child_environment,
    parsed,
    shared_options,
    why_not_here,
)
from unicron_elastic.launcher.node.planned_records import may_come_back
from unicron_elastic.planning.coordinate.snapshot import JobPhase
from unicron_elastic.planning.model.configurations import Configuration, Workload
from unicron_elastic.planning.model.configured import CONFIGURATIONS, parse_configurations
from unicron_elastic.planning.model.jobs import JobSpec, Modelled
from unicron_elastic.planning.model.shape import Transformer
from unicron_elastic.rendezvous.records.plan import PhaseRecord


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of whoever runs the tests change no default."""
    for name in list(os.environ):
        if name.startswith(("PET_", "UNICRON_")):
            monkeypatch.delenv(name)


def spec(*command: str, **options: Any) -> JobSpec:
    return JobSpec(**{"name": "job", "command": command, "directory": "/", **options})


def child(*command: str, address: str = "", environ: dict[str, str] | None = None, **options: Any) -> list[str]:
    found = child_command(
        spec(*command, **options), start=7, nodes=2, endpoint="h:2379", address=address, environ=environ or {}
    )
    assert found[:3] == [sys.executable, "-m", "unicron_elastic.launcher.main"]
    return found[3:]


def understood(words: list[str]) -> dict[str, Any]:
    return vars(get_args_parser().parse_args(words))


OWN = [
    "--nnodes=1:1000000", "--nproc-per-node=1", "--rdzv-backend=unicron", "--rdzv-endpoint=h:2379", "--rdzv-id=job",
    "--rdzv-conf=start=7,expected_nodes=2,last_call_timeout=10",
]  # fmt: skip


@pytest.mark.parametrize(
    ("command", "options", "script"),
    [
        (["train.py"], [], ["train.py"]),
        (["unicron-run", "train.py", "--nnodes", "9", "-m"], [], ["train.py", "--nnodes", "9", "-m"]),
        (["/opt/bin/torchrun", "-m", "pack.train", "--cluster", "x"], ["-m"], ["pack.train", "--cluster", "x"]),
        (["--no-python", "./run.sh", "--", "-x"], ["--no-python"], ["./run.sh", "-x"]),  # as torchrun does
        (["train.py", "--"], [], ["train.py"]),
        (["--role=r", "--", "train.py", "--", "-x"], ["--role=r"], ["--", "train.py", "--", "-x"]),
        (["--", "train.py", "a b"], [], ["train.py", "a b"]),
        (["-r", "3", "-t3", "train.py"], ["-r", "3", "-t3"], ["train.py"]),
        (["--max-r=3", "--log_dir", "/l", "t.py"], ["--max-restarts=3", "--log_dir", "/l"], ["t.py"]),
        (["--role", "a", "train.py", "train.py"], ["--role", "a"], ["train.py", "train.py"]),
        (["train.py", ""], [], ["train.py", ""]),
    ],
)
def test_options_come_first_and_the_script_keeps_its_arguments(
    command: list[str], options: list[str], script: list[str]
) -> None:
    words = child(*command)
    assert words == [*options, *OWN, *script]
    found = understood(words)
    as_torchrun = understood([word for word in command if not word.endswith(("torchrun", "unicron-run"))])
    for name in ("training_script", "training_script_args"):
        assert found[name] == as_torchrun[name]


@pytest.mark.parametrize(
    "placed",
    [
        ["--nnodes=4"], ["--nnodes", "4"], ["--nno", "4"], ["--nproc_per_node=2"], ["--nproc-p", "2"],
        ["--rdzv-id", "x"], ["--rdzv_id=x"], ["--rdzv-i=x"], ["--rdzv-backend=c10d"], ["--rdzv-endp=h:1"],
        ["--master-addr", "h"], ["--master_port=1"], ["--node-rank=3"], ["--local-addr=9"], ["--local_a", "9"],
        ["--cluster=h:1"], ["--clust", "h:1"], ["--cl=h:1"], ["--detach"], ["--det"], ["--weight", "2"], ["--we=2"],
        ["--job-spec=f"], ["--j", "f"], ["--standalone"], ["--stand"],
    ],
)  # fmt: skip
def test_where_a_job_runs_is_for_the_plan_to_say_however_it_is_spelled(placed: list[str]) -> None:
    assert child("--role=r", *placed, "--max-restarts", "3", "t.py") == [
        "--role=r",
        "--max-restarts",
        "3",
        *OWN,
        "t.py",
    ]
    assert shared_options(parsed((*placed, "t.py"))[1]) == []


def test_what_the_spec_says_goes_before() -> None:
    found = understood(child("train.py", address="10.0.0.1", min_nodes=4, max_nodes=8, nproc_per_node=8, name="a b/c"))
    assert found["nnodes"] == "4:8"
    assert found["nproc_per_node"] == "8"
    assert found["rdzv_id"] == "a b/c"
    assert found["local_addr"] == "10.0.0.1"
    assert "expected_nodes=4" in found["rdzv_conf"]  # never fewer than it needs
    assert str(MOST_NODES) in understood(child("train.py"))["nnodes"]


@pytest.mark.parametrize(
    ("words", "env", "conf"),
    [
        (["--rdzv-conf=timeout=5,label=a"], {}, "timeout=5,label=a,start=7,"),
        (["--rdzv_conf", "timeout=5,"], {}, "timeout=5,start=7,"),
        ([], {"PET_RDZV_CONF": "timeout=5"}, "timeout=5,start=7,"),
        (["--rdzv-conf=label=b"], {"PET_RDZV_CONF": "timeout=5"}, "label=b,start=7,"),
        ([], {}, "start=7,"),
    ],
)
def test_what_else_the_rendezvous_is_told_stays(words: list[str], env: dict[str, str], conf: str) -> None:
    assert understood(child(*words, "train.py", env=env))["rdzv_conf"].startswith(conf)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["unicron-run"], "training_script"),
        (["--no-such-flag", "train.py"], "no-such-flag|training_script"),
        (["--nnodes"], "--nnodes"),
        (["--start-method=no", "train.py"], "start-method"),
        (["--rdzv", "x", "train.py"], "ambiguous"),
    ],
)
def test_a_command_that_nobody_understands_is_one_sentence(
    command: list[str], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=f"^its command cannot be understood: .*({words})") as caught:
        child(*command)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")
    assert why_not_here(spec(*command)).startswith("its command cannot be understood: ")


def test_variables_that_torchrun_would_not_take_are_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"^its command cannot be understood"):
        child("train.py", env={"PET_MODULE": "often"})


# -- why a node cannot run it ------------------------------------------------------------------------------------------


def test_why_a_node_cannot_run_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "package").mkdir()
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for program in (bin_folder / "tool", tmp_path / "local"):
        program.touch()
        program.chmod(0o755)
    (tmp_path / "text").touch()
    environ = {"PATH": str(bin_folder)}

    def why(*command: str, **options: Any) -> str:
        return why_not_here(spec(*command, **{"directory": str(tmp_path), **options}), environ)

    assert why_not_here(None) == "there is no such job."
    assert why("train.py", directory="/nowhere") == "its folder /nowhere is not there."
    assert why("other.py") == "its script other.py is not there."
    assert why("other${local_rank}.py") == "its script other0.py is not there."
    for well in (["train.py"], [str(tmp_path / "train.py")], ["package"], ["-m", "other.module"]):
        assert why(*well) == ""
    for well in (["--no-python", "tool"], ["--no-python", "./local"], ["--no-p", "bin/tool"]):
        assert why(*well) == ""
    assert why("tool", env={"PET_NO_PYTHON": "1"}) == ""
    assert why("other.module", env={"PET_MODULE": "1"}) == ""
    assert why("--no-python", "local") == "its program local is not there."  # a bare name is looked for on PATH alone
    assert why("--no-python", "./text") == "its program ./text is not there."
    assert why("--no-python", "tool", env={"PATH": "/nowhere"}) == "its program tool is not there."


# -- its environment ---------------------------------------------------------------------------------------------------


def test_the_environment_is_the_nodes_then_the_jobs_then_what_the_plan_says() -> None:
    env = {
        "NCCL_DEBUG": "INFO", "UNICRON_ETCD_ENDPOINT": "elsewhere:1", "UNICRON_ETCD_CA": "/elsewhere", "PET_ROLE": "r",
        "UNICRON_NODE_NAME": "submitter", "UNICRON_PLANNED_JOB": "another", "PET_LOCAL_ADDR": "10.0.0.9",
    }  # fmt: skip
    here = {
        "PATH": "/here", "NCCL_DEBUG": "WARN", "PET_LOCAL_ADDR": "10.0.0.1", "UNICRON_ETCD_PASSWORD_FILE": "/secret",
    }  # fmt: skip
    found = child_environment(spec("train.py", env=env), "node1", {"UNICRON_ETCD_CA": "/here.pem"}, here)
    agent = found.pop("UNICRON_AGENT_PID")
    assert agent.isdecimal()
    assert found == {
        "PATH": "/here", "NCCL_DEBUG": "INFO", "PET_LOCAL_ADDR": "10.0.0.1", "UNICRON_ETCD_PASSWORD_FILE": "/secret",
        "UNICRON_ETCD_CA": "/here.pem", "PET_ROLE": "r", "UNICRON_NODE_NAME": "node1", PLANNED_JOB: "job",
    }  # fmt: skip


def test_a_child_knows_the_configurations_of_a_job_with_a_workload() -> None:
    workload = Workload(
        global_batch=8, transformer=Transformer(layers=2, hidden=64, heads=4, sequence=32, vocabulary=96)
    )
    job = spec("train.py", max_nodes=2, throughput=Modelled(workload))
    told = child_environment(job, "node1", {}, {CONFIGURATIONS: "of another job"})[CONFIGURATIONS]
    assert parse_configurations(told) == {1: Configuration(replicas=1), 2: Configuration(replicas=2)}


@pytest.mark.parametrize("name", ["UNICRON_CLUSTER", "UNICRON_DETACH", "UNICRON_WEIGHT", "UNICRON_JOB_SPEC"])
def test_a_child_does_not_submit_its_job_again(name: str) -> None:
    found = child_environment(spec("train.py", env={name: "h:1"}), "node1", {}, {name: "h:2"})
    assert name not in found


def test_a_child_is_not_alone_with_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    job = spec("train.py", env={"PET_STANDALONE": "1"})
    found = child_environment(job, "node1", {}, {"PET_STANDALONE": "1", "PET_MAX_RESTARTS": "2"})
    assert "PET_STANDALONE" not in found
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    args = understood(child(*job.command, environ=found))
    assert not args["standalone"]
    assert args["max_restarts"] == 2


# -- a child that runs it ----------------------------------------------------------------------------------------------


def test_a_child_is_seen_to_its_end_and_told_of_signals(tmp_path: Path) -> None:
    ended: queue.SimpleQueue[Child] = queue.SimpleQueue()
    words = [sys.executable, "-c", "import time; open('is-there', 'w').close(); time.sleep(60)"]
    child = Child("what", words, str(tmp_path), dict(os.environ), on_end=ended.put)
    child.signal(9)  # there is none yet
    child.start("", "", "host", lambda _words: None)
    while not (tmp_path / "is-there").exists():
        time.sleep(0.01)
    child.set_output("")
    child.signal(15)
    assert ended.get(timeout=30.0) is child
    assert (child.exit_code, child.why) == (-15, "")
    child.signal(9)  # there is none any more
    assert ended.empty()


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        ("well", ("well", "")),
        ("failed rank 1 raised x.", ("failed", "rank 1 raised x.")),
        ("failed", ("failed", "")),
        ("", ("", "")),
        ("bad luck", ("", "")),
    ],
)
def test_a_child_says_how_its_job_has_ended_and_why(tmp_path: Path, said: str, heard: tuple[str, str]) -> None:
    ended: queue.SimpleQueue[Child] = queue.SimpleQueue()
    words = ["sh", "-c", f'printf "{said}" > "$UNICRON_VERDICT"']
    child = Child("what", words, str(tmp_path), dict(os.environ), on_end=ended.put)
    child.start("", "", "host", lambda _words: None)
    assert ended.get(timeout=30.0) is child
    assert (child.verdict, child.why_failed) == heard


def test_a_child_whose_output_cannot_be_read_is_not_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_values: object, **_named: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(children, "OutputSender", fails)
    started: list[int] = []
    popen = subprocess.Popen

    def noted(*values: Any, **named: Any) -> Any:
        process = popen(*values, **named)
        started.append(process.pid)
        return process

    monkeypatch.setattr(children.subprocess, "Popen", noted)
    child = Child("what", ["sleep", "60"], str(tmp_path), dict(os.environ), on_end=lambda _child: None)
    with pytest.raises(OSError, match="Too many"):
        child.start("", "", "host", lambda _words: None)
    assert not os.path.exists(f"/proc/{started[0]}")


@pytest.mark.parametrize(("words", "folder"), [(["/nowhere/program"], "/"), ([sys.executable], "/nowhere")])
def test_a_child_that_cannot_be_started_says_so(words: list[str], folder: str) -> None:
    child = Child("what", words, folder, dict(os.environ), on_end=lambda _child: None)
    with pytest.raises(OSError):
        child.start("", "", "host", lambda _words: None)


@pytest.mark.parametrize(
    ("phase", "submission", "start", "left_s", "may"),
    [
        (JobPhase.SUBMITTED, 3, 8, 1e6, True),  # it waits, however long
        (JobPhase.SUBMITTED, 9, 8, 1.0, False),  # it is another one of its name
        (JobPhase.RUNNING, 3, 8, 1.0, True),  # a launcher was killed here: the others may be next
        (JobPhase.RUNNING, 3, 8, 1e6, False),
        (JobPhase.RUNNING, 3, 12, 1.0, False),  # it has started elsewhere
        (JobPhase.FINISHED, 3, 8, 1.0, False),
        (JobPhase.CANCELLED, 3, 8, 1.0, False),
    ],
)
def test_the_state_of_a_job_is_kept_as_long_as_it_may_come_back_for_it(
    phase: JobPhase, submission: int, start: int, left_s: float, may: bool
) -> None:
    record = PhaseRecord(phase=phase, reason="", start=start, submission=submission)
    assert may_come_back(record, 3, 8, left_s) is may
