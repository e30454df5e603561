"""What micro-batches draw goes by the seeds that the script has set on rank 0, whoever computes them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.trains

SCRIPT = """
import os, random, signal, sys, time
from pathlib import Path
import numpy, torch, unicron_elastic
torch.set_num_threads(1)
rank = int(os.environ.get("RANK", 0))
torch.manual_seed(100 + rank)
random.seed(200 + rank)
numpy.random.seed(300 + rank)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = unicron_elastic.Run(model=model, optimizer=optimizer)
struck = Path(os.environ["PROBE"], "struck")
for step in run.steps(4, 4):
    for index in step:
        drawn = [float(torch.rand(())), random.random(), float(numpy.random.rand())]
        os.write(1, f"DRAWN {step.number} {index} {drawn}\\n".encode())
        if step.number == 2 and rank == 0 and len(sys.argv) > 1 and not struck.exists():
            struck.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        step.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
"""


def drawn(out: str) -> dict[tuple[str, str], set[str]]:
    """Return what was drawn for each micro-batch, by whomever."""
    found: dict[tuple[str, str], set[str]] = {}
    for step, index, numbers in re.findall(r"^DRAWN (\d+) (\d+) (.*)$", out, re.MULTILINE):
        found.setdefault((step, index), set()).add(numbers)
    return found


def test_all_ranks_and_replacements_draw_by_the_seeds_of_rank_0(launcher: Any, short: dict[str, str]) -> None:
    script = launcher.script("train.py", SCRIPT)
    job = launcher.run(
        "--standalone", "--nproc-per-node=2", "--max-restarts=2", script, "struck", fast=False, env=short
    )
    assert job.process.returncode == 0, job.out + job.err
    assert "1 rank goes on from the failed step." in job.err
    environ = {**os.environ, "PROBE": str(launcher.folder)}
    alone = subprocess.run(
        [sys.executable, str(launcher.folder / script)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found = drawn(job.out)
    assert found == drawn(alone.stdout)
    assert len(found) == len({each for numbers in found.values() for each in numbers}) == 16
