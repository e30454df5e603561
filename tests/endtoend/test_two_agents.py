"""Two agents of one job on this machine, meeting over c10d."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest


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
