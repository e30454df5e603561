"""A layer that a script adds on the way: a replacement has it not, and the others train on without one."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.trains

SCRIPT = """
import os, signal, torch, unicron_elastic
from torch import nn

rank = int(os.environ["RANK"])
torch.set_num_threads(1)
torch.manual_seed(7)
model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run = unicron_elastic.Run(model=model, optimizer=optimizer)
for step in run.steps(total=40, micro_batches=4):
    if step.number == 3:
        model.append(nn.Linear(3, 3))
        optimizer.add_param_group({"params": model[2].parameters()})
    for index in step:
        if (rank, step.number) == (1, 5):
            os.kill(os.getpid(), signal.SIGKILL)
        while step.number == 30 and not os.path.exists(os.path.join(os.environ["PROBE"], "go")):
            pass
        torch.manual_seed(100 * step.number + index)
        step.backward(model(torch.randn(2, 6)).pow(2).mean())
    optimizer.step()
os.write(1, f"ENDS rank {rank} with {sum(each.sum().item() for each in model.parameters()):.5f}\\n".encode())
"""


def test_the_others_train_on_without_a_replacement(launcher: Any) -> None:
    script = launcher.script("train.py", SCRIPT)
    (launcher.folder / "go").touch()
    whole = launcher.start("--nproc-per-node=1", script)
    assert whole.wait() == 0, whole.err
    (launcher.folder / "go").unlink()
    run = launcher.start("--nproc-per-node=3", "--max-restarts=9", script)
    run.until(lambda: "rank 1 is not replaced any more." in run.err, "a replacement is given up")
    (launcher.folder / "go").touch()
    assert run.wait() == 0, run.err
    assert 'the others\' state does not fit: model: Unexpected key(s) in state_dict: "2.weight"' in run.err
    assert "During handling" not in run.err
    assert "direct cause" not in run.err
    assert "Restart 1 of 9." in run.err
    assert "Restart 2 of 9." not in run.err
    (one,) = {line.rpartition(" ")[2] for line in whole.out.splitlines() if line.startswith("ENDS")}
    assert [line.rpartition(" ")[2] for line in run.out.splitlines() if line.startswith("ENDS")] == [one, one]
