"""Two nodes, of which one is lost while the ranks are between two calls of ``run.steps()``: nobody waits for it."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.trains

SCRIPT = """
import os, time, torch, unicron_elastic
from pathlib import Path
torch.set_num_threads(1)
torch.manual_seed(5)
rank, generation = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
folder = Path(os.environ["PROBE"])
def say(text):
    os.write(1, f"{text}\\n".encode())
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = unicron_elastic.Run(model=model, optimizer=optimizer, reproducible=True)
for epoch in range(3):
    for step in run.steps(total=2 * (epoch + 1), micro_batches=2):
        for index in step:
            step.backward(model(torch.ones(1, 4) * (index + step.number)).square().mean())
        optimizer.step()
        say(f"STEP {step.number}")
    if run.is_passing:
        continue
    if epoch == 1 and not (folder / "lost").exists():
        say(f"EVALUATES rank {rank} pid {os.getpid()}")
        while not (folder / "lost").exists():
            time.sleep(0.01)
    run.mean(1.0)
    say(f"MEAN of {epoch} partial {run.is_partial} world {run.world_size}")
say(f"TRAINED {[round(each, 12) for each in model.weight.flatten().tolist()]}")
"""


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("localhost", port), 1):
        return True
    return False


@pytest.fixture
def nodes(launcher: Any) -> tuple[Any, Any]:
    """The run of the node that hosts the rendezvous, and the other one, whose ranks are both behind epoch 1."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    options = (
        "--nnodes=1:2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}",
        "--rdzv-id=job", "--rdzv-conf=last_call_timeout=5,keep_alive_interval=1", "--max-restarts=3",
        launcher.script("train.py", SCRIPT),
    )  # fmt: skip
    first = launcher.start(*options)
    first.until(lambda: _listens(port), "the host of the rendezvous")
    runs = (first, launcher.start(*options))
    for run in runs:
        run.until_line(r"^EVALUATES")
    return runs


def _pid(run: Any) -> int:
    return int(run.until_line(r"^EVALUATES rank \d pid (\d+)")[0])


def test_who_is_left_does_not_wait_for_a_node_whose_launcher_was_killed(launcher: Any, nodes: tuple[Any, Any]) -> None:
    left, lost = nodes
    pid = _pid(lost)
    lost.process.kill()
    left.until(lambda: not Path(f"/proc/{pid}").exists(), "the end of its worker")
    (launcher.folder / "lost").touch()
    assert left.wait() == 0, left.err
    assert "gives no sign of life, and connections have broken: it is lost." in left.err
