"""Closed streams, terminals and mistaken command lines."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import termios
from collections.abc import Callable
from typing import Any

import pytest
import torch

STREAMS = """
import os
def link(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""
links = "\\n".join(link(fd).split(":")[0] for fd in (0, 1, 2))
with open(os.environ["PROBE"] + "/links", "w") as file:
    file.write(links)
"""


@pytest.mark.parametrize(
    "closed", [*(pytest.param(one, marks=pytest.mark.slow) for one in ("<&-", ">&-", "2>&-")), "<&- >&- 2>&-"]
)
def test_closed_stream_is_closed_in_the_worker_too(launcher: Any, closed: str) -> None:
    launcher.script("streams.py", STREAMS)
    run = launcher.run("--nproc-per-node=1", "streams.py", wrap=f'exec "$@" {closed}')
    assert run.process.returncode == 0, run.err
    links = (launcher.folder / "links").read_text().split("\n")
    for fd, mark in enumerate(("<&-", ">&-", "2>&-")):
        assert (links[fd] == "") == (mark in closed.split()), links


def test_reader_that_leaves_does_not_hang_or_trace(launcher: Any, reader: Callable[..., bytes]) -> None:
    launcher.script("spam.py", "while True:\n    print('line', flush=True)\n")
    read_end, write_end = os.pipe()
    try:
        run = launcher.start("--nproc-per-node=2", "spam.py", stdout=write_end)
        os.close(write_end)
        reader(read_end, b"line\n")
    finally:
        os.close(read_end)
    assert run.wait() == 1
    assert "BrokenPipeError" in run.err


def test_ctrl_c_on_a_terminal(launcher: Any, reader: Callable[..., bytes]) -> None:
    launcher.script("sleep.py", "import time\nprint('UP', flush=True)\ntime.sleep(600)\n")
    master, slave = pty.openpty()
    try:
        run = launcher.start(
            "--nproc-per-node=1", "sleep.py", stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            wrap='setsid --ctty --wait "$@"',
        )  # fmt: skip
        os.close(slave)
        reader(master, b"UP")
        os.write(master, b"\x03")
        reader(master, b"stopped: ")
        assert run.wait() == 1
    finally:
        os.close(master)


def test_panel_is_taken_away_when_the_agent_is_killed(launcher: Any, reader: Callable[..., bytes]) -> None:
    launcher.script("sleep.py", "import time\nprint('UP', flush=True)\ntime.sleep(600)\n")
    master, slave = pty.openpty()
    try:
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 40, 100, 0, 0))  # tcsetwinsize: from Python 3.11
        run = launcher.start(
            "--nproc-per-node=1", "sleep.py", stdin=slave, stdout=slave, stderr=slave,
            wrap='exec setsid --ctty "$@"', env={"TERM": "xterm"},
        )  # fmt: skip
        os.close(slave)
        reader(master, b"generation 1")
        run.process.kill()
        reader(master, b"\x1b[J")  # the last of what gives the rows back
    finally:
        os.close(master)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["missing.py"], 1, "does not exist"),
        (["--nproc-per-node=0", "good.py"], 1, "--nproc-per-node"),
        (["--nnodes=2:1", "good.py"], 1, "--nnodes"),
        (["--monitor-interval=0", "good.py"], 1, "--monitor-interval"),
        (["--redirects=7", "good.py"], 1, "--redirects"),
        (["--log-dir=good.py", "good.py"], 1, "--log-dir"),
        (["--no-python", "-m", "good"], 1, "exclude"),
        (["--unicron-warm=maybe", "good.py"], 2, "--unicron-warm"),
        (["--no-such-flag", "good.py"], 2, "usage:"),
        ([], 2, "usage:"),
    ],
)
def test_mistake_is_said_without_a_traceback(launcher: Any, arguments: list[str], code: int, said: str) -> None:
    launcher.script("good.py", "raise SystemExit(9)\n")
    run = launcher.run(*arguments)
    assert run.process.returncode == code
    assert said in run.err
    assert "Traceback" not in run.err


def test_each_local_rank_may_have_a_script_of_its_own(launcher: Any) -> None:
    for local in range(2):
        launcher.script(f"work{local}.py", f"import os, sys\nos.write(1, f'{{sys.argv}} of {local}\\n'.encode())\n")
    run = launcher.run("--nproc-per-node=2", "work${local_rank}.py", "$local_rank", "$$")
    assert sorted(run.out.splitlines()) == [f"['work{local}.py', '{local}', '$'] of {local}" for local in range(2)], (
        run.err
    )
    missing = launcher.run("no${local_rank}.py")
    assert "the script 'no0.py' does not exist" in missing.err


def test_hangup_is_handled_without_a_terminal(launcher: Any) -> None:
    launcher.script("sleep.py", "import time\nprint('UP', flush=True)\ntime.sleep(600)\n")
    run = launcher.start("--nproc-per-node=1", "sleep.py", start_new_session=True)
    run.until_line(r"^UP")
    run.process.send_signal(signal.SIGHUP)
    assert run.wait() == 1


def test_logs_stay_in_their_folder_whatever_the_run_is_called(launcher: Any) -> None:
    launcher.script("say.py", "import os\nprint(os.environ['TORCHELASTIC_RUN_ID'])\n")
    flags = ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=../a/b", "--log-dir=logs", "-r1")
    run = launcher.run(*flags, "say.py")
    assert run.process.returncode == 0, run.err
    (log,) = launcher.folder.glob("logs/*/attempt_0/0/stdout.log")
    assert log.read_text() == "../a/b\n"


@pytest.mark.parametrize("more", [(), ("--standalone",)], ids=["plain", "standalone"])
def test_a_job_of_one_node_is_called_as_its_user_calls_it(launcher: Any, more: tuple[str, ...]) -> None:
    script = launcher.script("name.py", "import os; print(os.environ['TORCHELASTIC_RUN_ID'])\n")
    assert launcher.run("--rdzv-id=chat", *more, script).out == "chat\n"
    has_own = more or torch.__version__ >= "2.12"
    own = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}" if has_own else "none"
    assert re.fullmatch(rf"{own}\n", launcher.run(*more, script).out)


def test_a_node_name_that_cannot_be_kept_is_one_sentence(launcher: Any) -> None:
    launcher.script("say.py", "print('up')\n")
    run = launcher.run("say.py", env={**os.environ, "UNICRON_NODE_NAME": "x" * 5000})
    assert run.process.returncode in (1, 2)
    assert run.err.count("\n") == 1, run.err
    assert "give a name of at most" in run.err
