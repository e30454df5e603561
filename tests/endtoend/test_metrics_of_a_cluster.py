"""A coordinator and an agent are asked for their metrics while a job runs, and the agent is killed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from free_port import free_port
from scraping import asked, scraped

from unicron_elastic.rendezvous.store.server import EmbeddedEtcd

pytestmark = pytest.mark.slow

TRAIN = """
import os, time
import torch

weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
while not os.path.exists("stop"):
    weight.grad = torch.ones(1)
    optimizer.step()
    time.sleep(0.02)
"""


@pytest.fixture
def etcd() -> Iterator[EmbeddedEtcd]:
    with EmbeddedEtcd() as server:
        yield server


def test_a_cluster_tells_of_itself_its_jobs_and_what_it_loses(launcher: Any, etcd: EmbeddedEtcd) -> None:
    launcher.script("train.py", TRAIN)
    where = {"UNICRON_ETCD_ENDPOINT": etcd.endpoint}
    ports = {"coordinator": free_port(), "agent": free_port()}
    runs = {
        what: launcher.start(
            what, "--address", "127.0.0.1", tool="unicron",
            env={**where, "UNICRON_NODE_NAME": what[0], "UNICRON_METRICS_PORT": str(port)},
        )
        for what, port in ports.items()
    }  # fmt: skip
    for what, port in ports.items():
        runs[what].until(lambda port=port: asked(port, "/readyz") == (200, "ok\n"), "an agent or coordinator")
        assert asked(port, "/healthz") == (200, "ok\n")
    assert scraped(ports["coordinator"])["unicron_coordinates",] == 1
    assert scraped(ports["agent"])["unicron_coordinates",] == 0
    assert scraped(ports["agent"])["unicron_node_state", "a", "idle"] == 1

    job = launcher.start("--cluster", etcd.endpoint, "--nnodes=1", "--rdzv-id=job", "train.py")

    def stepped() -> dict[tuple[str, ...], float] | None:
        found = scraped(ports["agent"])
        return found if found.get(("unicron_step", "job"), 0) > 20 else None

    found = job.until(stepped, "steps")
    assert found["unicron_node_state", "a", "working"] == 1
    assert found["unicron_job_phase", "running", "job"] == 1
    assert "No metrics are served" not in job.err + runs["agent"].err

    def achieved() -> dict[tuple[str, ...], float] | None:
        found = scraped(ports["coordinator"])
        return found if found.get(("unicron_job_achieved_waf", "job"), 0) > 0 else None

    planned = job.until(achieved, "what the job achieves")
    assert planned["unicron_job_plan_nodes", "job"] == 1
    assert planned["unicron_job_nodes", "job", "working"] == 1
    assert planned["unicron_plan_waf",] > 0
    assert planned["unicron_achieved_waf",] == planned["unicron_job_achieved_waf", "job"]
    assert planned["unicron_lost_nodes_total",] == 0

    drained = launcher.run("drain", "ghost", "--absent", "--reason", "a test", tool="unicron", env=where)
    assert drained.process.returncode == 0, drained.err
    coordinator = runs["coordinator"]
    coordinator.until(lambda: scraped(ports["coordinator"]).get(("unicron_node_quarantined", "ghost")) == 1, "a drain")

    runs["agent"].process.kill()
    coordinator.until(lambda: scraped(ports["coordinator"])["unicron_lost_nodes_total",] == 1, "a loss")
    coordinator.until(
        lambda: scraped(ports["coordinator"])["unicron_cluster_nodes", "working"] == 0, "a cluster without it"
    )
    assert asked(ports["coordinator"], "/readyz") == (200, "ok\n")
    coordinator.process.terminate()
    assert coordinator.wait() == 0
    assert asked(ports["coordinator"], "/healthz") == (0, "")
