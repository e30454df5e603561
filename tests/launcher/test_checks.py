"""Values that cannot start a job are refused in one sentence; what torchrun takes is taken."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from torch.distributed.elastic import rendezvous

from unicron_elastic.launcher import plugin
from unicron_elastic.launcher.config.arguments import get_args_parser
from unicron_elastic.launcher.config.checks import CONF_OF_ETCD, BadArgument, check, odd_conf
from unicron_elastic.rendezvous.torch import create_handler


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a script and a program."""
    (tmp_path / "train.py").touch()
    (tmp_path / "plain").touch()
    program = tmp_path / "train.sh"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _check(*line: str) -> None:
    parser = get_args_parser()
    if "--shutdown-timeout" in " ".join(line) and "--shutdown-timeout" not in parser.format_usage():
        pytest.skip("torch 2.11 has no --shutdown-timeout")
    check(parser.parse_args(line), warn=pytest.fail)


@pytest.mark.parametrize(
    "line",
    [
        "train.py",
        "--nnodes=1 --nproc-per-node=4 train.py",
        "--nnodes=1:4 --nproc-per-node=auto --max-restarts=3 train.py",
        "--nproc-per-node=gpu train.py",
        "--nproc-per-node=cpu train.py",
        "--nproc-per-node=xpu train.py",
        "--monitor-interval=0.01 --shutdown-timeout=0 train.py",
        "--redirects=3 --tee=0:1,1:3 train.py",
        "--local-ranks-filter=0,1 train.py",
        "--signals-to-handle=SIGTERM,SIGUSR1 train.py",
        "--rdzv-conf=timeout=5,last_call_timeout=1 train.py",
        "--rdzv-conf=key=a=b train.py",
        "--log-dir=logs/new/deep train.py",
        "--log-dir=/dev/null train.py",
        "-m package.train",
        "--no-python ./train.sh",
        "--no-python sh",
    ],
)
@pytest.mark.usefixtures("folder")
def test_what_can_start_passes(line: str) -> None:
    _check(*line.split())


@pytest.mark.parametrize(
    ("flag", "value", "remedy"),
    [
        ("--nnodes", "0", "N or MIN:MAX with 0 < MIN <= MAX"),
        ("--nnodes", "3:2", "N or MIN:MAX with 0 < MIN <= MAX"),
        ("--nnodes", "1:2:3", "N or MIN:MAX with 0 < MIN <= MAX"),
        ("--nnodes", "two", "N or MIN:MAX with 0 < MIN <= MAX"),
        ("--nproc-per-node", "0", "a number above 0, auto, cpu or gpu"),
        ("--nproc-per-node", "-2", "a number above 0, auto, cpu or gpu"),
        ("--nproc-per-node", "2.5", "a number above 0, auto, cpu or gpu"),
        ("--monitor-interval", "0.0", "a number of seconds above 0"),
        ("--shutdown-timeout", "-1", "a whole number of seconds, 0 or more"),
        ("--redirects", "4", "0, 1, 2 or 3"),
        ("--redirects", "0:4", "0, 1, 2 or 3"),
        ("--tee", "all", "0, 1, 2 or 3"),
        ("--local-ranks-filter", "0;1", "a comma-separated list of local ranks"),
        ("--rdzv-conf", "timeout", "'timeout' is none"),
        ("--log-dir", "train.py/logs", "'train.py' is a file"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_a_bad_value_is_named_with_its_option_and_remedy(flag: str, value: str, remedy: str) -> None:
    with pytest.raises(BadArgument) as caught:
        _check(f"{flag}={value}", "train.py")
    text = str(caught.value)
    assert text.startswith(f"{flag}: ")
    assert value in text
    assert remedy in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("nowhere.py", "the script 'nowhere.py' does not exist (looked in {folder})"),
        ("--no-python ./nowhere", "the program './nowhere' does not exist"),
        ("--no-python ./plain", "the program './plain' is not executable"),
        ("--no-python -m train.py", "--no-python and --module exclude one another"),
    ],
)
def test_a_script_that_cannot_run_is_named(folder: Path, line: str, words: str) -> None:
    with pytest.raises(BadArgument) as caught:
        _check(*line.split())
    assert words.format(folder=folder) in str(caught.value)


@pytest.mark.usefixtures("folder")
def test_an_unknown_signal_is_left_out_as_torchrun_leaves_it_out() -> None:
    args = get_args_parser().parse_args(["--signals-to-handle=SIGTERM, SIGNONE ,SIGUSR1", "train.py"])
    said: list[str] = []
    check(args, warn=said.append)
    assert args.signals_to_handle == "SIGTERM,SIGUSR1"
    assert said == ["--signals-to-handle: 'SIGNONE' is no signal of this system and is left out"]


@pytest.mark.usefixtures("folder")
def test_a_job_goes_on_without_any_signal_that_it_could_handle_as_under_torchrun() -> None:
    said: list[str] = []
    args = get_args_parser().parse_args(["--signals-to-handle=SIG_IGN", "train.py"])
    check(args, warn=said.append)
    assert args.signals_to_handle == "SIG_IGN"
    assert said == ["--signals-to-handle: 'SIG_IGN' is no signal of this system and is left out"]


@pytest.mark.usefixtures("folder")
def test_a_wrong_wish_to_go_on_in_place_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNICRON_IN_PLACE", "yes")
    with pytest.raises(BadArgument, match=r"^UNICRON_IN_PLACE must be unset, or force, not 'yes'$"):
        _check("train.py")


@pytest.mark.parametrize(
    ("backend", "conf", "told"),
    [
        ("unicron", "last_call_timout=5", ["has no effect; perhaps last_call_timeout is meant"]),
        ("unicron", "lable=r7,target_node=3,target_nodes=2", ["perhaps label is", "perhaps target_nodes is"]),
        ("unicron", "wanted=3", ["'wanted' is no setting of unicron, and has no effect"]),
        ("unicron", "etcd_usr=ada", ["perhaps etcd_user is meant"]),
        ("c10d", "keep_alive_intervall=5", ["perhaps keep_alive_interval is meant"]),
        ("c10d", "wanted=3", []),
        ("c10d", "target_nodes=3", []),  # of ours: as a script has it that is run in both ways
        ("unicron", "keep_alive_interval=5,is_host=1,store_type=tcp,timeout=9,read_timeout=60", []),
        ("unicron", "last_call_timout=5,start=3", []),  # a part of a planned job: it was told where that was submitted
        ("somebodys", "last_call_timout=5", []),
        ("unicron", "agent=torch", ["agent=torch has no effect under unicron-run, whose agent is its own; it is"]),
        ("c10d", "agent=torch", ["agent=torch has no effect under unicron-run"]),
        ("unicron", "agent=unicron", []),
        ("static", "", []),
    ],
)  # fmt: skip
def test_mistyped_keys_of_the_rendezvous_are_told(backend: str, conf: str, told: list[str]) -> None:
    said = list(odd_conf(backend, conf))
    assert len(said) == len(told), said
    assert all(part in sentence for part, sentence in zip(told, said, strict=True))


def test_keys_that_torch_reads_are_never_told() -> None:
    folder = Path(rendezvous.__file__).parent
    source = "".join(path.read_text() for path in folder.glob("*.py"))
    keys = re.findall(r'(?:config|params)\.get(?:_as_\w+)?\(\s*"(\w+)"', source)
    keys += [f"{name}_timeout" for name in re.findall(r'_get_timeout\(params, "(\w+)"\)', source)]
    assert {"keep_alive_interval", "join_timeout", "rank"} <= {*keys}
    for backend in ("unicron", "c10d", "static"):
        assert list(odd_conf(backend, ",".join(f"{key}=1" for key in keys))) == []


def test_our_keys_are_those_that_are_read() -> None:
    source = inspect.getsource(create_handler) + inspect.getsource(plugin)
    read = set(
        re.findall(r'(?:_seconds\(parameters|_number\(parameters|parameters\.get\(str\(|\.get)[(, ]*"(\w+)"', source)
    )
    assert read == CONF_OF_ETCD
