"""A script that counts optimizer steps and has a snapshot behind each batch goes on from the first of each number."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.trains

# Of the two groups' learning rate torch makes one tensor.
SCRIPT = """
import os, signal, sys, torch, torch.distributed as dist, unicron_elastic
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
parallel = DistributedDataParallel(model)
groups = [{"params": each.parameters()} for each in model]
optimizer = torch.optim.AdamW(groups, lr=torch.tensor(0.05))
run = unicron_elastic.Run(model=parallel, optimizer=optimizer)
step = run.restore()
for batch in range(3 * step, 24):
    if f"{dist.get_rank()}:{batch}:{os.environ['TORCHELASTIC_RESTART_COUNT']}" in sys.argv:
        run._snapshots.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * batch + dist.get_rank()))
    parallel(x).pow(2).mean().backward()
    if batch % 3 == 2:
        optimizer.step()
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"].mul_(0.97)
        step += 1
    run.snapshot(step, every=2)
if dist.get_rank() == 0:
    print("TRAINED", [each.tolist() for each in model.parameters()], optimizer.param_groups[1]["lr"].item(), flush=True)
dist.destroy_process_group()
"""


def trained(launcher: Any, *strikes: str) -> str:
    options = ("--standalone", "--nproc-per-node=2", "--max-restarts=3")
    job = launcher.run(*options, launcher.script("train.py", SCRIPT), *strikes)
    assert job.process.returncode == 0, job.err
    assert f"Restart {len(strikes)} of 3." in job.err if strikes else "Restart" not in job.err
    (found,) = [line for line in job.out.splitlines() if line.startswith("TRAINED")]
    return found


def test_it_comes_to_the_same_bits(launcher: Any) -> None:
    assert trained(launcher, "1:8:0", "0:14:1") == trained(launcher)
