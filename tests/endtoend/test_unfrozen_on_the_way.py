"""Layers that a script freezes or unfreezes on its way, with a new DistributedDataParallel: replicas stay the same.

One that was built for what was trained in the beginning would leave out what is trained in a later snapshot.
"""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.trains

SCRIPT = """
import os, signal, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import unicron_elastic

what, place, die = sys.argv[1], sys.argv[2], int(sys.argv[3])
is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
model[0].requires_grad_(what == "freeze")
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
if place == "before":
    wrapped = DistributedDataParallel(model)
run = unicron_elastic.Run(model=wrapped if place == "before" else model, optimizer=optimizer)
start = run.restore()
if place == "behind":
    wrapped = DistributedDataParallel(model)
os.write(1, f"START {start}\\n".encode())
for step in range(start, 22):
    if step == 10:
        model[0].requires_grad_(what == "unfreeze")
        wrapped = DistributedDataParallel(model)
    data = torch.randn(8, 8, generator=torch.Generator().manual_seed(10 * step + rank))
    optimizer.zero_grad()
    wrapped(data).pow(2).mean().backward()
    optimizer.step()
    run.snapshot(step + 1, every=4)
    if is_first and step == die:
        run._snapshots.wait()
        dist.barrier()  # the state that cannot be used is whole on all ranks
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
values = torch.cat([each.detach().flatten() for each in model.parameters()])
trained = [each.requires_grad for each in model.parameters()]
os.write(1, f"ENDS {values.numpy().tobytes().hex()} {trained}\\n".encode())
dist.destroy_process_group()
"""
NEVER = -1


def train(launcher: Any, *arguments: str) -> tuple[Any, list[str], list[str]]:
    """Returns the run, where its ranks began, and what they have in the end."""
    run = launcher.run("--standalone", "--nproc-per-node=2", "--max-restarts=1", *arguments)
    assert run.process.returncode == 0, run.err
    lines = run.out.splitlines()
    return run, *([line for line in lines if line.startswith(word)] for word in ("START", "ENDS"))


@pytest.mark.parametrize(
    ("what", "place", "die", "begins"),
    [
        ("unfreeze", "before", 13, 8),
        ("unfreeze", "behind", 17, 16),
        pytest.param("unfreeze", "before", 17, 0, marks=pytest.mark.slow),
        pytest.param("freeze", "before", 13, 8, marks=pytest.mark.slow),
        pytest.param("freeze", "before", 17, 0, marks=pytest.mark.slow),
        pytest.param("freeze", "behind", 17, 16, marks=pytest.mark.slow),
    ],
)
def test_replicas_are_those_of_an_undisturbed_run(launcher: Any, what: str, place: str, die: int, begins: int) -> None:
    script = launcher.script("train.py", SCRIPT)
    _, _, undisturbed = train(launcher, script, what, place, str(NEVER))
    run, starts, ends = train(launcher, script, what, place, str(die))
    assert starts == ["START 0"] * 2 + [f"START {begins}"] * 2
    assert len(set(ends)) == 1
    assert ends == undisturbed
    refused = {8: "the state of step 12", 0: "the states of steps 16 and 12"}.get(begins)
    assert (f"Ranks 0 and 1: {refused} cannot be used: there the script " in run.err) == (refused is not None)
    assert ("build it behind run.restore()" in run.err) == (refused is not None)
