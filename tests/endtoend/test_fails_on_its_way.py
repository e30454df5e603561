"""A replacement that fails before it trains, again and again: it is tried again, and counts as no restart."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.trains

SCRIPT = """
import os, signal, time

folder, rank = os.environ["PROBE"], int(os.environ["RANK"])
tries = os.path.join(folder, f"tries{rank}")
with open(tries, "a") as file:
    file.write("x")
if 1 < os.path.getsize(tries) < 5:
    open("/nowhere/to/be/found")

import torch, unicron_elastic
from torch import nn

torch.set_num_threads(1)
model = nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run = unicron_elastic.Run(model=model, optimizer=optimizer)
for step in run.steps(total=10, micro_batches=2):
    for index in step:
        if (rank, step.number) == (1, 3) and os.path.getsize(tries) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while step.number == 6 and not os.path.exists(os.path.join(folder, "go")):
            time.sleep(0.01)
        step.backward(model(torch.ones(1, 2)).pow(2).mean())
    optimizer.step()
os.write(1, f"ENDS rank {rank}\\n".encode())
"""


def test_it_comes_to_train_in_the_end(launcher: Any) -> None:
    run = launcher.start("--nproc-per-node=2", "--max-restarts=1", launcher.script("train.py", SCRIPT))
    run.until(lambda: "rank 1 is back" in run.err, "a replacement comes")
    (launcher.folder / "go").touch()
    assert run.wait() == 0, run.err
    assert run.err.count("1 rank trains on: rank 1 is started again, which counts as no restart.") == 3
    assert "rank 1 is back and joins the others: 2 ranks." in run.err
    assert "ENDS rank 1" in run.out
