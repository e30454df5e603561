"""What one rank does alone between steps may take many times the time-out, if it is at work; idle it may not."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytestmark = pytest.mark.trains

SCRIPT = """
import json, os, sys, time
from pathlib import Path
import torch, unicron_elastic

MODE, FOLDER = sys.argv[1], Path(os.environ["PROBE"])

def evaluate():
    end = time.monotonic() + 4.0
    while time.monotonic() < end:
        if MODE == "works":
            sum(range(10_000))
        else:
            time.sleep(0.05)

(FOLDER / f"begun-{os.environ['RANK']}").touch()
while len(list(FOLDER.glob("begun-*"))) < 2:  # the time-out is shorter than a loaded host may take to start both
    time.sleep(0.005)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = unicron_elastic.Run(model=model, optimizer=optimizer, timeout_s=1.0)
for step in run.steps(4, 4):
    for index in step:
        step.backward(model(torch.ones(1, 2) * index).mean())
    optimizer.step()
    if step.number == 1 and run.rank == 0:
        with unicron_elastic.phase("evaluation" if MODE == "names it" else "train"):
            evaluate()
    if step.number == 2:
        run.mean(1.0)
(FOLDER / f"final-{os.environ['RANK']}.json").write_text(json.dumps([run.step, model.weight.tolist()]))
"""


@pytest.fixture
def run(launcher: Any, request: pytest.FixtureRequest) -> Any:
    return launcher.run(
        "--standalone", "--nproc-per-node=2", "--max-restarts=0", "--unicron-ledger=ledger", "--unicron-on-hang=off",
        launcher.script("train.py", SCRIPT), request.param, fast=False,
    )  # fmt: skip


@pytest.mark.parametrize("run", ["works", "names it"], indirect=True)
def test_the_others_wait_for_a_rank_at_work(run: Any) -> None:
    assert run.wait() == 0, run.err
    assert (run.folder / "final-0.json").read_text() == (run.folder / "final-1.json").read_text()
    assert json.loads((run.folder / "final-0.json").read_text())[0] == 4
    assert not (run.folder / "ledger").exists(), run.err


@pytest.mark.parametrize("run", ["idle"], indirect=True)
def test_the_others_end_as_the_time_out_says_for_a_rank_that_is_idle(run: Any) -> None:
    assert run.wait() == 1
    assert "a collective timed out, as a rank that is not known to be at work did not come to it" in run.err
    assert "the members of world 2 wait in vain: rank 0" in run.err
