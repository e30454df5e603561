"""What was told of: so that people hear of each change once, and of its end. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from unicron_elastic.base.finding import Finding, Level

_EVENT_QUIET_S = 60.0
_EVENTS_KEPT = 1000


@dataclass(slots=True)
class _Entry:
    source: str
    latest: Finding
    told: Finding  # the worst of what was told
    absences: int = 0


class FindingLedger:
    """The findings that hold now, by probe and subject.

    One is over when its source did not find it at `calm_checks` checks in a row: what comes and goes around a limit is
    told once, not every few seconds.
    """

    def __init__(self, *, calm_checks: int = 2) -> None:
        self._calm_checks = calm_checks
        self._entries: dict[tuple[str, str], _Entry] = {}
        self._events: dict[tuple[str, str, str], float] = {}

    def current(self) -> list[Finding]:
        """All that holds, the worst first."""
        latest = (entry.latest for entry in self._entries.values())
        return sorted(latest, key=lambda found: (-found.level, found.probe, found.subject))

    def update(self, source: str, found: Iterable[Finding], now: float) -> list[Finding]:
        """Takes all that a check of `source` found at `now`; returns what is to be told, ends as findings at OK."""
        worst: dict[tuple[str, str], Finding] = {}
        for each in found:
            if each.level is not Level.OK:
                key = (each.probe, each.subject)
                worst[key] = max(worst.get(key, each), each, key=_badness)
        told = [each for key, each in worst.items() if self._take(source, key, each)]
        for key, entry in list(self._entries.items()):
            if entry.source == source and key not in worst:
                entry.absences += 1
                if entry.absences >= self._calm_checks:
                    del self._entries[key]
                    told.append(_end(entry.latest, now))
        return told

    def event(self, found: Finding) -> bool:
        """Whether to tell of something that happened: not if the same was told within the last minute, or still holds.

        A check that finds the same afterwards has nothing new to tell either.
        """
        entry = self._entries.get((found.probe, found.subject))
        if self._was_event(found) or (entry is not None and entry.latest.reason == found.reason):
            return False
        if len(self._events) >= _EVENTS_KEPT:
            self._events.clear()
        self._events[found.probe, found.subject, found.reason] = found.at
        return True

    def _was_event(self, found: Finding) -> bool:
        at = self._events.get((found.probe, found.subject, found.reason))
        return at is not None and found.at - at < _EVENT_QUIET_S

    def _take(self, source: str, key: tuple[str, str], found: Finding) -> bool:
        entry = self._entries.get(key)
        if entry is None:
            self._entries[key] = _Entry(source, found, found)
            return not self._was_event(found)
        entry.latest = found
        entry.absences = 0
        if _badness(found) <= _badness(entry.told):
            return False
        entry.told = found
        return True


def _badness(found: Finding) -> tuple[int, int]:
    """Order findings by level, and then by severity, of which 1 is the worst."""
    return found.level, -(found.severity or 0)


def _end(found: Finding, now: float) -> Finding:
    return Finding(
        probe=found.probe,
        level=Level.OK,
        status=None,
        severity=None,
        subject=found.subject,
        reason=f"No longer so: {found.reason}",
        at=now,
    )
