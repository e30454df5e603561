"""Two agents of one job on this machine, meeting over torch's own back ends."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Callable
from typing import Any

import pytest
from conftest import NODE


@pytest.mark.parametrize("nodes", ["2", pytest.param("1:2", marks=pytest.mark.slow)])
def test_killed_worker_restarts_both_with_the_same_count(launcher: Any, node_options: list[str], nodes: str) -> None:
    runs = [launcher.start(f"--nnodes={nodes}", *node_options) for _ in range(2)]
    pids = [run.until_line(r"^GENERATION 0 of 2 rank \d pid (\d+)")[0] for run in runs]
    os.kill(int(pids[1]), signal.SIGKILL)
    for run in runs:
        run.until_line(r"^GENERATION 1 of 2")
    (launcher.folder / "stop").touch()
    assert [run.wait() for run in runs] == [0, 0]


def test_late_joiner_is_taken_in(launcher: Any, node_options: list[str]) -> None:
    first = launcher.start("--nnodes=1:2", *node_options)
    first.until_line(r"^GENERATION 0 of 1")
    second = launcher.start("--nnodes=1:2", *node_options)
    for run in (first, second):
        run.until_line(r"^GENERATION \d of 2")
    (launcher.folder / "stop").touch()
    assert [run.wait() for run in (first, second)] == [0, 0]


@pytest.fixture
def start(launcher: Any) -> Callable[[int], Any]:
    """Starts the agent of one of two nodes that are counted beforehand."""
    launcher.script("node.py", NODE)
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]

    def start(rank: int) -> Any:
        place = ("--nnodes=2", f"--node-rank={rank}", "--master-addr=localhost", f"--master-port={port}")
        return launcher.start(*place, "--nproc-per-node=1", "--max-restarts=3", "node.py")

    return start


@pytest.mark.parametrize("told", [0, 1])
def test_who_tells_the_agent_of_one_node_to_end_ends_the_job(start: Callable[[int], Any], told: int) -> None:
    runs = [start(0), start(1)]
    for run in runs:
        run.until_line(r"^GENERATION 0 of 2")
    runs[told].process.send_signal(signal.SIGTERM)
    assert [run.wait() for run in runs] == [1, 1]
    last = runs[1 - told].err.strip().splitlines()[-1]  # who looks when the store is gone finds no more than that
    why = (
        "The node is gone that has the store|The launcher of node 0 was told to end",
        "The launcher of node 1 was told to end",
    )
    assert re.search(why[told], last)


def test_nodes_that_are_counted_beforehand_start_their_workers_again_together(
    launcher: Any, start: Callable[[int], Any]
) -> None:
    """torch's static rendezvous waits for nobody but the first time, and its store has what is of the dead."""
    runs = [start(0), start(1)]
    pids = [run.until_line(r"^GENERATION 0 of 2 rank \d pid (\d+)")[0] for run in runs]
    os.kill(int(pids[1]), signal.SIGKILL)
    for run in runs:
        run.until_line(r"^GENERATION 1 of 2")
    assert "rank 1 was killed by signal 9" in runs[0].err
    runs[1].process.kill()
    runs[1] = start(1)
    for run in runs:
        run.until_line(r"^GENERATION [12] of 2 rank \d pid \d+", 2 if run is runs[0] else 1)
    (launcher.folder / "stop").touch()
    assert [run.wait() for run in runs] == [0, 0]
