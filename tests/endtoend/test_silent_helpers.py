"""A helper of the agent that somebody has stopped costs seconds: no death goes unseen, no job ends for it."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

pytestmark = pytest.mark.trains

TRAIN = """
import os, time
import torch
import unicron_elastic

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
os.write(1, f"UP {os.environ['RANK']} {os.getpid()}\\n".encode())
run = unicron_elastic.Run(model=model, optimizer=optimizer)
for step in run.steps(total=5000, micro_batches=4):
    for _ in step:
        time.sleep(0.01)
        step.backward(model(torch.ones(4, 8)).square().mean())
    optimizer.step()
    os.write(1, f"STEP {step.number}\\n".encode())
"""


@pytest.mark.parametrize("helper", ["unicron-warm", "unicron-keeper"])
def test_a_rank_is_replaced_although_a_helper_was_stopped(launcher: Any, helper: str) -> None:
    run = launcher.start("--nproc-per-node=2", "--max-restarts=3", launcher.script("train.py", TRAIN), fast=False)
    pids = dict(line.split() for line in run.until_line(r"^UP (\d+ \d+)$", 2))
    run.until_line(r"^STEP 3$")
    os.kill(run.named(helper), signal.SIGSTOP)
    os.kill(int(pids["1"]), signal.SIGKILL)
    begun = time.monotonic()
    run.until_line(r"^UP (\d+ \d+)$", 3)
    steps = len(run.until_line(r"^STEP "))
    run.until_line(r"^STEP ", steps + 10)
    assert time.monotonic() - begun < 20.0
    assert "rank 1 was killed by signal 9 (SIGKILL)" in run.err
    assert "Restart 1 of 3" in run.err
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 1
    run.assert_gone()
