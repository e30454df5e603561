"""A rank that leaves out one reduction of gradients: nothing hangs, and yet nothing is right any more."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytestmark = pytest.mark.trains

# In the odd one out of the steps, rank 1 does not reduce; or it makes one step more, as of
# an optimizer beside the training, and all is well.
TRAIN = """
import contextlib, os, sys, time
import torch, torch.distributed as dist
import torch.distributed.nn
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
stop = os.path.join(os.environ["PROBE"], "stop")
ends = torch.zeros(1)
step = 0
while not ends.item():
    step += 1
    time.sleep(0.01)
    is_odd = rank == 1 and step == 100
    with model.no_sync() if is_odd and sys.argv[1] == "skip" else contextlib.nullcontext():
        loss = model(torch.ones(8, 64)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if is_odd and sys.argv[1] == "extra":
        optimizer.step()
    ends[0] = os.path.exists(stop) if sys.argv[1] == "extra" else 0.0
    if sys.argv[1] == "extra":
        dist.all_reduce(ends)
    if step == 200:
        os.write(1, b"FAR\\n")
    if sys.argv[1] == "skip" and os.path.exists(stop):
        os._exit(0)
del model
dist.destroy_process_group()
"""


def start(launcher: Any, what: str) -> tuple[Any, Any]:
    launcher.script("train.py", TRAIN)
    ledger = launcher.folder / "incidents.jsonl"
    options = ("--nproc-per-node=2", "--max-restarts=1", "--unicron-ledger", str(ledger))
    return launcher.start(*options, "train.py", what, fast=False), ledger


def test_it_is_named_and_goes_on(launcher: Any) -> None:
    run, ledger = start(launcher, "skip")
    run.until(ledger.exists, "an incident")
    run.until_line("^FAR", count=2)
    (launcher.folder / "stop").touch()
    run.wait()
    record = json.loads(ledger.read_text().splitlines()[0])
    assert (record["rank"], record["step"], record["status"]) == (1, 100, "other software error")
    assert record["action"] == "observe"
    said = "rank 1 seems to have left out an all_reduce of the group of all ranks in step 100: "
    assert record["reason"].startswith(said)
    assert said in run.err


@pytest.mark.slow
def test_a_step_beside_the_training_is_none(launcher: Any) -> None:
    run, ledger = start(launcher, "extra")
    run.until_line("^FAR", count=2)
    (launcher.folder / "stop").touch()
    assert run.wait() == 0, run.err
    assert not ledger.exists(), ledger.read_text()
    assert "left out" not in run.err
