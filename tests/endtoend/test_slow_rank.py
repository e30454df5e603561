"""A rank that is slow without using a CPU more, as one that waits for its device."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytestmark = pytest.mark.trains

SLOW = """
import os, time
import torch, torch.distributed as dist
import torch.distributed.nn
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step = 0
while True:
    step += 1
    # Steps so long that a loaded machine's noise is little of them. Now and again, as one time may pass for noise yet;
    # seldom, or it would be what is usual.
    time.sleep(0.18 if rank == 1 and step % 80 > 50 else 0.1)
    loss = model(torch.ones(8, 64)).sum()
    loss.backward()
    optimizer.step()
    told = torch.tensor([float(os.path.exists(os.path.join(os.environ["PROBE"], "enough")))])
    dist.all_reduce(told)
    if told.item():
        break
del model
dist.destroy_process_group()
"""


def test_it_is_named_by_its_lateness(launcher: Any) -> None:
    launcher.script("slow.py", SLOW)
    run = launcher.start("--nproc-per-node=2", "slow.py", fast=False)
    said = r"rank 1 holds the job up: steps take .* the usual .*; it begins collectives \d+(\.\d+)? ms later than usual"
    run.until(lambda: re.search(said, run.err), "the slow rank's name")
    (launcher.folder / "enough").touch()
    assert run.wait() == 0, run.err
