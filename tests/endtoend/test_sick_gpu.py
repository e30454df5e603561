"""A GPU of which the driver tells something bad, through the real pynvml and a library with NVML's ABI."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "health"))
import fake_nvml
from fake_nvml import FakeNvml

STEPS = """
import os, time, torch
parameter = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([parameter], lr=0.1)
probe = os.environ["PROBE"]
step = 0
while not os.path.exists(os.path.join(probe, "stop")):
    step += 1
    optimizer.step()
    if step == 20:
        os.write(1, f"STEPPED rank {os.environ['RANK']} pid {os.getpid()}\\n".encode())
    time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("there is no C compiler to make the fake NVML with")
    return fake_nvml.compile_library(compiler, tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1")


@pytest.fixture
def gpus(tmp_path: Path) -> Iterator[FakeNvml]:
    folder = tmp_path / "fake"
    folder.mkdir()
    made = FakeNvml(folder)
    made.set({"devices": 2})
    yield made
    made.close()


def _incidents(launcher: Any) -> list[dict[str, Any]]:
    listed = launcher.run("incidents", "--json", tool="unicron")
    return json.loads(listed.out or "[]")


def assert_observed(incident: dict[str, Any], status: str) -> None:
    assert (incident["status"], incident["severity"], incident["method"]) == (status, 1, "node health")
    assert (incident["action"], incident["rank"]) == ("observe", None)
    assert incident["decision"] == "The node stays: it is the only node of the job."


@pytest.mark.parametrize(
    ("plan", "status"),
    [
        pytest.param("xid:rank=1,step=30,xid=79", "GPU driver error", marks=pytest.mark.slow),
        pytest.param("ecc:rank=0,step=30", "ECC error", marks=pytest.mark.slow),
    ],
)
def test_the_only_node_goes_on_and_the_incident_is_told(
    launcher: Any, gpus: FakeNvml, library: Path, plan: str, status: str
) -> None:
    launcher.script("steps.py", STEPS)
    run = launcher.start(
        "--nproc-per-node=2", f"--unicron-chaos={plan}", "steps.py", fast=False, env=gpus.environment(library)
    )
    run.until(lambda: "Health critical: GPU" in run.err, "what the GPU said")
    incident = run.until(lambda: _incidents(launcher), "the incident")[0]
    (launcher.folder / "stop").touch()
    assert run.wait() == 0, run.err
    assert_observed(incident, status)


def test_a_worker_that_fails_after_it_is_told_in_the_same_incident(
    launcher: Any, gpus: FakeNvml, library: Path
) -> None:
    launcher.script("steps.py", STEPS)
    run = launcher.start(
        "--nproc-per-node=2", "--max-restarts=1", "--unicron-chaos=xid:rank=1,step=30,xid=79", "steps.py",
        fast=False, env=gpus.environment(library),
    )  # fmt: skip
    pids = dict(run.until_line(r"^STEPPED rank (\d) pid (\d+)", 2))
    run.until(lambda: "Health critical: GPU" in run.err, "what the GPU said")
    assert_observed(run.until(lambda: _incidents(launcher), "the incident")[0], "GPU driver error")
    os.kill(int(pids["1"]), signal.SIGKILL)
    run.until_line(r"^STEPPED", 4)
    (launcher.folder / "stop").touch()
    assert run.wait() == 0, run.err
    (incident,) = _incidents(launcher)
    assert (incident["status"], incident["severity"], incident["action"]) == ("GPU driver error", 1, "restart")
    assert incident["rank"] == 1
    assert "; rank 1 was killed by signal 9 (SIGKILL)" in incident["reason"]
    assert incident["decision"] == "Restart 1 of 1. The node stays: it is the only node of the job."


def test_a_node_that_may_leaves_at_once(launcher: Any, gpus: FakeNvml, library: Path) -> None:
    launcher.script("steps.py", STEPS)
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    job = [
        "--nnodes=1:2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}",
        "--rdzv-id=job", "--rdzv-conf=last_call_timeout=1", "--max-restarts=3", "steps.py",
    ]  # fmt: skip
    healthy = launcher.start(*job, fast=False)
    healthy.until(lambda: launcher.is_listening(port), "the rendezvous")  # its host cannot leave
    sick = launcher.start(*job, fast=False, env=gpus.environment(library))
    for run in (healthy, sick):
        run.until_line(r"^STEPPED")
    gpus.event(0, fake_nvml.XID, 79)
    assert sick.wait() == 1
    assert "This node leaves the job." in sick.err
    assert "NodeLeft: GPU 0" in sick.err  # torch's report has it, too
    healthy.until_line(r"^STEPPED", 2)
    (launcher.folder / "stop").touch()
    assert healthy.wait() == 0, healthy.err
    assert "XID 79" in healthy.err
