"""A worker that is killed each time that it is started is not started without limit, and the others train meanwhile."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

pytestmark = pytest.mark.trains

SCRIPT = """
import os, signal, time
import torch
import unicron_elastic

os.write(1, f"STARTED {os.environ['RANK']}\\n".encode())
if "UNICRON_TAKES_PLACE" in os.environ:
    os.kill(os.getpid(), signal.SIGKILL)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = unicron_elastic.Run(model=model, optimizer=optimizer)
for step in run.steps(total=10**6, micro_batches=4):
    for index in step:
        step.backward(model(torch.full((1, 2), float(index))).sum())
        time.sleep(0.005)
    optimizer.step()
    os.write(1, f"STEP {step.number}\\n".encode())
    if os.environ["RANK"] == "1" and step.number == 20:
        os.kill(os.getpid(), signal.SIGKILL)
"""
WATCHED_S = 15.0


def test_it_comes_later_each_time(launcher: Any) -> None:
    run = launcher.start(
        "--standalone", "--nproc-per-node=2", "--max-restarts=1000", launcher.script("train.py", SCRIPT), fast=False
    )
    run.until(lambda: "was killed by signal 9" in run.err, "the first kill")
    time.sleep(WATCHED_S)
    started = run.out.count("STARTED 1")
    assert 5 <= started <= 9, run.err  # at 0, 0, 0, 0, 0, 1, 3, 7 and 15 s, and each takes a while
    assert re.search(r"rank 1 restarts in \d+ s, after \d starts within 60 s\.", run.err)
    assert run.out.count("STARTED 0") == 1
    steps = [int(number) for number in re.findall(r"^STEP (\d+)$", run.out, re.MULTILINE)]
    assert max(steps) > 25
    run.process.terminate()
    run.wait()
