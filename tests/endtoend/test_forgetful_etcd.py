"""An etcd that comes back without its data under jobs of the plan: all go on with the same processes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_planned_jobs import BIN, Lab, until
from warm_launcher import WarmLaunchers

pytestmark = pytest.mark.slow

TRAIN = Path(__file__).parents[2] / "examples" / "two_jobs" / "train.py"


@pytest.fixture
def lab(tmp_path: Path, warm_launchers: WarmLaunchers) -> Iterator[Lab]:
    """An etcd, and two agents."""
    with Lab(tmp_path, warm_launchers) as made:
        made.begin("a", "b")
        yield made


def _submit(lab: Lab, name: str, nodes: str) -> None:
    (lab.folder / name).mkdir()
    script = [str(TRAIN), "--steps=1000000", "--micro-batches=4", "--device-ms=5", f"--times={lab.folder / name}"]
    options = ["--cluster", lab.etcd.endpoint, "--detach", "--rdzv-id", name, "--nnodes", nodes]
    options += ["--max-restarts", "9", "--weight", "100" if name == "chat" else "1"]
    subprocess.run([str(BIN / "unicron-run"), *options, *script], cwd=lab.folder, check=True, env=os.environ)


def _status(lab: Lab) -> dict[str, Any]:
    """Of nothing while the store cannot be read."""
    done = lab.unicron("status", "--json")
    return dict(json.loads(done.stdout)) if done.returncode < 3 else {"coordinator": None, "jobs": []}


def _jobs(lab: Lab) -> dict[str, Any]:
    return {job["job"]: job for job in _status(lab)["jobs"]}


def _processes(lab: Lab) -> set[int]:
    return {pid for agent in lab.agents for pid in agent.carriers()}


@pytest.fixture
def coordinator(lab: Lab) -> Iterator[subprocess.Popen[bytes]]:
    """One without a node, which coordinates."""
    command = [str(BIN / "unicron"), "coordinator", "--endpoint", lab.etcd.endpoint, "--address", "127.0.0.1"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env={**os.environ, "UNICRON_NODE_NAME": "c"}) as process:
        until(lambda: (_status(lab)["coordinator"] or {}).get("is_dedicated"), "a coordinator without a node")
        yield process
        process.kill()


@pytest.mark.parametrize(
    ("jobs", "training"), [({"chat": "2", "code": "2"}, {"chat"}), ({"chat": "1", "code": "1"}, {"chat", "code"})]
)
def test_no_job_stands_still_or_is_forgotten(lab: Lab, jobs: dict[str, str], training: set[str]) -> None:
    """One that waits for its nodes is there as well afterwards."""
    _check(lab, jobs, training, lambda: None)


def test_agents_alone_tell_what_they_run(lab: Lab, coordinator: subprocess.Popen[bytes]) -> None:
    """Though who coordinated is gone with etcd, as with the host of both."""
    _check(lab, {"chat": "1", "code": "1"}, {"chat", "code"}, coordinator.kill)


def test_a_node_that_is_lost_with_etcd_is_missed_afterwards(lab: Lab) -> None:
    def states() -> dict[str, str]:
        return {node["host"]: node["state"] for node in _status(lab).get("nodes", [])}

    who = _status(lab)["coordinator"]["host"]
    other = next(each for each in lab.agents if each.host != who)
    until(lambda: len(states()) == 2, "both nodes")
    lab.etcd.stop(timeout_s=0.0)
    other.end()
    lab.etcd.start()
    until(lambda: states() == {who: "idle", other.host: "lost"}, "that it is lost", lambda: f"{states()}\n{lab.logs()}")
    assert lab.unicron("status").returncode == 1


def _check(lab: Lab, jobs: dict[str, str], training: set[str], meanwhile: Callable[[], None]) -> None:
    for name, nodes in jobs.items():
        _submit(lab, name, nodes)

    def trains() -> dict[str, Any]:
        found = _jobs(lab)
        are_well = {name for name, job in found.items() if (job["step"] or 0) > 20}
        return found if are_well == training and found.keys() == jobs.keys() else {}

    before = until(trains, f"steps of {training}", lambda: f"{_jobs(lab)}\n{lab.logs()}")
    processes = _processes(lab)
    lab.etcd.stop(timeout_s=0.0)  # its folder goes with it
    meanwhile()
    lab.etcd.start()

    def goes_on() -> bool:
        found = _jobs(lab)
        more = {name for name in training if name in found and (found[name]["step"] or 0) > before[name]["step"] + 100}
        return found.keys() == jobs.keys() and more == training

    until(goes_on, "both jobs, and 100 steps more", lambda: f"{_jobs(lab)}\n{lab.logs()}")
    _submit(lab, "late", "9")
    until(
        lambda: "needs at least 9" in _jobs(lab)["late"]["why"], "another plan", lambda: f"{_jobs(lab)}\n{lab.logs()}"
    )
    steps = {name: _jobs(lab)[name]["step"] for name in training}
    until(
        lambda: all(_jobs(lab)[name]["step"] > step for name, step in steps.items()), "steps after that plan", lab.logs
    )
    after = _jobs(lab)
    for name in training:
        same = ("start", "generation", "world", "restarts_used", "nodes", "state")
        assert [after[name][each] for each in same] == [before[name][each] for each in same]
    assert _processes(lab) >= processes, lab.logs()
    assert {name: after[name]["state"] for name in jobs} == {name: before[name]["state"] for name in jobs}
    assert "taken for lost" not in lab.logs()
