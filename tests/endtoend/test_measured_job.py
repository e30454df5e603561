"""How fast a planned job trains, and for how long it stood still: as its agents tell the store."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from unicron_elastic.planning.model.measured import MeasuredJob
from unicron_elastic.rendezvous.records.plan_keys import PlannedJobKeys
from unicron_elastic.rendezvous.store.address import StoreAddress
from unicron_elastic.rendezvous.store.etcd import EtcdStore
from unicron_elastic.rendezvous.store.server import EmbeddedEtcd

pytestmark = pytest.mark.trains

STEP_S = 0.02
IN_PLACE = str(Path(__file__).with_name("train_in_place.py"))
TRAIN = f"""
import os, time, torch, unicron_elastic
optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
unicron_elastic.flops_per_step(1e9 * int(os.environ["WORLD_SIZE"]))
os.write(1, f"WORKS of {{os.environ['WORLD_SIZE']}}\\n".encode())
steps = 0
while not os.path.exists(os.path.join(os.environ["PROBE"], "stop")):
    time.sleep({STEP_S})
    optimizer.step()
    steps += 1
    if steps == 100:
        os.write(1, b"STEPPED\\n")
"""


@pytest.fixture
def etcd() -> Iterator[EmbeddedEtcd]:
    with EmbeddedEtcd() as server:
        yield server


@pytest.fixture
def measured(etcd: EmbeddedEtcd) -> Iterator[Callable[[], MeasuredJob]]:
    """What the store knows of the job by now."""
    with EtcdStore(StoreAddress.parse(etcd.endpoint)) as store:

        def read() -> MeasuredJob:
            entry = store.read(PlannedJobKeys("job").measured).entry
            return MeasuredJob() if entry is None else MeasuredJob.from_json(entry.value)

        yield read


@pytest.fixture
def start(launcher: Any, etcd: EmbeddedEtcd) -> Callable[..., Any]:
    """Starts an agent of the job."""

    def started(node: str, *script: str, **env: str) -> Any:
        return launcher.start(
            "--nnodes=1:2", "--nproc-per-node=1", "--rdzv-backend=unicron", f"--rdzv-endpoint={etcd.endpoint}",
            "--rdzv-id=job", "--rdzv-conf=last_call_timeout=1,lease_ttl=30", "--max-restarts=3",
            "--local-addr=127.0.0.1", *script, env={"UNICRON_NODE_NAME": node, **env},
        )  # fmt: skip

    return started


def _nodes(job: MeasuredJob) -> list[int]:
    return [each.nodes for each in job.steps]


def test_what_a_planned_job_measures_is_in_the_store(
    start: Callable[..., Any], launcher: Any, measured: Callable[[], MeasuredJob]
) -> None:
    script = launcher.script("train.py", TRAIN)
    runs = {name: start(name, script, UNICRON_PLANNED_JOB="job") for name in "ab"}
    for run in runs.values():
        run.until_line(r"^WORKS of 2$")
    job = runs["a"].until(lambda: 2 in _nodes(found := measured()) and found, "two nodes, measured")
    (two,) = (each for each in job.steps if each.nodes == 2)
    assert STEP_S <= two.step_s < 10 * STEP_S
    assert two.flops_per_step == 2e9
    assert not job.is_global_batch_fixed
    assert job.now is not None
    assert job.now.nodes == 2
    assert 4 * STEP_S < job.now.unsaved_s < 60.0, "it has saved nothing since its first step"
    assert abs(time.time() - job.now.at_unix_s) < 30.0

    before = len(job.shrink_s)
    killed = runs.pop("a")
    os.kill(killed.process.pid, signal.SIGKILL)
    killed.wait()
    (left,) = runs.values()
    left.until_line(r"^WORKS of 1$")
    job = left.until(lambda: len((found := measured()).shrink_s) > before and found, "the job with one node")
    (one,) = (each for each in job.steps if each.nodes == 1)
    assert STEP_S <= one.step_s < 10 * STEP_S
    assert one.flops_per_step == 1e9
    assert job.now is not None
    assert job.now.nodes == 1
    assert STEP_S <= job.shrink_s[-1] < 60.0, "a worker has begun and stepped once meanwhile"
    (launcher.folder / "stop").touch()
    assert left.wait() == 0


@pytest.mark.slow
def test_one_that_goes_on_in_place_is_measured_too(
    start: Callable[..., Any], measured: Callable[[], MeasuredJob]
) -> None:
    script = (IN_PLACE, "--plain", "--steps=100000", "--micro-batches=4", "--step-s=0.01")
    runs = {name: start(name, *script, UNICRON_PLANNED_JOB="job") for name in "ab"}
    job = runs["a"].until(lambda: 2 in _nodes(found := measured()) and found, "two nodes, measured")
    assert job.is_global_batch_fixed
    killed = runs.pop("b")
    os.kill(killed.process.pid, signal.SIGKILL)
    killed.wait()
    (left,) = runs.values()
    job = left.until(lambda: (found := measured()).shrink_s and found, "the job with one node")
    (one,), (two,) = ([each for each in job.steps if each.nodes == nodes] for nodes in (1, 2))
    assert one.step_s > 1.3 * two.step_s  # the same samples
    assert job.shrink_s[-1] < 30.0
    start("c", *script, UNICRON_PLANNED_JOB="job")
    before = len(job.grow_s)
    job = left.until(lambda: len((found := measured()).grow_s) > before and found, "the job with another node")
    assert job.grow_s[-1] < 30.0
    assert job.now is not None
    assert job.now.nodes == 2


@pytest.mark.slow
def test_a_job_that_nobody_planned_tells_nothing(start: Callable[..., Any], launcher: Any, etcd: EmbeddedEtcd) -> None:
    run = start("a", launcher.script("train.py", TRAIN))
    run.until_line(r"^STEPPED$")
    (launcher.folder / "stop").touch()
    assert run.wait() == 0
    with EtcdStore(StoreAddress.parse(etcd.endpoint)) as store:
        assert store.read(PlannedJobKeys("job").measured).entry is None
