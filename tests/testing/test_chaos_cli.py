"""``unicron chaos``: plans in words, and faults from outside in workers that run."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from unicron_elastic.launcher.commands.chaos import app, the_one
from unicron_elastic.testing.chaos_processes import LiveWorker, find_workers, send
from unicron_elastic.worker.pulse import page_name

DEADLINE_S = 30.0
ALONE = LiveWorker(
    run_id="mine", rank=0, local_rank=0, pid=7, state="running", command="train.py", token="a", started_at=1
)
# What a worker is, seen from outside; with a child of its own that carries the same marks.
WORKER = """
import os, signal, sys
if os.fork() == 0:
    signal.pause()
print("ready", flush=True)
signal.pause()
"""
# A forked worker shows the environment of the process it was forked from.
WARM_WORKER = """
import mmap, os, signal, sys
fd = os.memfd_create(sys.argv[1])
os.ftruncate(fd, 4096)
page = mmap.mmap(fd, 4096)
os.close(fd)
print("ready", flush=True)
signal.pause()
"""


class Crowd:
    """Processes that look like the workers of runs."""

    def __init__(self) -> None:
        self.run_id = f"test run/{uuid.uuid4().hex}"
        self._token = f"unicron-{uuid.uuid4().hex}"
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, rank: int, run_id: str | None = None) -> subprocess.Popen[str]:
        run_id = self.run_id if run_id is None else run_id
        env = {"RANK": str(rank), "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": run_id}
        return self._start([WORKER], env)

    def start_warm(self, rank: int) -> subprocess.Popen[str]:
        return self._start([WARM_WORKER, page_name(rank, 1, self.run_id)], {})

    def _start(self, code: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
        env = {**env, "UNICRON_RUN_TOKEN": self._token, "UNICRON_TEST_CROWD": self.run_id}
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", *code], env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    def end(self) -> None:
        for process in self.processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait(DEADLINE_S)
            assert process.stdout is not None
            process.stdout.close()


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    made = Crowd()
    try:
        yield made
    finally:
        made.end()


def _chaos(*arguments: object) -> Any:
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def _until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_plan_is_explained() -> None:
    result = _chaos("check", "kill:rank=1,step=50;mtbf=30")
    assert result.exit_code == 0
    assert result.stdout == (
        "Rank 1 kills itself (SIGKILL) in step 50, as the model's forward call begins, in the first generation only.\n"
        "A random rank does kill at random moments, every 30 s on average (seed 0).\n"
    )


def test_a_plan_in_the_environment_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNICRON_CHAOS", "kill:rank=1,step=50")
    assert "Rank 1 kills itself" in _chaos("check").stdout


@pytest.mark.parametrize("command", [["check"], ["run"]])
def test_a_wrong_plan_is_refused(command: list[str]) -> None:
    result = _chaos(*command, "kill:rank=x", "--", "train.py") if command == ["run"] else _chaos("check", "kill:rank=x")
    assert result.exit_code == 2
    assert result.stderr == (
        "unicron: This plan is not possible: in 'kill:rank=x': rank='x' is not possible; it takes a whole number from "
        "0 on, or all.\n"
    )


def test_a_plan_is_checked_against_the_size_of_the_job() -> None:
    assert _chaos("check", "kill:rank=4", "--world-size=5").exit_code == 0
    result = _chaos("check", "kill:rank=4;kill:rank=1", "--world-size=4")
    assert result.exit_code == 2
    assert result.stderr == "unicron: A job of 4 has no rank 4.\n"


@pytest.mark.parametrize("dashes", [["--"], []])
def test_a_run_gets_the_plan_and_its_own_arguments(monkeypatch: pytest.MonkeyPatch, dashes: list[str]) -> None:
    calls = []
    monkeypatch.setattr(os, "execve", lambda *call: calls.append(call))
    arguments = ["--standalone", "--nproc-per-node=2", "train.py", "--", "--rank=3", "a b"]
    result = _chaos("run", "kill:rank=1", *dashes, *arguments)
    assert result.exit_code == 0
    ((program, argv, env),) = calls
    assert os.path.basename(program) == "unicron-run"
    assert argv[1:] == arguments
    assert env["UNICRON_CHAOS"] == "kill:rank=1"
    assert result.stderr == (
        "UNICRON_CHAOS=kill:rank=1 unicron-run --standalone --nproc-per-node=2 train.py -- --rank=3 'a b'\n"
    )


def test_workers_are_listed_and_what_they_started_is_not(crowd: Crowd) -> None:
    second, first = crowd.start(1), crowd.start(0)
    warm = crowd.start_warm(2)
    _until(lambda: all(_state(process.pid) == "S" for process in crowd.processes))
    result = _chaos("list", "--run-id", crowd.run_id, "--json")
    assert result.exit_code == 0
    assert [
        (worker["rank"], worker["local_rank"], worker["pid"], worker["state"]) for worker in json.loads(result.stdout)
    ] == [(0, 0, first.pid, "sleeping"), (1, 0, second.pid, "sleeping"), (2, 1, warm.pid, "sleeping")]
    table = _chaos("list", "--run-id", crowd.run_id).stdout.splitlines()
    assert re.match(r"run +rank +pid +state +command$", table[0])
    assert [line[len(crowd.run_id) :].split()[:3] for line in table[1:4]] == [
        ["0", str(first.pid), "sleeping"],
        ["1", str(second.pid), "sleeping"],
        ["2", str(warm.pid), "sleeping"],
    ]


def test_a_worker_is_stopped_goes_on_and_is_killed_alone(crowd: Crowd) -> None:
    other, victim = crowd.start(0), crowd.start(1)
    chosen = ["--rank", 1, "--run-id", crowd.run_id]
    result = _chaos("stop", *chosen)
    assert (result.exit_code, result.stdout) == (0, f"Rank 1 of run {crowd.run_id} (pid {victim.pid}) is stopped.\n")
    _until(lambda: _state(victim.pid) == "T")
    assert json.loads(_chaos("list", "--run-id", crowd.run_id, "--json").stdout)[1]["state"] == "stopped"
    assert _chaos("cont", *chosen).exit_code == 0
    _until(lambda: _state(victim.pid) == "S")
    assert _chaos("kill", *chosen).exit_code == 0
    assert victim.wait(DEADLINE_S) == -signal.SIGKILL
    assert other.poll() is None


def test_a_worker_is_asked_to_end(crowd: Crowd) -> None:
    worker = crowd.start_warm(3)
    assert _chaos("term", "--rank", 3, "--run-id", crowd.run_id).exit_code == 0
    assert worker.wait(DEADLINE_S) == -signal.SIGTERM


def test_nothing_is_struck_where_several_runs_are_and_none_is_named(crowd: Crowd) -> None:
    first, second = crowd.start(0), crowd.start(1, "other")
    for rank in (0, 1):  # though each rank is of one run alone
        result = _chaos("kill", "--rank", rank)
        assert result.exit_code == 2
        assert re.match(r"unicron: \d+ runs are on this machine; choose with --run-id: ", result.stderr)
        assert f"{crowd.run_id} (pid {first.pid}: " in result.stderr
        assert f"other (pid {second.pid}: " in result.stderr
    assert (first.poll(), second.poll()) == (None, None)


def test_two_runs_of_one_name_are_told_apart_by_their_workers() -> None:
    with pytest.raises(typer.Exit), contextlib.redirect_stderr(io.StringIO()) as said:
        the_one([replace(ALONE, token="a", pid=7), replace(ALONE, token="b", pid=8)], 0, "mine")
    agents = [replace(ALONE, token="a", rank=0), replace(ALONE, token="b", rank=1)]  # of one run
    assert the_one(agents, 1, None).token == "b"
    assert said.getvalue() == (
        "unicron: Rank 0 is in several runs with this ID; signal one by its pid yourself: "
        "mine (pid 7: train.py); mine (pid 8: train.py).\n"
    )


@pytest.mark.parametrize("answer", ["y", "n"])
@pytest.mark.parametrize("is_named", [False, True])
def test_a_person_is_asked_before_a_run_is_struck_that_is_not_named(answer: str, is_named: bool) -> None:
    answered = False
    code = (
        "import sys\nfrom unicron_elastic.launcher.commands import chaos\n"
        "from unicron_elastic.testing.chaos_processes import LiveWorker\n"
        f"chaos.find_workers = lambda: [{ALONE!r}]\n"
        "chaos.send = lambda worker, number: print('struck', worker.pid)\n"
        "chaos.app(sys.argv[1:])\n"
    )
    named = ["--run-id", "mine"] if is_named else []
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", code, "kill", "--rank", "0", *named])
    said = b""
    with contextlib.suppress(OSError):  # the terminal ends with the command
        while chunk := os.read(terminal, 1000):
            said += chunk
            if b"[y/N]: " in said and not answered:
                answered = bool(os.write(terminal, f"{answer}\n".encode()))
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    is_done = is_named or answer == "y"
    assert (b"Kill rank 0 of run mine (pid 7: train.py)? [y/N]: " in said) == (not is_named)
    assert (b"struck 7" in said) == is_done
    assert os.waitstatus_to_exitcode(status) == (0 if is_done else 1)


def test_who_is_not_there_cannot_be_signalled(crowd: Crowd) -> None:
    crowd.start(0)
    result = _chaos("kill", "--rank", 1, "--run-id", crowd.run_id)
    assert (result.exit_code, result.stderr) == (1, "unicron: No rank 1 runs here; there is rank 0.\n")
    for command in (["kill", "--rank", 1], ["list"]):
        result = _chaos(*command, "--run-id", "no such run")
        assert (result.exit_code, result.stderr) == (1, "unicron: No worker of run no such run runs on this machine.\n")


def test_a_pid_that_has_passed_to_another_process_is_not_signalled(crowd: Crowd) -> None:
    process = crowd.start(0)
    (worker,) = (worker for worker in find_workers() if worker.run_id == crowd.run_id)
    with pytest.raises(ProcessLookupError):
        send(replace(worker, started_at=worker.started_at - 1), signal.SIGKILL)
    assert process.poll() is None


def test_a_real_run_loses_the_worker_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os, signal; os.write(1, b'ready\\n'); signal.pause()")  # of two ranks, whole lines
    run_id = uuid.uuid4().hex
    options = ["--unicron-in-band=off", "--unicron-warm=off", "--nproc-per-node=2", f"--rdzv-id={run_id}"]
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    run = subprocess.Popen(
        [os.path.join(os.path.dirname(sys.executable), "unicron-run"), *options, *rendezvous, str(script)],
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert run.stdout is not None
        assert [run.stdout.readline(), run.stdout.readline()] == ["ready\n", "ready\n"]
        assert _chaos("kill", "--rank", 1, "--run-id", run_id).exit_code == 0
        _, said = run.communicate(timeout=DEADLINE_S)
        assert run.returncode == 1
        assert "rank 1 was killed by signal 9 (SIGKILL)" in said
    finally:
        run.kill()
        run.communicate()
