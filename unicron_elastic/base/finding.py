"""What a probe has to say: one value for GPUs, the host and a site's own checks.

The levels are those of the Nagios plugin guidelines (nagios-plugins.org, "Plugin Return Codes"), because that is what
the health checks of most sites speak already.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from unicron_elastic.base.fault import SEVERITY_OF, Severity, Status

# Conditions for which the vocabulary of faults has no word: each takes the nearest one, here and nowhere else.
GPU_DEGRADED = Status.GPU_DRIVER_ERROR
LINK_DOWN = Status.OTHER_NETWORK_ERROR
CLOCK_JUMPED = Status.OTHER_SOFTWARE_ERROR
CHECK_FAILED = Status.OTHER_SOFTWARE_ERROR


class Level(IntEnum):
    """How much a finding asks for.

    WARN is worth telling, while the subject still does its work. CRITICAL: work on the subject fails or cannot be
    relied on, so the finding's severity says what to do. The worst of several is their `max`.
    """

    OK = 0
    WARN = 1
    CRITICAL = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that a probe found.

    `probe` names the check ("gpu.ecc", "disk"), `subject` what it is about ("GPU 3 (0000:3b:00.0)", "/scratch"); the
    two together are the finding's identity over time. `status` and `severity` are None only when `level` is OK; at WARN
    they say how bad the fault is should a worker fail with it. `reason` is one full sentence for people. `at` is in
    monotonic seconds of this host.
    """

    probe: str
    level: Level
    status: Status | None
    severity: Severity | None
    subject: str
    reason: str
    at: float


OnFinding = Callable[[Finding], None]
Check = Callable[[float], list[Finding]]


def finding(
    probe: str,
    level: Level,
    status: Status,
    subject: str,
    reason: str,
    *,
    at: float,
    severity: Severity | None = None,
) -> Finding:
    """A finding whose severity is the status's own unless another is given."""
    return Finding(
        probe=probe,
        level=level,
        status=status,
        severity=SEVERITY_OF[status] if severity is None else severity,
        subject=subject,
        reason=reason,
        at=at,
    )


class ProbeNotes:
    """Tells people, once each, what a probe cannot see; safe from any thread."""

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self._say = say
        self._said: set[str] = set()

    def once(self, sentence: str) -> None:
        """Says `sentence`, unless it was said before."""
        if sentence in self._said:
            return
        self._said.add(sentence)
        if self._say is not None:
            self._say(sentence)
