"""Who does not run what the others run does not train with them, and costs them nothing."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from unicron_elastic.rendezvous.store.server import EmbeddedEtcd

pytestmark = pytest.mark.trains

SCRIPT = """
import os, time
import torch, unicron_elastic

FOLDER = os.environ["PROBE"]
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = unicron_elastic.Run(model=model, optimizer=optimizer, reproducible=True)
torch.set_num_threads(1)
for step in run.steps(300, int(os.environ.get("MICRO_BATCHES", "6"))):
    os.write(1, f"STEP {step.number} of {run.world_size} pid {os.getpid()}\\n".encode())
    for index in step:
        if not os.path.exists(os.path.join(FOLDER, "go")):
            time.sleep(0.03)
        step.backward(model(torch.ones(1, 2) * (index + step.number)).pow(2).mean() * 1e-3)
    optimizer.step()
os.write(1, f"RESULT {model.weight.double().sum().item()}\\n".encode())
"""


@pytest.fixture
def etcd() -> Iterator[EmbeddedEtcd]:
    with EmbeddedEtcd() as server:
        yield server


def results(*runs: Any) -> set[str]:
    return {each for run in runs for each in re.findall(r"RESULT (\S+)", run.out)}


@pytest.fixture
def undisturbed(launcher: Any) -> set[str]:
    (launcher.folder / "go").touch()
    run = launcher.run(launcher.script("whole.py", SCRIPT))
    (launcher.folder / "go").unlink()
    return results(run)


def test_a_script_that_is_edited_while_it_trains_is_run_by_nobody(launcher: Any, undisturbed: set[str]) -> None:
    script = launcher.script("train.py", SCRIPT)
    run = launcher.start("--standalone", "--nproc-per-node=2", "--max-restarts=3", script)
    pids = run.until_line(r"^STEP 6 of 2 pid (\d+)", count=2)
    launcher.script("train.py", SCRIPT.replace("1e-3", "2e-3"))
    os.kill(int(pids[0]), signal.SIGKILL)
    run.until(lambda: "is not replaced any more" in run.err, "the end of the replacement")
    (launcher.folder / "go").touch()
    assert run.wait() == 0, run.err
    assert f"the others began when there was another text in {launcher.folder / script}" in run.err
    assert results(run) == undisturbed


def test_a_node_that_joins_with_something_else_leaves_again(
    launcher: Any, etcd: EmbeddedEtcd, undisturbed: set[str]
) -> None:
    script = launcher.script("train.py", SCRIPT)

    def start(node: str, **env: str) -> Any:
        return launcher.start(
            "--nnodes=2:3", "--nproc-per-node=1", "--rdzv-backend=unicron", f"--rdzv-endpoint={etcd.endpoint}",
            "--rdzv-id=job", "--rdzv-conf=last_call_timeout=1,lease_ttl=30", "--max-restarts=3",
            "--local-addr=127.0.0.1", script, env={"UNICRON_NODE_NAME": node, **env},
        )  # fmt: skip

    old = [start(node) for node in "ab"]
    for run in old:
        run.until_line(r"^STEP 6 of 2 ")
    stranger = start("c", MICRO_BATCHES="8")
    assert stranger.wait() == 1
    (launcher.folder / "go").touch()
    assert [run.wait() for run in old] == [0, 0], old[0].err
    assert "trains something else: 6 micro-batches, and this rank 8 micro-batches: the others train on" in stranger.err
    assert results(*old) == undisturbed
    assert results(stranger) == set()
    assert all("begin again" not in run.err for run in old)
