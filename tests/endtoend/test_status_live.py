"""``unicron status`` and ``unicron incidents`` of a cluster that lives, is broken, and is gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_planned_jobs import BIN, Lab, until
from warm_launcher import WarmLaunchers

TRAIN = Path(__file__).parents[2] / "examples" / "two_jobs" / "train.py"

pytestmark = pytest.mark.slow


@pytest.fixture
def lab(tmp_path: Path, warm_launchers: WarmLaunchers) -> Iterator[Lab]:
    """An etcd, and agents that stand for hosts."""
    with Lab(tmp_path, warm_launchers) as made:
        yield made


def _status(lab: Lab) -> tuple[int, dict[str, Any]]:
    result = lab.unicron("status", "--json")
    return result.returncode, json.loads(result.stdout) if result.stdout else {}


def _submit(lab: Lab, name: str) -> None:
    folder = lab.folder / name
    folder.mkdir()
    script = [str(TRAIN), "--steps", "1000000", "--micro-batches", "4", "--device-ms", "5", "--times", str(folder)]
    options = ["--cluster", lab.etcd.endpoint, "--detach", "--rdzv-id", name, "--max-restarts", "9", "--nnodes", "1:2"]
    subprocess.run([str(BIN / "unicron-run"), *options, *script], cwd=lab.folder, check=True, env=os.environ)


def _worker(lab: Lab, host: str) -> int:
    """The training process on a host."""
    agent = next(each for each in lab.agents if each.host == host)
    listed = subprocess.run(
        [str(BIN / "unicron"), "chaos", "list", "--json"], capture_output=True, text=True, check=True
    )
    return next(each["pid"] for each in json.loads(listed.stdout) if each["pid"] in agent.carriers())


def test_what_happens_to_a_cluster_is_seen_and_has_an_exit_code(lab, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(lab.folder / "state"))
    code, empty = _status(lab)
    assert (code, empty["jobs"], empty["nodes"]) == (0, [], [])

    lab.begin("a", "b")
    _submit(lab, "chat")

    def trains() -> dict[str, Any] | None:
        code, told = _status(lab)
        job = next(iter(told["jobs"]), {})
        return told if code == 0 and job.get("nodes") == 2 and (job["step"] or 0) > 5 else None

    told = until(trains, "a job that trains on two nodes", lambda: f"{_status(lab)}\n{lab.logs()}")
    assert told["coordinator"]["host"] in ("a", "b")
    assert told["coordinator"]["since_unix_s"] > 1e9
    assert [(node["host"], node["health"], node["state"], node["job"]) for node in told["nodes"]] == [
        ("a", "well", "working", "chat"),
        ("b", "well", "working", "chat"),
    ]
    assert told["jobs"][0]["steps_per_s"] > 0

    os.kill(_worker(lab, "b"), signal.SIGKILL)

    def is_over() -> dict[str, Any] | None:
        found = [each for each in _status(lab)[1]["incidents"] if each["rank"] is not None]
        return found[0] if found and found[0]["total_ms"] is not None else None

    incident = until(is_over, "an incident that is over", lambda: f"{_status(lab)}\n{lab.logs()}")
    assert (incident["host"], incident["run_id"], incident["is_open"]) == ("b", "chat", False)
    assert "signal 9" in incident["reason"]
    story = subprocess.run(
        [str(BIN / "unicron"), "incidents", f"chat:{incident['number']}"], capture_output=True, text=True, check=True
    ).stdout
    assert "by process supervision" in story
    assert " from a (in the group)" in next(line for line in story.splitlines() if line.startswith("  state "))

    agent = next(each for each in lab.agents if each.host == "b")
    agent.end()
    until(lambda: [node["state"] for node in _status(lab)[1]["nodes"]] == ["working", "lost"], "the loss of b")
    assert "b is lost: its process has ended" in lab.unicron("status").stdout
    assert lab.unicron("nodes", "forget", "b").returncode == 0

    def goes_on() -> str:
        found = lab.unicron("status")
        return found.stdout if found.returncode == 0 and "b is lost" in found.stdout else ""

    text = until(goes_on, "a job that goes on, and why it had to", lambda: lab.unicron("status").stdout)
    assert "\x1b" not in text

    for each in lab.agents:
        each.end()
    until(lambda: _status(lab)[0] == 2, "that nobody coordinates", lambda: str(_status(lab)))
    lab.etcd.stop(timeout_s=0.0)
    gone = lab.unicron("status")
    assert (gone.returncode, gone.stdout) == (3, "")
