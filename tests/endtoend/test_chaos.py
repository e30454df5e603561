"""Faults by plan in whole runs, and what the run makes of them."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

pytestmark = pytest.mark.trains

STEPS = textwrap.dedent(
    """
    import os, torch, torch.distributed as dist
    import torch.distributed.nn  # before the group, which it would else hold at exit: torch then aborts now and then
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    os.write(1, b"done\\n")
    del model
    dist.destroy_process_group()
    """
)


@pytest.mark.parametrize("warm", ["on", pytest.param("off", marks=pytest.mark.slow)])
def test_a_planned_kill_costs_one_restart(launcher: Any, warm: str) -> None:
    launcher.script("steps.py", STEPS)
    plan = "kill:rank=1,step=3"
    run = launcher.run(
        "--nproc-per-node=2",
        "--max-restarts=1",
        f"--unicron-warm={warm}",
        f"--unicron-chaos={plan}",
        "steps.py",
        fast=False,
    )
    assert run.process.returncode == 0, run.err
    assert run.out.count("done") == 2
    assert "rank 1 was killed by signal 9 (SIGKILL) after 2 steps." in run.err


def test_a_planned_exception_in_the_second_generation(launcher: Any) -> None:
    launcher.script("steps.py", STEPS)
    plan = "kill:rank=0,step=2;exception:rank=1,step=3,phase=backward,text=boom,restart=1"
    run = launcher.run("--nproc-per-node=2", "--max-restarts=1", "steps.py", fast=False, env={"UNICRON_CHAOS": plan})
    assert run.process.returncode == 1
    assert "rank 1 raised" in run.err
    assert "boom" in run.err


def test_a_wrong_plan_is_refused_before_anything_starts(launcher: Any) -> None:
    launcher.script("steps.py", "print('ran')")
    run = launcher.run("--unicron-chaos=kill:rank=x", "steps.py")
    assert run.process.returncode == 2
    assert run.out == ""
    assert "--unicron-chaos" in run.err
    assert "Traceback" not in run.err


def test_a_plan_without_in_band_parts_says_that_nothing_will_happen(launcher: Any) -> None:
    launcher.script("steps.py", "print('ran')")
    run = launcher.run("--unicron-in-band=off", "--unicron-chaos=kill:rank=0,step=1", "steps.py")
    assert run.process.returncode == 0
    assert "no fault will be injected" in run.err
