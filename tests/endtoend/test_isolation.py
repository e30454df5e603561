"""A node whose worker fails again and again leaves its job, which goes on without it, and is kept out afterwards."""

from __future__ import annotations

import json
import os
import signal
import socket
from typing import Any

import pytest


@pytest.fixture
def job(node_options: list[str]) -> list[str]:
    """The command line of each agent."""
    return ["--nnodes=1:2", "--unicron-isolate-after=2", *node_options]


def _kill_worker(run: Any, count: int) -> None:
    pid = run.until_line(r"^GENERATION \d+ of 2 rank \d pid (\d+)", count)[count - 1]
    os.kill(int(pid), signal.SIGKILL)


@pytest.mark.slow
def test_failing_node_leaves_and_the_other_goes_on(launcher: Any, job: list[str]) -> None:
    first = launcher.start(*job)  # hosts the rendezvous, as the first to come
    first.until(lambda: launcher.is_listening(_port(job)), "the rendezvous")
    second = launcher.start(*job)
    for time in (1, 2):
        _kill_worker(second, time)
    assert second.wait() == 1
    assert "Worker 0 has failed 2 times within 60 min. This node leaves the job." in second.err
    first.until_line(r"^GENERATION \d+ of 1 rank 0")
    (launcher.folder / "stop").touch()
    assert first.wait() == 0, first.err
    quarantine = json.loads((launcher.folder / "state" / "unicron" / "quarantine.json").read_text())
    assert [each["node"] for each in quarantine["nodes"]] == [socket.gethostname()]

    third = launcher.run(*job)
    assert third.process.returncode == 1
    assert f"node {socket.gethostname()} is in quarantine since" in third.err
    assert "GENERATION" not in third.out
    alone = launcher.run("--nproc-per-node=1", "node.py")
    assert alone.process.returncode == 0  # nobody could take its place
    assert "is in quarantine since" in alone.err

    observing = launcher.run("--unicron-on-fault=observe", *job)
    assert observing.process.returncode == 0
    assert "is in quarantine since" in observing.err

    lifted = launcher.run("quarantine", "lift", socket.gethostname(), tool="unicron")
    assert lifted.process.returncode == 0, lifted.err
    again = launcher.run(*job)
    assert again.process.returncode == 0, again.err


@pytest.mark.slow
def test_host_of_the_rendezvous_stays(launcher: Any, job: list[str]) -> None:
    first = launcher.start(*job)
    first.until(lambda: launcher.is_listening(_port(job)), "the rendezvous")
    second = launcher.start(*job)
    for time in (1, 2):
        _kill_worker(first, time)
    for run in (first, second):
        run.until_line(r"^GENERATION 2 of 2")
    assert "The node stays: the job's rendezvous is hosted on it." in first.err
    (launcher.folder / "stop").touch()
    assert [run.wait() for run in (first, second)] == [0, 0]


def _port(job: list[str]) -> int:
    return int(next(each for each in job if "endpoint" in each).rpartition(":")[2])
