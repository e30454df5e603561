"""A coordinator and an agent serve the web page while a job runs; a worker is killed, and then the coordinator."""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client")  # of scraping

from free_port import free_port

from unicron_elastic.rendezvous.records.cluster import SECRET
from unicron_elastic.rendezvous.store.address import StoreAddress
from unicron_elastic.rendezvous.store.etcd import EtcdStore
from unicron_elastic.rendezvous.store.server import EmbeddedEtcd

pytestmark = pytest.mark.slow

TRAIN = """
import os, time
import torch

open(f"pid-{os.environ['RANK']}", "w").write(str(os.getpid()))
weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
while not os.path.exists("stop"):
    weight.grad = torch.ones(1)
    optimizer.step()
    time.sleep(0.02)
"""


class Viewer:
    """Somebody who has signed in to one process."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._cookie = ""

    def sign_in(self, password: str) -> int:
        """Status."""
        status, headers, _ = self._ask("POST", "/sign-in", json.dumps({"password": password}))
        self._cookie = headers.get("Set-Cookie", "").partition(";")[0]
        return status

    def get(self, path: str) -> tuple[int, Any]:
        """Status, 0 while nobody listens, and what was told."""
        try:
            status, _, text = self._ask("GET", path)
        except OSError:
            return 0, None
        return status, json.loads(text)

    def state(self) -> Any:
        """The cluster; None while it is not shown here."""
        status, told = self.get("/state")
        return told["state"] if status == 200 else None

    def _ask(self, method: str, path: str, sent: str | None = None) -> tuple[int, Any, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=20)
        try:
            connection.request(method, path, sent, {"Cookie": self._cookie, "Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()


@pytest.fixture
def etcd() -> Iterator[EmbeddedEtcd]:
    with EmbeddedEtcd() as server:
        yield server


def command_lines() -> str:
    """Of all processes that are there."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            found.append(Path(f"/proc/{name}/cmdline").read_text(errors="replace"))
        except OSError:  # it has just ended
            pass
    return "\n".join(found)


def test_a_cluster_is_shown_and_the_next_coordinator_goes_on_showing_it(launcher: Any, etcd: EmbeddedEtcd) -> None:
    launcher.script("train.py", TRAIN)
    where = {"UNICRON_ETCD_ENDPOINT": etcd.endpoint}
    ports = {"coordinator": free_port(), "agent": free_port()}
    runs = {
        what: launcher.start(
            what, "--address", "127.0.0.1", "--web-port", str(port), tool="unicron",
            env={**where, "UNICRON_NODE_NAME": what[0]},
        )
        for what, port in ports.items()
    }  # fmt: skip
    for run in runs.values():
        run.until(lambda run=run: "The web page of the cluster is at http://127.0.0.1:" in run.err, "a page")
    page, other = Viewer(ports["coordinator"]), Viewer(ports["agent"])
    assert page.get("/state") == (401, {"error": "Sign in."})
    told = json.loads(launcher.run("web", "--json", tool="unicron", env=where).out)
    assert told["coordinator"] == "c"
    assert launcher.run("web", "--only-password", tool="unicron", env=where).out == told["password"] + "\n"
    said = launcher.run("web", tool="unicron", env=where).out
    assert f"ssh -L {ports['coordinator']}:127.0.0.1:{ports['coordinator']} c" in said
    assert page.sign_in("wrong") == 403
    assert page.sign_in(told["password"]) == other.sign_in(told["password"]) == 204
    runs["agent"].until(lambda: [n["host"] for n in (page.state() or {"nodes": []})["nodes"]] == ["a", "c"], "both")
    assert other.get("/state")[0] == 409
    assert "c coordinates the cluster; its page can be reached from that host alone" in other.get("/state")[1]["error"]

    job = launcher.start("--cluster", etcd.endpoint, "--nnodes=1", "--rdzv-id=job", "--max-restarts=3", "train.py")
    trains = lambda: [each for each in page.state()["jobs"] if (each["step"] or 0) > 10]  # noqa: E731
    (shown,) = job.until(trains, "steps on the page")
    assert (shown["job"], shown["state"], shown["nodes"]) == ("job", "training", 1)
    os.kill(int((launcher.folder / "pid-0").read_text()), signal.SIGKILL)
    over = lambda: [each for each in page.state()["incidents"] if each["total_ms"]]  # noqa: E731
    (incident,) = job.until(over, "the incident, once it is over")
    assert incident["host"] == "a"
    assert "signal 9" in incident["reason"]
    assert incident["phases_ms"].keys() == {"noticed", "stopped", "regrouped", "first_step"}
    points = job.until(
        lambda: [each for each in page.get("/waf")[1]["points"] if each[1] is not None], "the plan's WAF"
    )
    assert points[-1][0] > points[0][0] or len(points) == 1

    runs["coordinator"].process.kill()
    state = job.until(other.state, "the agent coordinates, and shows")
    assert state["coordinator"]["host"] == "a"
    assert [each["reason"] for each in state["incidents"]] == [incident["reason"]]  # it was in the store

    with EtcdStore(StoreAddress.parse(etcd.endpoint)) as store:
        entry = store.read(SECRET).entry
    assert entry is not None
    secret = entry.value.decode()
    seen = "\n".join([command_lines(), *(run.out + run.err for run in (*runs.values(), job)), json.dumps(state)])
    assert secret not in seen
    assert told["password"] not in seen
    (launcher.folder / "stop").touch()
    assert job.wait() == 0
