"""Planned jobs that lose all of their nodes and get nodes again later: real agents, a real etcd, real training."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_planned_jobs import Agent, Lab, until
from warm_launcher import WarmLaunchers

from unicron_elastic.planning.coordinate.snapshot import JobPhase

pytestmark = pytest.mark.trains

EVERY = 5
SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
import unicron_elastic

torch.set_num_threads(1)
style, every, where = sys.argv[1], int(sys.argv[2]), os.environ["UNICRON_NODE_NAME"]
if style in ("loop", "own"):
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
run = unicron_elastic.Run(model=model, optimizer=optimizer, replicated=style != "own", snapshot_every=every)
start = run.restore()
os.write(1, f"START {start} on {where} rank {os.environ['RANK']} pid {os.getpid()}\\n".encode())

def loss_of(number):
    return model(torch.randn(4, 4, generator=torch.Generator().manual_seed(number))).pow(2).mean()

def made(number):
    os.write(1, f"STEP {number}\\n".encode())
    time.sleep(0.05)

def is_over():
    over = torch.tensor(float(os.path.exists("stop")))
    dist.all_reduce(over)
    return over > 0

if style in ("loop", "own"):
    step = start
    while not is_over():
        optimizer.zero_grad()
        loss_of(step).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        step += 1
        run.snapshot(step, every=every)
        made(step)
else:
    for step in run.steps(100000, micro_batches=2):
        for index in step:
            step.backward(loss_of(step.number * 2 + index))
        optimizer.step()
        optimizer.zero_grad()
        made(step.number + 1)
        if os.path.exists("stop"):
            os._exit(0)
"""


@pytest.fixture
def own(tmp_path: Path, warm_launchers: WarmLaunchers) -> Iterator[Lab]:
    with Lab(tmp_path, warm_launchers, trains=True) as made:
        yield made


def starts(run: Any) -> list[tuple[int, str]]:
    """From which step each worker began, and on which node."""
    return [(int(step), host) for step, host in re.findall(r"^START (\d+) on (\w+)", run.out, re.MULTILINE)]


def made(run: Any) -> int:
    """How many steps the job has come to."""
    return max(map(int, re.findall(r"^STEP (\d+)", run.out, re.MULTILINE)), default=0)


def submitted(launcher: Any, lab: Lab, job: str, style: str, *, nodes: int, every: int = EVERY) -> Any:
    launcher.script("train.py", SCRIPT)
    return launcher.start(
        "--cluster", lab.etcd.endpoint, f"--nnodes={nodes}", f"--rdzv-id={job}", "train.py", style, str(every),
        fast=False,
    )  # fmt: skip


def pause(lab: Lab, job: str) -> None:
    assert lab.unicron("jobs", "set", job, "--pause").returncode == 0
    until(lambda: lab.phase(job).phase is JobPhase.SUBMITTED, "the pause", lab.logs)  # type: ignore[union-attr]
    lab.until_idle(*(each.host for each in lab.agents))


def resumed(lab: Lab, run: Any, job: str, nodes: int) -> int:
    """Returns the step with which all ranks of the job go on after a pause."""
    assert lab.unicron("jobs", "set", job, "--resume").returncode == 0
    run.until(lambda: len(starts(run)) == 2 * nodes, "the next start")
    first, *others = {step for step, _ in starts(run)[nodes:]}
    assert not others
    return first


@pytest.mark.parametrize(
    ("style", "nodes", "every"),
    [
        ("steps", 1, 100_000),
        pytest.param("steps", 2, EVERY, marks=pytest.mark.slow),
        pytest.param("loop", 1, 100_000, marks=pytest.mark.slow),
        pytest.param("loop", 2, EVERY, marks=pytest.mark.slow),
    ],
)
def test_a_job_that_is_paused_goes_on_from_the_step_it_was_in(
    own: Lab, launcher: Any, style: str, nodes: int, every: int
) -> None:
    own.begin(*"ab"[:nodes])
    run = submitted(launcher, own, "job", style, nodes=nodes, every=every)
    run.until(lambda: made(run) > EVERY, "some steps")
    before = made(run)
    pause(own, "job")
    first = resumed(own, run, "job", nodes)
    assert first >= before, run.err
    assert f"The job is to wait, and goes on from step {first}, which the memory of its nodes keeps." in run.err
    said = f"All ranks go on from step {first}, from the memory of their hosts."
    run.until(lambda: said in run.err, "the sentence")
    (launcher.folder / "stop").touch()
    assert run.wait() == 0, run.err


@pytest.mark.slow
def test_ranks_with_states_of_their_own_go_on_from_their_newest_snapshot(own: Lab, launcher: Any) -> None:
    own.begin("a", "b")
    run = submitted(launcher, own, "job", "own", nodes=2)
    run.until(lambda: made(run) > EVERY, "a snapshot")
    pause(own, "job")
    before = made(run)
    first = resumed(own, run, "job", 2)
    assert before - EVERY <= first <= before, run.err
    assert first % EVERY == 0
    said = f"goes on from step {first}, which the memory of its nodes keeps: where ranks have states of their own, none"
    assert said in run.err
    (launcher.folder / "stop").touch()
    assert run.wait() == 0, run.err


@pytest.mark.slow
def test_the_node_that_has_the_state_of_a_job_gets_it_back(own: Lab, launcher: Any) -> None:
    own.begin("b")
    run = submitted(launcher, own, "job", "steps", nodes=1)
    run.until(lambda: made(run) > EVERY, "some steps")
    own.begin("a")
    pause(own, "job")
    until(lambda: own.nodes()["b"].keeps == ("job",), "its word that it keeps the state", own.logs)
    before = made(run)
    assert resumed(own, run, "job", 1) >= before - 1
    assert starts(run)[-1][1] == "b"


@pytest.mark.slow
@pytest.mark.parametrize("comes_back", [True, False])
def test_a_job_that_the_plan_takes_the_last_node_from_says_what_it_goes_on_with(
    own: Lab, launcher: Any, comes_back: bool
) -> None:
    own.begin("b")
    run = submitted(launcher, own, "job", "steps", nodes=1)
    run.until(lambda: made(run) > EVERY, "some steps")
    before = made(run)
    launcher.script("wait.py", "import os, time\nwhile not os.path.exists('over'): time.sleep(0.05)\n")
    other = launcher.start(
        "--cluster", own.etcd.endpoint, "--nnodes=1", "--rdzv-id=other", "--weight=50", "wait.py", fast=True
    )
    run.until(lambda: "The job is to wait, and goes on from step " in run.err, "its last word")
    if comes_back:
        until(lambda: own.nodes()["b"].job == "other", "the other job", own.logs)
        (launcher.folder / "over").touch()
        assert other.wait() == 0, other.err
    else:
        own.agents.append(Agent(own, "a"))
    run.until(lambda: len(starts(run)) == 2, "the next start")
    step, host = starts(run)[1]
    if comes_back:
        assert (host, step >= before) == ("b", True), run.err
    else:
        assert (host, step) == ("a", 0), run.err
        assert "It starts without its state that b keeps in memory: the plan has other nodes for it." in run.err
