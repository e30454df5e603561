"""A rank that is lost takes along what it has started: its data loader's processes and whatever else."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

GONE_WITHIN_S = 5.0  # data loaders' processes notice by themselves after as long, if they are not waiting to be read

TRAIN = """
import os, subprocess, sys, time
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
import unicron_elastic

dist.init_process_group("gloo") if sys.argv[1] == "plain" else None
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
others = [subprocess.Popen(["sleep", "600"]), subprocess.Popen(["sleep", "600"], start_new_session=True)]
loader = DataLoader(torch.randn(100_000, 8), batch_size=4, num_workers=2)
batches = iter(loader)
pids = [each.pid for each in (*others, *batches._workers)]
os.write(1, f"UP {os.environ['RANK']} {os.getpid()} {' '.join(map(str, pids))}\\n".encode())


def loss():
    time.sleep(0.01)
    return model(next(batches)).square().mean()


if sys.argv[1] == "plain":
    for number in range(5000):
        loss().backward()
        dist.all_reduce(model.weight.grad)
        optimizer.step()
        optimizer.zero_grad()
        os.write(1, f"STEP {number}\\n".encode())
else:
    run = unicron_elastic.Run(model=model, optimizer=optimizer)
    for step in run.steps(total=5000, micro_batches=4):
        for _ in step:
            step.backward(loss())
        optimizer.step()
        os.write(1, f"STEP {step.number}\\n".encode())
"""


def _ups(run: Any, count: int) -> dict[tuple[int, int], list[int]]:
    """{(rank, pid): pids of its helpers}, once ``count`` workers have begun."""
    lines = run.until_line(r"^UP (\d+ \d+ [\d ]+)$", count)
    numbers = [[int(word) for word in line.split()] for line in lines]
    return {(rank, pid): helpers for rank, pid, *helpers in numbers}


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("how", "number"),
    [
        ("in place", signal.SIGKILL),
        ("plain", signal.SIGSEGV),
        pytest.param("in place", signal.SIGSEGV, marks=pytest.mark.slow),
        pytest.param("plain", signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_helpers_of_a_lost_rank_are_gone_within_seconds(
    launcher: Any, tmp_path_factory: pytest.TempPathFactory, how: str, number: signal.Signals
) -> None:
    script = launcher.script("train.py", TRAIN)
    short = {"TMPDIR": str(tmp_path_factory.mktemp("t"))}  # data loaders put sockets there, whose paths are limited
    run = launcher.start("--nproc-per-node=2", "--max-restarts=2", script, how[:5], fast=False, env=short)
    first = _ups(run, 2)
    run.until_line(r"^STEP 3$")
    (lost,) = (pid for rank, pid in first if rank == 1)
    os.kill(lost, number)
    begun = time.monotonic()
    ended = [pid for (rank, _), helpers in first.items() if rank == 1 or how == "plain" for pid in helpers]
    others = [pid for helpers in first.values() for pid in helpers if pid not in ended]
    run.until(lambda: not any(map(_lives, ended)), "the lost rank's helpers end")
    assert time.monotonic() - begun < GONE_WITHIN_S
    now = _ups(run, 3 if how == "in place" else 4)
    steps = len(run.until_line(r"^STEP "))
    run.until_line(r"^STEP ", steps + 10)  # they train on
    assert all(map(_lives, others))
    assert all(_lives(pid) for who in now.keys() - first.keys() for pid in now[who])
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 1
