"""A node whose worker fails again and again leaves its job, which goes on without it, and is kept out afterwards."""

from __future__ import annotations

import json
import os
import signal
import socket
from typing import Any

import pytest

NODE = """
import os, time
environ = os.environ
count, size, rank = environ["TORCHELASTIC_RESTART_COUNT"], environ["WORLD_SIZE"], environ["RANK"]
os.write(1, f"GENERATION {count} of {size} rank {rank} pid {os.getpid()}\\n".encode())
while not os.path.exists(os.path.join(environ["PROBE"], "stop")):
    time.sleep(0.02)
"""


@pytest.fixture
def job(launcher: Any) -> list[str]:
    """The command line of each agent; the port is free now."""
    launcher.script("node.py", NODE)
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    return [
        "--nnodes=1:2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}",
        "--rdzv-id=job", "--rdzv-conf=last_call_timeout=1", "--max-restarts=9", "--unicron-isolate-after=2", "node.py",
    ]  # fmt: skip


def _kill_worker(run: Any, count: int) -> None:
    pid = run.until_line(r"^GENERATION \d+ of 2 rank \d pid (\d+)", count)[count - 1]
    os.kill(int(pid), signal.SIGKILL)


def test_failing_node_leaves_and_the_other_goes_on(launcher: Any, job: list[str]) -> None:
    first = launcher.start(*job)  # hosts the rendezvous, as the first to come
    first.until(lambda: _is_up(job), "the rendezvous")
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


def test_host_of_the_rendezvous_stays(launcher: Any, job: list[str]) -> None:
    first = launcher.start(*job)
    first.until(lambda: _is_up(job), "the rendezvous")
    second = launcher.start(*job)
    for time in (1, 2):
        _kill_worker(first, time)
    for run in (first, second):
        run.until_line(r"^GENERATION 2 of 2")
    assert "The node stays: the job's rendezvous is hosted on it." in first.err
    (launcher.folder / "stop").touch()
    assert [run.wait() for run in (first, second)] == [0, 0]


def _is_up(job: list[str]) -> bool:
    port = int(next(each for each in job if "endpoint" in each).rpartition(":")[2])
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", port)) == 0
