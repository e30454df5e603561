"""What the tests of NVIDIA's client share."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from fake_agent import Agent, Clock

from unicron_elastic.worker.rank_monitor import client as client_module
from unicron_elastic.worker.rank_monitor.config import CONFIG_PATHS


@pytest.fixture
def agent() -> Iterator[Agent]:
    """This process is a worker with an agent."""
    made = Agent()
    yield made
    made.end()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The client's clock."""
    made = Clock()
    monkeypatch.setattr(client_module, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CONFIG_PATHS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def client(clock: Clock) -> client_module.RankMonitorClient:  # noqa: ARG001 - it must be set before the client reads it
    """A client that has begun."""
    made = client_module.RankMonitorClient()
    made.init_workload_monitoring()
    return made
