"""Going on in place between hosts that have addresses of their own, where 127.0.0.1 leads to nobody else."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hosts import Host, Network
from jobs import Etcd, script_path, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = """
import sys, time
import torch, unicron_elastic

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = unicron_elastic.Run(model=model, optimizer=optimizer, snapshot_every=5)
run.restore()
for step in run.steps(total=10**6, micro_batches=4):
    for index in step:
        step.backward(model(torch.full((1, 2), float(index))).sum())
        time.sleep(0.01)
    optimizer.step()
    print(f"step {step.number} of {run.world_size}", flush=True)
"""


@pytest.fixture
def start(etcd: Etcd, tmp_path: Path) -> Callable[[Host], Path]:
    """Starts the host's part of a job; its output."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    def begin(host: Host) -> Path:
        out = tmp_path / f"{host.name}-{len(host.started)}.out"
        out.touch()
        words = ["--nnodes=1:2", "--max-restarts=9", "--rdzv-backend=unicron", f"--rdzv-endpoint={etcd.endpoint}"]
        words += ["--rdzv-id=job", f"--local-addr={host.address}", "--rdzv-conf=last_call_timeout=8", str(script)]
        own = {"UNICRON_NODE_NAME": host.name, "XDG_STATE_HOME": str(tmp_path / host.name), "OMP_NUM_THREADS": "1"}
        host.start([script_path("unicron-run"), *words], env={**os.environ, **own}, out=out)
        return out

    return begin


def test_a_host_that_comes_back_trains_with_the_one_that_went_on(
    network: Network, start: Callable[[Host], Path]
) -> None:
    a, b = network.add("a", "b")
    first, other = start(a), start(b)
    until(lambda: "of 2" in first.read_text() and "of 2" in other.read_text(), "both to train", first.read_text)
    assert "timed out" not in first.read_text() + other.read_text()

    with contextlib.suppress(subprocess.TimeoutExpired):
        b.power_off()
    until(lambda: "of 1" in first.read_text(), "the other to go on", first.read_text)
    b.power_on()
    again = start(b)
    until(lambda: "of 2" in again.read_text(), "it to train again", again.read_text)

    assert "did not tell what snapshots they have" not in again.read_text()
    assert first.read_text().count("\nstep 0 of") <= 1  # who went on did not begin anew
