"""Two agents of one job on this machine, and workers that hang on one of them: both say which, and why."""

from __future__ import annotations

import os
import re
import signal
import socket
import textwrap
from typing import Any

import pytest

pytestmark = pytest.mark.trains

STEPS = textwrap.dedent(
    """
    import os, time
    import torch, torch.distributed as dist
    environ = os.environ
    rank, restarts = int(environ["RANK"]), int(environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("gloo")
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    node = "first" if environ["GROUP_RANK"] == "0" else "second"
    os.write(1, f"GENERATION {restarts} rank {rank} pid {os.getpid()} {node}\\n".encode())

    def evaluate(seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass

    for step in range(1, 61 if restarts else 10**6):
        if not restarts and rank == 3 and step >= 50 and environ["FAULT"] == "sleep":
            time.sleep(10**6)
        if step == 50 and rank == 3 and environ["FAULT"] == "evaluation":
            evaluate(3.0)
        if step == 120 and environ["FAULT"] == "evaluation":
            break
        dist.all_reduce(torch.ones(4))
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 50:
            os.write(1, f"STEADY {rank}\\n".encode())
        time.sleep(0.025)
    os.write(1, f"DONE {restarts} {rank}\\n".encode())
    dist.destroy_process_group()
    """
)


@pytest.fixture
def start(launcher: Any) -> Any:
    """Starts both agents; the port is free now."""

    def start(fault: str, *options: str) -> list[Any]:
        launcher.script("steps.py", STEPS)
        with socket.create_server(("localhost", 0)) as server:
            port = server.getsockname()[1]
        meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=job"]
        own = ["--nnodes=2", "--nproc-per-node=2", "--max-restarts=2", "--unicron-health=off", *meeting, *options]
        return [launcher.start(*own, "steps.py", fast=False, env={"FAULT": fault}) for _ in range(2)]

    return start


def in_order(runs: list[Any]) -> list[Any]:
    """The agents by their rank in the job, which is who came first."""
    found = {run.until_line(r"^GENERATION 0 rank \d pid \d+ (\w+)", count=2)[0]: run for run in runs}
    return [found["first"], found["second"]]


def done(runs: list[Any]) -> list[str]:
    return sorted(line for run in runs for line in run.out.splitlines() if line.startswith("DONE"))


RESTARTED = [f"DONE 1 {rank}" for rank in range(4)]


@pytest.mark.slow
def test_a_stopped_worker_is_named_on_the_other_node_as_well(start: Any) -> None:
    runs = start("none")
    first, second = in_order(runs)
    for run in runs:
        run.until_line(r"^STEADY", count=2)
    (pid,) = second.until_line(r"^GENERATION 0 rank 3 pid (\d+)")
    os.kill(int(pid), signal.SIGSTOP)
    named = r"rank 3 (hangs|on \S+: no step for).* stopped by a signal, it is not at work"
    first.until(lambda: re.search(named, first.err), "the name of the rank")
    assert [run.wait() for run in runs] == [0, 0]
    assert done(runs) == RESTARTED
    assert re.search(r"rank 3 hangs: no step for .* stopped by a signal", second.err)


def test_who_does_not_come_to_a_collective_is_named_by_both(start: Any) -> None:
    runs = start("sleep", "--unicron-hang-patience=0.3")
    first, second = in_order(runs)
    why = r"; at collective (\d+) while others are at (\d+) of process group 0 \(all_reduce\)"
    mine = second.until(lambda: re.search(rf"rank 3 hangs: no step for .*{why}", second.err), "the hang")
    theirs = first.until(
        lambda: re.search(rf"ranks 0 and 1 wait for rank 3 on \S+: no step for .*{why}", first.err), "the hang there"
    )
    assert mine.groups() == theirs.groups()
    assert [run.wait() for run in runs] == [0, 0]
    assert done(runs) == RESTARTED
    assert first.err.count("wait for rank 3") == 1


@pytest.mark.slow
def test_a_long_evaluation_on_one_node_is_no_hang_to_the_other(start: Any) -> None:
    runs = start("evaluation", "--unicron-hang-patience=0.3")
    assert [run.wait() for run in runs] == [0, 0]
    assert done(runs) == [f"DONE 0 {rank}" for rank in range(4)]
    for run in runs:
        assert "hangs" not in run.err
        assert " for rank" not in run.err
        assert not [line for line in run.err.splitlines() if "[unicron]" in line and "wait" in line]
