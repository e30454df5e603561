"""A script of ``run.steps()`` that makes a process group by itself is refused where a replacement would wait in it."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.trains

SCRIPT = """
import os, sys
import torch, torch.distributed as dist, unicron_elastic

if sys.argv[1] == "its own":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
elif sys.argv[1] == "a mesh":
    dist.device_mesh.init_device_mesh("cpu", (2,))
else:
    dist.init_process_group("gloo")
if sys.argv[1] == "is gone":
    dist.destroy_process_group()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = unicron_elastic.Run(model=model, optimizer=optimizer)
for step in run.steps(2, 4):
    for index in step:
        step.backward(model(torch.ones(1, 2)).mean())
    optimizer.step()
os.write(1, f"END {run.step}\\n".encode())
"""
SENTENCE = "run.steps() makes the process group by itself, anew after each loss, and this script has made one before"


def _run(launcher: Any, how: str, tool: str) -> Any:
    script = launcher.script("train.py", SCRIPT)
    return launcher.run("--standalone", "--nproc-per-node=2", "--max-restarts=0", script, how, tool=tool, fast=False)


@pytest.mark.parametrize(
    "how", ["is there", pytest.param("is gone", marks=pytest.mark.slow), pytest.param("a mesh", marks=pytest.mark.slow)]
)
def test_a_group_of_all_ranks_is_refused_in_the_first_step(launcher: Any, how: str) -> None:
    run = _run(launcher, how, "unicron-run")
    assert run.wait() == 1
    assert SENTENCE in run.err
    assert "END" not in run.out


@pytest.mark.slow
@pytest.mark.parametrize(("how", "tool"), [("its own", "unicron-run"), ("is there", "torchrun")])
def test_a_group_in_which_no_replacement_would_wait_is_none_of_ours(launcher: Any, how: str, tool: str) -> None:
    run = _run(launcher, how, tool)
    assert run.wait() == 0, run.err
    assert run.out.count("END 2") == 2
