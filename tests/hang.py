"""Ends tests that hang where pytest-timeout cannot: in native code, or in a process that stands still."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Generator

import pytest

GRACE_S = 60.0  # that pytest-timeout has for it
NO_TEST_TAKES_S = 900.0
LOOKED_AT_EVERY_S = 10.0

_stderr: list[int] = []
_began: dict[str, float] = {}


def pytest_configure(config: pytest.Config) -> None:
    """Keep the standard error stream, which is captured while tests run, and watch tests that others run."""
    _stderr[:] = [os.dup(sys.__stderr__.fileno())] if sys.__stderr__ is not None else []
    if not hasattr(config, "workerinput"):
        threading.Thread(target=_watch, name="hanging-tests", daemon=True).start()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End the process with what each of its threads does, a while after pytest-timeout should have ended the test."""
    marker = item.get_closest_marker("timeout")
    limit_s = float(marker.args[0] if marker is not None else item.config.getini("timeout"))
    faulthandler.dump_traceback_later(limit_s + GRACE_S, exit=True, file=_stderr[0])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_runtest_logstart(nodeid: str) -> None:
    """Note when a test began, here or in a process of xdist."""
    _began[nodeid] = time.monotonic()


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Note that a test has ended."""
    _began.pop(nodeid, None)


def too_long(began: dict[str, float], now: float) -> list[str]:
    """Return a sentence for each test that has run longer than any does."""
    return [f"{test} has run for {now - at:.0f} s" for test, at in began.items() if now - at > NO_TEST_TAKES_S]


def _watch() -> None:
    while not (sentences := too_long(dict(_began), time.monotonic())):
        time.sleep(LOOKED_AT_EVERY_S)
    os.write(_stderr[0], "".join(f"\n{sentence}, which ends the run\n" for sentence in sentences).encode())
    os.kill(os.getpid(), signal.SIGINT)
