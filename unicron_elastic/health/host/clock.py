"""Whether the wall clock jumped: logs, tokens and file times are wrong then, and leases of others may have run out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from unicron_elastic.base.finding import CLOCK_JUMPED, Finding, Level, finding

_TRIES = 3
_STEADY_S = 0.05
# How long a jump stays a finding.
_TOLD_FOR_S = 60.0


@dataclass(frozen=True, slots=True)
class Clocks:
    """Three clocks read at the same time. `since_boot` goes on while the machine sleeps, `monotonic` does not."""

    monotonic: float
    wall: float
    since_boot: float


def read_clocks() -> Clocks:
    """Reads all three; again if something came in between."""
    for _ in range(_TRIES):
        clocks = Clocks(time.monotonic(), time.time(), time.clock_gettime(time.CLOCK_BOOTTIME))
        if time.monotonic() - clocks.monotonic < _STEADY_S:
            break
    return clocks


class ClockProbe:
    """Warns when the wall clock moved against CLOCK_MONOTONIC by more than `most_s` between two checks.

    NTP moves a clock in steps that small, or slowly, unless something is wrong.
    """

    def __init__(self, *, most_s: float = 1.0, clocks: Callable[[], Clocks] = read_clocks) -> None:
        self._most_s = most_s
        self._clocks = clocks
        self._before = clocks()
        self._jumped_at = 0.0
        self._reason = ""

    def check(self, now: float) -> list[Finding]:
        """A warning for a minute from the check that saw the jump, `now` being monotonic seconds."""
        before, after = self._before, self._clocks()
        self._before = after
        elapsed = after.monotonic - before.monotonic
        jump = after.wall - before.wall - elapsed
        if abs(jump) > self._most_s:
            slept = after.since_boot - before.since_boot - elapsed
            direction = "forward" if jump > 0 else "back"
            why = f", for the machine slept for {slept:.1f} s" if slept > self._most_s else ""
            self._reason = f"The wall clock jumped {direction} by {abs(jump):.1f} s{why}."
            self._jumped_at = now
        if not self._reason or now - self._jumped_at >= _TOLD_FOR_S:
            return []
        return [finding("clock", Level.WARN, CLOCK_JUMPED, "wall clock", self._reason, at=now)]
