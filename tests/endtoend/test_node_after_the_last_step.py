"""A node that comes when the others have made their last step, of an epoch or of all, waits and disturbs nobody."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from unicron_elastic.rendezvous.store.server import EmbeddedEtcd

pytestmark = pytest.mark.trains

STEPS = 20
HAS_TO_WAIT = "This node has to wait. 1 node waits to join: it is let in when all workers train again"
# The first epoch ends with an evaluation that lasts until the file "go" is there.
SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
import unicron_elastic
from unicron_elastic.training.group.membership import AgentMembership
from unicron_elastic.worker.notices import Parted

folder, node, tell = Path(os.environ["PROBE"]), os.environ["UNICRON_NODE_NAME"], AgentMembership.tell

def say(word):
    os.write(1, f"{word} pid {os.getpid()}\\n".encode())

def until(name):
    end = time.monotonic() + 60
    while not (folder / name).exists():
        assert time.monotonic() < end, name
        time.sleep(0.02)

def tells_late(self, message):
    if isinstance(message, Parted) and node == LATE:
        say("MADE ITS LAST STEP")
        until("tell")
    tell(self, message)

AgentMembership.tell = tells_late
torch.set_num_threads(1)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
say("STARTED")
run = unicron_elastic.Run(model=model, optimizer=optimizer)
for epoch, total in enumerate(TOTALS):
    for step in run.steps(total=total, micro_batches=4):
        for index in step:
            step.backward(model(torch.randn(4, 8)).pow(2).mean())
            time.sleep(0.005)
        optimizer.step()
        say(f"STEP {step.number} of {run.world_size}")
    if epoch == 0:
        say("EVALUATES")
        until("go")
        say("HAS EVALUATED")
"""


@pytest.fixture
def start(launcher: Any) -> Iterator[Callable[..., Any]]:
    """Starts a node of a job that makes so many ``steps`` in its epochs; ``late`` tells late that it has made them."""
    with EmbeddedEtcd() as etcd:

        def started(node: str, nodes: str, steps: tuple[int, ...] = (STEPS,), late: str = "") -> Any:
            script = launcher.script("train.py", SCRIPT.replace("TOTALS", repr(steps)).replace("LATE", repr(late)))
            return launcher.start(
                f"--nnodes={nodes}", "--nproc-per-node=1", "--rdzv-backend=unicron",
                f"--rdzv-endpoint={etcd.endpoint}", "--rdzv-id=job", "--rdzv-conf=last_call_timeout=1,lease_ttl=30",
                "--max-restarts=9", "--local-addr=127.0.0.1", "--unicron-on-hang=off", script,
                env={"UNICRON_NODE_NAME": node}, fast=False,
            )  # fmt: skip

        yield started


def _steps(run: Any) -> list[int]:
    return [int(number) for number in re.findall(r"^STEP (\d+) ", run.out, re.MULTILINE)]


def test_after_the_last_step_it_ends_as_well_as_the_others(launcher: Any, start: Callable[..., Any]) -> None:
    old = start("a", "1:2")
    old.until_line(r"^EVALUATES")
    new = start("b", "1:2")
    new.until(lambda: HAS_TO_WAIT in new.err, "why it waits")
    (launcher.folder / "go").touch()
    assert [run.wait() for run in (old, new)] == [0, 0]
    assert _steps(old) == list(range(STEPS))
    assert (old.out.count("STARTED"), old.out.count("HAS EVALUATED")) == (1, 1)
    assert "STARTED" not in new.out
    assert "It has ended well on a. This node is not needed any more, and ends well." in new.err


def test_between_epochs_it_waits_for_the_next(launcher: Any, start: Callable[..., Any]) -> None:
    old = start("a", "1:2", (STEPS, 10**6))
    old.until_line(r"^EVALUATES")
    new = start("b", "1:2", (STEPS, 10**6))
    new.until(lambda: HAS_TO_WAIT in new.err, "why it waits")
    (launcher.folder / "go").touch()
    new.until_line(r"^STEP \d+ of 2")
    old.until_line(r"^STEP \d+ of 2")
    for run in (old, new):
        run.process.terminate()
        run.wait()
    assert (old.out.count("STARTED"), old.out.count("HAS EVALUATED")) == (1, 1)
    assert _steps(old) == list(range(len(_steps(old))))


def test_a_node_that_met_the_newcomer_while_the_others_ended_ends_by_itself(
    launcher: Any, start: Callable[..., Any]
) -> None:
    """Its agent had not heard yet that its worker had made its last step, as those of the others had."""
    late, other = (start(node, "2:3", late="a") for node in "ac")
    late.until_line(r"^MADE ITS LAST STEP")
    other.until_line(r"^EVALUATES")
    new = start("b", "2:3", late="a")
    late.until(lambda: "1 node waits to join: the nodes meet" in late.err, "the meeting")
    new.until(lambda: HAS_TO_WAIT in new.err, "why it waits")
    (launcher.folder / "go").touch()
    assert other.wait() == 0
    assert new.wait() == 0
    late.until(lambda: "The workers here go on to their own end." in late.err, "the end of the meeting")
    (launcher.folder / "tell").touch()
    assert late.wait() == 0
    for run in (late, other):
        assert _steps(run) == list(range(STEPS))
        assert run.out.count("HAS EVALUATED") == 1
