"""``unicron status`` misses an agent that was killed, by its host's name, until it returns or is forgotten."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_planned_jobs import Lab, until
from warm_launcher import WarmLaunchers

pytestmark = pytest.mark.slow


@pytest.fixture
def lab(tmp_path: Path, warm_launchers: WarmLaunchers) -> Iterator[Lab]:
    with Lab(tmp_path, warm_launchers) as made:
        yield made


def _until(lab: Lab, code: int, *states: tuple[str, str]) -> dict[str, Any]:
    """Waits for this exit code, and these hosts with their states."""
    found: list[Any] = []

    def is_so() -> bool:
        done = lab.unicron("status", "--json")
        told = json.loads(done.stdout) if done.stdout else {"nodes": []}
        found[:] = [told, done.returncode, sorted((node["host"], node["state"]) for node in told["nodes"])]
        return found[1:] == [code, sorted(states)]

    until(is_so, f"exit code {code} and {states}", lambda: f"{found}\n{lab.logs()}")
    return dict(found[0])


def test_a_lost_idle_node_is_missed_until_it_returns_or_is_forgotten(lab: Lab) -> None:
    a, b = lab.begin("a", "b")
    _until(lab, 0, ("a", "idle"), ("b", "idle"))

    b.process.kill()
    told = _until(lab, 1, ("a", "idle"), ("b", "lost"))
    assert told["verdict"]["level"] == "degraded"
    lost = next(node for node in told["nodes"] if node["host"] == "b")
    assert lost["lost_why"] == "b is lost: its process has ended."
    assert 0.0 <= told["at_unix_s"] - lost["lost_unix_s"] < 60.0
    assert told["verdict"]["reason"].startswith("b is lost: its process has ended, ")

    lab.begin("b")
    _until(lab, 0, ("a", "idle"), ("b", "idle"))

    a.process.kill()  # which coordinates
    _until(lab, 1, ("a", "lost"), ("b", "idle"))
    assert lab.unicron("nodes", "forget", "a").stdout == "node a is forgotten.\n"
    _until(lab, 0, ("b", "idle"))

    lab.agents[-1].process.send_signal(signal.SIGTERM)
    assert lab.agents[-1].process.wait(30.0) == 0
    _until(lab, 0)
