"""What of a node's variables a training script does not get."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

from unicron_elastic.launcher.agent.process.runtime import Runtime
from unicron_elastic.launcher.agent.process.workers import WorkersContext
from unicron_elastic.launcher.config import forwarded as kept_back
from unicron_elastic.launcher.config import forwarded as lending
from unicron_elastic.launcher.config.options import Options
from unicron_elastic.launcher.node.spare import Claim, Spare
from unicron_elastic.rendezvous.records.cluster import UnplannedJobSpec
from unicron_elastic.worker.process.mark import MARK

SECRETS = {
    "UNICRON_ETCD_PASSWORD": "hunter2",
    "UNICRON_ETCD_PASSWORD_FILE": "/keys/password",
    "UNICRON_ETCD_USER": "ada",
    "UNICRON_ETCD_KEY": "/keys/etcd.key",
    "UNICRON_ETCD_ENDPOINT": "etcd:2379",
    "UNICRON_CLUSTER": "etcd:2379",
    "UNICRON_WEB_TOKEN": "t0ken",
    "UNICRON_SOME_SECRET_OF_LATER": "s",
}
THEIRS = {
    "HF_TOKEN": "the script's own",
    "WANDB_API_KEY": "the script's own",
    "PET_RDZV_ENDPOINT": "etcd:2379",  # as under torchrun
    "UNICRON_CHAOS": "",
    MARK: "the keeper finds a process by it",
    "PATH": "/bin",
}


def test_access_to_the_cluster_is_kept_back_and_nothing_else() -> None:
    assert kept_back.for_scripts(SECRETS | THEIRS) == THEIRS


def test_what_is_kept_back_is_there_again_after_the_start_whatever_came_of_it() -> None:
    environ = dict(SECRETS | THEIRS)

    def start() -> None:
        with kept_back.away_from(environ):
            assert environ == THEIRS
            raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        start()
    assert environ == SECRETS | THEIRS


@pytest.fixture
def with_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)


def test_the_password_of_the_store_is_not_put_into_it_even_if_it_is_asked_for() -> None:
    asked_for = {"UNICRON_SPEC_ENV": "UNICRON_ETCD_PASSWORD, DATA", "UNICRON_ETCD_PASSWORD": "hunter2", "DATA": "/data"}
    assert lending.environment(asked_for) == {"UNICRON_SPEC_ENV": "UNICRON_ETCD_PASSWORD, DATA", "DATA": "/data"}
    assert lending.environment({"UNICRON_ETCD_USER": "ada"}) == {}  # whose password does not go along


@pytest.mark.usefixtures("with_secrets")
def test_a_job_does_not_say_where_a_node_goes_with_its_password() -> None:
    own = {"UNICRON_ETCD_ENDPOINT": "elsewhere:2379", "UNICRON_ETCD_USER": "eve", "NCCL_DEBUG": "INFO"}
    numbers = {"nproc_per_node": 1, "min_nodes": 1, "max_nodes": 2, "target_nodes": 2}
    spec = UnplannedJobSpec(**numbers, argv=("train.py",), cwd="/", env=own)
    spare = Spare(None, "n1", "", lambda _sentence: None)  # type: ignore[arg-type]  # no node: nothing is claimed
    env = spare.environment(Claim("job", spec, "key", 0.0))
    assert {name: env[name] for name in own} == {
        "UNICRON_ETCD_ENDPOINT": "etcd:2379", "UNICRON_ETCD_USER": "ada", "NCCL_DEBUG": "INFO"
    }  # fmt: skip


def _environ(pid: int) -> str:
    return Path(f"/proc/{pid}/environ").read_text()


@pytest.mark.usefixtures("with_secrets")
@pytest.mark.parametrize("warm", [False, True], ids=["plain", "warm"])
def test_no_process_in_which_a_script_runs_has_it(*, warm: bool, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os, sys\nsys.stdout.write('\\n'.join(f'{n}={v}' for n, v in os.environ.items()))\n")
    command = [sys.executable, "-u", str(script)]
    runtime, exits = Runtime(Options(preload="colorsys", warm=warm)), list[int]()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    context = WorkersContext(
        runtime=runtime,
        on_exit=lambda _worker, ended: exits.append(ended.exit_code),
        on_message=lambda _worker, _message: None,
        on_ending=lambda _worker: None,
        on_replaced=lambda _worker: None,
        name="trainer",
        entrypoint=command[0],
        args={0: tuple(command[1:])},
        envs={0: {"RANK": "0"}},
        logs_specs=DefaultLogsSpecs(log_dir=str(tmp_path), redirects=Std.ALL),
    )
    try:
        runtime.begin(command if warm else None, os.environ)
        context.start()
        beside = [runtime.processes.keeper_pid, *([runtime.warm.pid or 0] if runtime.warm is not None else [])]
        assert len(beside) == 1 + warm
        assert runtime.loop.run_until(lambda: bool(exits), time.monotonic() + 30.0), "deadline passed"
        assert exits == [0]
        for told in (Path(context.stdouts[0]).read_text(), *map(_environ, beside)):
            assert "PATH=" in told
            assert not [name for name in SECRETS if f"{name}=" in told]
            assert "hunter2" not in told
    finally:
        context.close(signal.SIGKILL)
        runtime.end()
        for number, handler in handlers.items():  # torch puts its own in place of them
            signal.signal(number, handler)
