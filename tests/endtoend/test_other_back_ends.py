"""Over a back end whose sums are not known to be there when they are waited for, all ranks begin again after a loss."""

from __future__ import annotations

from typing import Any

import pytest

from unicron_elastic.training.group.membership import why_not_in_place

pytestmark = pytest.mark.trains

SCRIPT = """
import os, signal
import torch, torch.distributed as dist
import unicron_elastic

def make(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout)

dist.Backend.register_backend("other", make, devices=["cpu"])
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = unicron_elastic.Run(model=model, optimizer=optimizer, backend="other", snapshot_every=1)
begun = run.restore()
for step in run.steps(total=8, micro_batches=4):
    for index in step:
        step.backward(model(torch.ones(2, 4) * index).sum())
    if step.number == 4 and run.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    optimizer.zero_grad()
os.write(1, f"END {begun} {run.step} {model.weight.sum().item():.5f}\\n".encode())
"""


def test_all_ranks_begin_again_from_memory(launcher: Any) -> None:
    run = launcher.run("--nproc-per-node=2", "--max-restarts=1", launcher.script("other.py", SCRIPT))
    assert run.process.returncode == 0, run.err
    ends = [line.split()[1:] for line in run.out.splitlines() if line.startswith("END")]
    assert len(ends) == 2
    assert len({tuple(end) for end in ends}) == 1
    assert int(ends[0][0]) in (4, 5), "from memory, and not from the beginning"
    assert ends[0][1] == "8"
    assert run.err.count("on other no rank goes on in place yet: after a loss all ranks begin again") == 2  # per start
    assert "goes on from the failed step" not in run.err


@pytest.mark.parametrize("backend", ["gloo", "GLOO", "cpu:gloo", "cpu:gloo,cuda:gloo"])
def test_gloo_goes_on_in_place(backend: str) -> None:
    assert why_not_in_place(backend, {}) == ""


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl", "ucc", "mpi", "nccl2"])
def test_no_other_goes_on_in_place_unless_it_is_forced(backend: str) -> None:
    assert why_not_in_place(backend, {}).startswith(f"on {backend} no rank goes on in place yet")
    assert why_not_in_place(backend, {"UNICRON_IN_PLACE": " Force "}) == ""


def test_a_wrong_wish_is_refused() -> None:
    with pytest.raises(ValueError, match="UNICRON_IN_PLACE must be unset, or force, not 'yes'"):
        why_not_in_place("gloo", {"UNICRON_IN_PLACE": "yes"})
