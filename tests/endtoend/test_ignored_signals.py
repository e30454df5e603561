"""What was ignored when the launcher started (``nohup``) does not end the job, unless it is named."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from conftest import NODE

HANGUP = "trap '' HUP; exec \"$@\""


def ignored_by(pid: int) -> set[int]:
    """The signals that a process ignores, as the kernel says it."""
    (mask,) = [int(line.split()[1], 16) for line in _status(pid) if line.startswith("SigIgn")]
    return {number for number in signal.valid_signals() if mask >> (number - 1) & 1}


def _status(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/status").read_text().splitlines()


@pytest.mark.parametrize("warm", ["on", pytest.param("off", marks=pytest.mark.slow)])
def test_a_job_outlives_what_its_launcher_was_told_to_ignore(launcher: Any, warm: str) -> None:
    script = launcher.script("node.py", NODE)
    wrap = "trap '' HUP INT QUIT; exec \"$@\""
    options = ("--nproc-per-node=2", "--max-restarts=1", f"--unicron-warm={warm}")
    run = launcher.start(*options, script, wrap=wrap)
    for count in range(2):
        pids = [int(pid) for pid in run.until_line(rf"^GENERATION {count} of 2 rank \d pid (\d+)", 2)]
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
            run.process.send_signal(number)
            assert number in ignored_by(run.process.pid)
            assert not any(number in ignored_by(pid) for pid in pids)  # as under torchrun, which handles it
        if count == 0:
            os.kill(pids[1], signal.SIGKILL)
    (launcher.folder / "stop").touch()
    assert run.wait() == 0, run.err
    assert "signal" not in run.out


def test_a_job_of_functions_outlives_it_too(launcher: Any) -> None:
    run = launcher.start("--nproc-per-node=1", "--run-path", launcher.script("node.py", NODE), wrap=HANGUP)
    run.until_line("^GENERATION 0")
    run.until(lambda: signal.SIGHUP in ignored_by(run.process.pid), "SIGHUP is ignored")
    run.process.send_signal(signal.SIGHUP)
    (launcher.folder / "stop").touch()
    assert run.wait() == 0, run.err


def test_it_still_ends_by_the_other_signals(launcher: Any) -> None:
    run = launcher.start("--nproc-per-node=1", launcher.script("node.py", NODE), wrap=HANGUP)
    run.until_line("^GENERATION 0")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 1


@pytest.mark.parametrize(
    ("options", "env"),
    [
        (["--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT"], {}),  # all that are handled anyway
        pytest.param([], {"PET_SIGNALS_TO_HANDLE": "SIGHUP"}, marks=pytest.mark.slow),
    ],
    ids=["option", "variable"],
)
def test_a_signal_that_is_named_ends_the_job(launcher: Any, options: list[str], env: dict[str, str]) -> None:
    script = launcher.script("node.py", NODE)
    run = launcher.start("--nproc-per-node=1", *options, script, wrap=HANGUP, env=env)
    run.until_line("^GENERATION 0")
    run.process.send_signal(signal.SIGHUP)
    assert run.wait() == 1
    assert "SIGHUP" in run.err
