"""torchrun, and whatever else launches by it, with unicron's rendezvous and the agent that comes with it."""

from __future__ import annotations

from typing import Any

import pytest

KILLED_ONCE = """
import os, signal, sys, time
environ = os.environ
rank, count = environ["RANK"], environ["TORCHELASTIC_RESTART_COUNT"]
os.write(1, f"rank {rank} restart {count} of {environ['TORCHELASTIC_RUN_ID']}\\n".encode())
if rank == "1" and count == "0":
    os.kill(os.getpid(), signal.SIGKILL)
if count == "0":
    time.sleep(60)
"""
TOLD = "unicron: this job has unicron's agent, not torchrun's; --rdzv-conf agent=torch gives it torchrun's.\n"
NOBODY = {"UNICRON_PRELOAD": "json"}


def start(launcher: Any, *options: str) -> Any:
    launcher.script("killed_once.py", KILLED_ONCE)
    own = ("--rdzv-backend=unicron", "--rdzv-id=mine", "--nproc-per-node=2", "--max-restarts=1")
    return launcher.run(*own, *options, "killed_once.py", tool="torchrun", env=NOBODY)


def test_torchrun_has_our_agent_by_the_name_of_the_rendezvous_alone(launcher: Any) -> None:
    run = start(launcher)
    assert run.wait() == 0, run.err
    assert run.err.count(TOLD) == 1
    assert "rank 1 was killed by signal 9 (SIGKILL)." in run.err
    assert "Restart 1 of 1." in run.err
    assert "restart 1 of " in run.out


def test_who_wants_torchruns_own_agent_says_so(launcher: Any) -> None:
    run = start(launcher, "--rdzv-conf=agent=torch")
    assert run.wait() == 0, run.err
    assert "unicron" not in run.err
    assert "restart 1 of " in run.out


def test_an_agent_that_there_is_not_is_named(launcher: Any) -> None:
    run = start(launcher, "--rdzv-conf=agent=ours")
    assert run.wait() == 1
    assert run.err.rstrip().endswith("ValueError: --rdzv-conf agent must be unicron or torch, not 'ours'")


@pytest.mark.parametrize("status", [0, 3])
def test_exit_codes_are_torchruns(launcher: Any, status: int) -> None:
    launcher.script("ends.py", f"raise SystemExit({status})")
    run = launcher.run("--rdzv-backend=unicron", "ends.py", tool="torchrun", env=NOBODY)
    assert run.wait() == bool(status)
    assert ("ChildFailedError" in run.err) is bool(status)
