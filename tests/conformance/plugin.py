"""The conftest.py of the copied tests: keeps run.py's journal, stands in for etcd, ends what a test leaves behind."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import socket
from collections.abc import Iterator

import psutil
import pytest
from torch.distributed.elastic.rendezvous import etcd_server


class NoEtcd:
    """Takes the place of PyTorch's EtcdServer, whose program is seldom there: an endpoint that c10d can use."""

    def start(self) -> None:
        """There is nothing to start: the first agent that comes hosts the c10d store."""

    def stop(self) -> None:
        """Nothing was started."""

    def get_endpoint(self) -> str:
        """An address that is free now."""
        with socket.create_server(("localhost", 0)) as server:
            return f"localhost:{server.getsockname()[1]}"


etcd_server.EtcdServer = NoEtcd


@pytest.fixture(autouse=True)
def fresh_endpoint(request: pytest.FixtureRequest) -> None:
    """A rendezvous endpoint for each test: unlike an etcd server, a c10d store cannot serve one job after another."""
    if hasattr(request.instance, "_etcd_endpoint"):
        request.instance._etcd_endpoint = NoEtcd().get_endpoint()


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    """Kills what the test started and did not end; multiprocessing's own helper stays."""
    yield
    for process in psutil.Process().children(recursive=True):
        try:
            if not any("resource_tracker" in argument for argument in process.cmdline()):
                process.kill()
        except psutil.NoSuchProcess:
            pass
    multiprocessing.active_children()  # reaps


def note(**entry: object) -> None:
    """Appends a line to the journal."""
    with open(os.environ["CONFORMANCE_JOURNAL"], "a") as journal:
        journal.write(json.dumps(entry) + "\n")


_worst: dict[str, tuple[str, float, str]] = {}


def pytest_runtest_logstart(nodeid: str) -> None:
    """A test begins."""
    _worst[nodeid] = ("passed", 0.0, "")
    note(test=nodeid, at=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """One phase of a test (setup, call, teardown) is over: the first that did not pass names the outcome."""
    outcome, seconds, reason = _worst[report.nodeid]
    if outcome == "passed" and report.outcome != "passed":
        outcome, reason = report.outcome, why(report)
    _worst[report.nodeid] = (outcome, seconds + report.duration, reason)


def pytest_runtest_logfinish(nodeid: str) -> None:
    """A test is over."""
    outcome, seconds, reason = _worst[nodeid]
    note(test=nodeid, at=nodeid.partition("::")[0], outcome=outcome, seconds=round(seconds, 2), reason=reason)
    # Some tests leave an agent in a cycle of mocks and tracebacks, and in it a store with threads. Where the next test
    # forks, collecting that in the child would end the child.
    gc.collect()


def pytest_sessionfinish(exitstatus: int) -> None:
    """All tests are over, unless pytest gives up on a file that it cannot import."""
    if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        note(at=None)


def why(report: pytest.TestReport) -> str:
    """The last line of what pytest says of a phase that did not pass."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2]
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else report.longreprtext
    return text.strip().splitlines()[0] if text.strip() else ""
