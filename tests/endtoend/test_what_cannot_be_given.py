"""What is registered and cannot be sent, or made anew, costs the rank that needs it, and not those who train."""

from __future__ import annotations

from typing import Any

import pytest
from finals import final

pytestmark = pytest.mark.trains

SCRIPT = """
import json, os, sys, time
from pathlib import Path
import torch, unicron_elastic
from unicron_elastic.training.group import servant

MODE, LAST = sys.argv[1], int(sys.argv[2])
FOLDER, RANK = Path(os.environ["PROBE"]), int(os.environ["RANK"])
LOST, STEPS = 2, 12

class Seen:
    is_odd = False
    def state_dict(self):
        return {"seen": {1, 2} if self.is_odd else [1, 2]}
    def load_state_dict(self, state):
        pass

def refuse(self, key):
    raise OSError("no")

def make_groups():
    if run.world_size == 2 and MODE == "on_regroup" and first(f"raised-{RANK}") and RANK <= LAST:
        raise RuntimeError("no group for two")

def first(name):
    try:
        (FOLDER / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

def wait_for(has_come):
    end = time.monotonic() + 30.0
    while not has_come():
        assert time.monotonic() < end
        time.sleep(0.01)

def are_all_there():
    return run._engine._membership._link._world.size == 3

if MODE == "in the group":
    servant.Servant.serve = refuse
seen = Seen()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = unicron_elastic.Run(model=model, optimizer=optimizer, seen=seen, on_regroup=make_groups)
torch.set_num_threads(1)
for step in run.steps(STEPS, 6):
    seen.is_odd = MODE != "on_regroup" and 1 <= step.number <= LAST
    if step.number == LAST and MODE == "in the group":
        wait_for(are_all_there)
    for index in step:
        if step.number == 3 and RANK == LOST and first("killed"):
            os.kill(os.getpid(), 9)
        if step.number == LAST and MODE == "while they train":
            wait_for((FOLDER / "refused").exists)
        if step.number == STEPS - 1 and LAST < STEPS:
            wait_for(are_all_there)
        step.backward(model(torch.ones(1, 2) * (index + step.number)).mean())
    optimizer.step()
(FOLDER / f"final-{RANK}.json").write_text(json.dumps([run.step, run.world_size, model.weight.tolist()]))
"""
REFUSED = "unicron: this rank is not given the others' state, who train on without it"


def _start(launcher: Any, mode: str, last: int) -> Any:
    script = launcher.script("train.py", SCRIPT)
    return launcher.start(
        "--standalone", "--nproc-per-node=3", "--max-restarts=3", "--unicron-ledger=ledger", script, mode, str(last),
        fast=False,
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["while they train", "in the group"])
def test_a_state_that_cannot_be_sent_for_a_while_is_given_later(launcher: Any, mode: str) -> None:
    run = _start(launcher, mode, 5)
    run.until(lambda: REFUSED in run.err, "the sentence")
    (launcher.folder / "refused").touch()
    assert run.wait() == 0, run.err
    assert final(launcher.folder, 0) == final(launcher.folder, 1) == final(launcher.folder, 2)
    assert final(launcher.folder, 0)[:2] == [12, 3]
    assert run.err.count(REFUSED) == 1
    assert "seen.seen is a set, which cannot be sent" in run.err
    assert "Traceback" not in run.err


@pytest.mark.slow
def test_those_who_train_come_to_their_end_when_their_state_can_never_be_sent(launcher: Any) -> None:
    run = _start(launcher, "while they train", 99)
    assert run.wait() == 0, run.err
    assert final(launcher.folder, 0) == final(launcher.folder, 1)
    assert final(launcher.folder, 0)[:2] == [12, 2]
    assert not (launcher.folder / "final-2.json").exists()


def test_on_regroup_that_raises_is_named_and_ends_its_rank_alone(launcher: Any) -> None:
    run = _start(launcher, "on_regroup", 0)
    assert run.wait() == 0, run.err
    assert [final(launcher.folder, rank)[0] for rank in range(3)] == [12, 12, 12]
    assert "make_groups(), which is this script's on_regroup, raised RuntimeError" in run.err
    assert "1 rank goes on from the failed step" in run.err
    assert "connect anew" not in run.err


@pytest.mark.slow
def test_on_regroup_that_raises_in_all_has_all_begin_again(launcher: Any) -> None:
    run = _start(launcher, "on_regroup", 2)
    assert run.wait() == 0, run.err
    assert [final(launcher.folder, rank)[0] for rank in range(3)] == [12, 12, 12]
    assert "make_groups(), which is this script's on_regroup, raised RuntimeError" in run.err


OF_TIER_1 = """
import torch, unicron_elastic
model = torch.nn.Embedding(4, 2, sparse=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # whose buffer is sparse then
run = unicron_elastic.Run(model=model, optimizer=optimizer)
for step in range(run.restore(), 3):
    model(torch.tensor([step])).sum().backward()
    optimizer.step()
    run.snapshot(step + 1, every=1)
"""


def test_a_snapshot_of_what_cannot_be_kept_is_refused_by_name(launcher: Any) -> None:
    run = launcher.start("--standalone", "--max-restarts=3", launcher.script("sparse.py", OF_TIER_1), fast=False)
    assert run.wait() == 1
    assert "state.optimizer.state[0].momentum_buffer is a Tensor (sparse_coo" in run.err
    assert "which cannot be sent; supported are" in run.err
