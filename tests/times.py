"""Where the time of a run of the tests goes: seconds and seconds of processor, by folder of tests."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Generator, Mapping
from pathlib import PurePath
from typing import Any

import pytest

CPU = "cpu_s"
TICKS = os.sysconf("SC_CLK_TCK")
LONGEST = 1 << 16  # of what is read
SHORT_S = 0.02  # what children do in so short a phase is added to a later one: to look takes milliseconds


def _of_children_that_run() -> float:
    """Return the processor seconds of this process's children, and of those of theirs that have ended."""
    threads = os.listdir("/proc/self/task")  # some tests leave a hundred
    children = (pid for thread in threads for pid in _text(f"/proc/self/task/{thread}/children").split())
    ticks = sum(sum(map(int, _text(b"/proc/%b/stat" % pid).rpartition(b")")[2].split()[11:15])) for pid in children)
    return ticks / TICKS


def _text(path: str | bytes) -> bytes:
    """Read what the system says of a thread or process, which may have ended by now: then that is nothing."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return b""
    try:
        return os.read(file, LONGEST)
    except OSError:
        return b""
    finally:
        os.close(file)


class _Meter:
    """A `_Meter` knows the processor seconds of this process, and of all that it has started."""

    def __init__(self) -> None:
        self._ended, self._running = 0.0, 0.0  # of its children
        self._seen = 0.0
        self.since_last_call(can_wait=False)

    def since_last_call(self, *, can_wait: bool) -> float:
        """Return those since the last call, without those of children that run if that ``can_wait``."""
        own_user, own_system, *of_ended = os.times()[:4]
        if not can_wait or sum(of_ended) != self._ended:
            self._ended = sum(of_ended)
            with contextlib.suppress(OSError):  # of the listing, while threads come and go
                self._running = _of_children_that_run()
        before, self._seen = self._seen, own_user + own_system + self._ended + self._running
        return self._seen - before


_METER = _Meter()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note in the report of each phase of a test how much processor time it took."""
    report = yield
    setattr(report, CPU, _METER.since_last_call(can_wait=call.duration < SHORT_S))
    return report


def folder_of(nodeid: str) -> str:
    """Return the folder of a test."""
    return str(PurePath(nodeid.partition("::")[0]).parent)


def table(reports: Mapping[str, list[Any]]) -> list[str]:
    """Make the lines of a table of the folders, those that took the longest first."""
    seconds, cpu, tests = Counter[str](), Counter[str](), Counter[str]()
    for report in (report for found in reports.values() for report in found if hasattr(report, CPU)):
        folder = folder_of(report.nodeid)
        seconds[folder] += report.duration
        cpu[folder] += getattr(report, CPU)
        tests[folder] += report.when == "setup"
    rows = [(folder, tests[folder], seconds[folder], cpu[folder]) for folder, _ in seconds.most_common()]
    rows.append(("all", tests.total(), seconds.total(), cpu.total()))
    heading = ["| folder | tests | seconds | of a processor |", "|---|---:|---:|---:|"]
    return heading + [f"| {folder} | {count} | {took:.1f} | {burnt:.1f} |" for folder, count, took, burnt in rows]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table at the end of a run."""
    terminalreporter.section("seconds of tests by folder")
    for line in table(terminalreporter.stats):
        terminalreporter.write_line(line)
