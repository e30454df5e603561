"""What is registered is the same on all ranks from the first step on, and all of it comes to a replacement."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytestmark = pytest.mark.trains

SCRIPT = """
import json, os, time
from pathlib import Path
import torch, unicron_elastic
from torch import nn

FOLDER, RANK, STEPS = Path(os.environ["PROBE"]), int(os.environ["RANK"]), 8

class Masters:
    def __init__(self):
        self.tensors = [each.detach().double().clone() for each in model.parameters()]
    def state_dict(self):
        return {"tensors": self.tensors}
    def load_state_dict(self, state):
        self.tensors = [each.clone() for each in state["tensors"]]

class Scaled(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
        self.register_buffer("hidden", torch.randn(2), persistent=False)

def is_killed():
    try:
        (FOLDER / "killed").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

def wait_for_both():
    end = time.monotonic() + 30.0
    while run._engine._membership._link._world.size < 2:
        assert time.monotonic() < end
        time.sleep(0.01)

torch.set_num_threads(1)
torch.manual_seed(RANK)
model = Scaled()
ema = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
masters = Masters()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + RANK), momentum=0.9)
run = unicron_elastic.Run(model=model, optimizer=optimizer, ema=ema, masters=masters)
first = None
for step in run.steps(STEPS, 4):
    if step.number == 0:
        with torch.no_grad():
            own = model(torch.ones(1, 3)).sum()
        first = [run.mean(own).item(), own.item(), run.is_partial]
    for index in step:
        if step.number == STEPS - 1:
            wait_for_both()
        if step.number == 2 and RANK == 1 and is_killed():
            os.kill(os.getpid(), 9)
        step.backward(model(torch.full((1, 3), float(index))).square().mean())
    optimizer.step()
    model.hidden += 0.5
    ema.update_parameters(model)
found = [optimizer.param_groups[0]["lr"], *(each.tolist() for each in (
    *model.parameters(), model.hidden, *ema.module.parameters(), ema.module.hidden, *masters.tensors))]
(FOLDER / f"final-{RANK}.json").write_text(json.dumps(found))
if first:
    (FOLDER / f"first-{RANK}.json").write_text(json.dumps(first))
"""


def test_what_each_rank_has_made_by_its_own_seed_is_that_of_rank_0(launcher: Any) -> None:
    script = launcher.script("train.py", SCRIPT)
    run = launcher.start("--standalone", "--nproc-per-node=2", "--max-restarts=3", script, fast=False)
    assert run.wait() == 0, run.err
    final = [json.loads((launcher.folder / f"final-{rank}.json").read_text()) for rank in range(2)]
    assert final[0] == final[1]
    mean, own, is_partial = json.loads((launcher.folder / "first-0.json").read_text())
    assert mean == own  # of one model, and not of one that each rank has made
    assert not is_partial
    sentence = (
        "optimizer, ema and masters were not the same on all ranks when the training began: all have now what rank"
    )
    assert run.err.count(sentence) == 1
    assert "differ" not in run.err.replace("What is to differ", "")
