"""A rank that leaves out one reduction of gradients: nothing hangs, and yet nothing is right any more."""

from __future__ import annotations

import json
from typing import Any

TRAIN = """
import contextlib, os, time
import torch, torch.distributed as dist
import torch.distributed.nn
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
is_first, rank = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0", dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(1, 100000 if is_first else 20):
    time.sleep(0.01)
    with model.no_sync() if is_first and rank == 1 and step == 100 else contextlib.nullcontext():
        loss = model(torch.ones(8, 64)).sum()
    loss.backward()
    optimizer.step()
del model
dist.destroy_process_group()
os.write(1, b"DONE\\n")
"""


def test_it_is_named_and_the_job_starts_again(launcher: Any) -> None:
    launcher.script("train.py", TRAIN)
    ledger = launcher.folder / "incidents.jsonl"
    run = launcher.start(
        "--nproc-per-node=2", "--max-restarts=1", "--unicron-ledger", str(ledger), "train.py", fast=False
    )
    assert run.wait() == 0, run.err
    assert run.out.count("DONE") == 2
    records = [json.loads(line) for line in ledger.read_text().splitlines()]
    assert {record["number"] for record in records} == {1}
    last = records[-1]
    assert (last["rank"], last["status"], last["action"]) == (1, "other software error", "restart")
    assert last["reason"].startswith("rank 1 left out an all_reduce of the group of all ranks in step 100: ")
