"""Jumps of the wall clock."""

from __future__ import annotations

import time

import pytest
from health_lab import only

from unicron_elastic.base.finding import CLOCK_JUMPED, Finding, Level
from unicron_elastic.health.host.clock import ClockProbe, Clocks, read_clocks


class Times:
    """Clocks that go on together, unless told otherwise."""

    def __init__(self) -> None:
        self.now = Clocks(monotonic=50.0, wall=1e9, since_boot=50.0)
        self.probe = ClockProbe(clocks=lambda: self.now)

    def after(self, elapsed: float, jump: float = 0.0, slept: float = 0.0) -> list[Finding]:
        now = self.now
        self.now = Clocks(now.monotonic + elapsed, now.wall + elapsed + jump, now.since_boot + elapsed + slept)
        return self.probe.check(self.now.monotonic)


def test_clocks_that_agree() -> None:
    times = Times()
    assert [times.after(elapsed) for elapsed in (5.0, 0.0, 3600.0)] == [[], [], []]


def test_slow_correction_is_no_jump() -> None:
    times = Times()
    assert [times.after(5.0, jump=0.9) for _ in range(5)] == [[]] * 5


@pytest.mark.parametrize(
    ("jump", "slept", "reason"),
    [
        (3.25, 0.0, "The wall clock jumped forward by 3.2 s."),
        (-7200.0, 0.0, "The wall clock jumped back by 7200.0 s."),
        (60.0, 60.0, "The wall clock jumped forward by 60.0 s, for the machine slept for 60.0 s."),
    ],
)
def test_a_jump_is_a_warning_for_a_minute(jump: float, slept: float, reason: str) -> None:
    times = Times()
    found = only(times.after(5.0, jump, slept))
    assert (found.probe, found.level, found.status, found.reason) == ("clock", Level.WARN, CLOCK_JUMPED, reason)
    assert [len(times.after(29.0)) for _ in range(3)] == [1, 1, 0]


def test_a_second_jump_is_the_one_that_is_told() -> None:
    times = Times()
    times.after(5.0, jump=5.0)
    assert "back by 2.0 s" in only(times.after(5.0, jump=-2.0)).reason


def test_this_machine() -> None:
    probe = ClockProbe()
    assert probe.check(time.monotonic()) == []
    clocks = read_clocks()
    assert abs(clocks.wall - time.time()) < 5.0
    assert clocks.since_boot >= clocks.monotonic - 1.0
