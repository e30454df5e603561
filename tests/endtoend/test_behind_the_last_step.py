"""What a script does behind its last step is done once, also where all ranks begin again while one is at it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.trains

SCRIPT = """
import os, signal, sys, time, torch, unicron_elastic
from pathlib import Path
torch.set_num_threads(1)
torch.manual_seed(5)
rank, folder = int(os.environ["RANK"]), Path(os.environ["PROBE"])
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = unicron_elastic.Run(model=model, optimizer=optimizer, reproducible=True, snapshot_every=1)
restored = run.restore()
for step in run.steps(6, 2):
    for index in step:
        step.backward(model(torch.ones(1, 4) * (index + step.number)).square().mean())
    optimizer.step()
trained = model.weight.tolist()
with torch.no_grad():
    model.weight.mul_(0.5)
if rank == 0 and len(sys.argv) > 1 and not restored:
    while not (folder / "has ended").exists():  # the other one
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
os.write(1, f"PID {os.getpid()}\\n".encode())
os.write(1, f"TRAINED {rank} {restored} {trained}\\n".encode())
"""


def _start(launcher: Any, *arguments: str) -> Any:
    return launcher.start(
        "--standalone", "--nproc-per-node=2", "--max-restarts=1", launcher.script("train.py", SCRIPT), *arguments,
        fast=False,
    )  # fmt: skip


def test_a_state_that_the_script_has_changed_behind_its_last_step_is_not_gone_on_from(launcher: Any) -> None:
    undisturbed = _start(launcher)
    assert undisturbed.wait() == 0, undisturbed.err
    run = _start(launcher, "killed")
    pid = run.until_line(r"^PID (\d+)")[0]
    run.until(lambda: not Path(f"/proc/{pid}").exists(), "the end of rank 1")
    (launcher.folder / "has ended").touch()
    assert run.wait() == 0, run.err
    assert "All ranks go on from step 5" in run.err
    assert _trained(run, 5) == _trained(undisturbed, 0)


def _trained(run: Any, restored: int) -> list[str]:
    return sorted(re.findall(rf"^TRAINED (\d) {restored} (.*)$", run.out, flags=re.MULTILINE))
