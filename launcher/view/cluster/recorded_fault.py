"""The same fault as several nodes recorded it, told once. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from unicron_elastic.base.incident import Incident
from unicron_elastic.launcher.view.cluster.overview import IncidentLine

TOGETHER_S = 5.0  # nodes hear of a fault on another one within that


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedFault:
    """A fault by the record of the node where it was, or else of the first that noticed.

    ``records``: host and number of each record of it, with its time.
    """

    cause: IncidentLine
    at_unix_s: float
    records: tuple[tuple[str, int, str], ...]
    is_open: bool
    total_ms: float | None  # of the node that took longest

    @property
    def nodes(self) -> int:
        """That recorded it."""
        return len(self.records)


def seen_together(incidents: Iterable[IncidentLine]) -> list[RecordedFault]:
    """The newest first. Records of one run that lie close together, of different nodes, are of one fault.

    One that comes when training goes on again after the fault before is of another.
    """
    groups: list[list[IncidentLine]] = []
    latest: dict[str, list[IncidentLine]] = {}  # by run
    for incident in sorted(incidents, key=moment_s):
        group = latest.get(incident.run_id)
        is_new = group is None or moment_s(incident) > min(moment_s(group[0]) + TOGETHER_S, _over_s(group))
        if group is None or is_new or any(each.host == incident.host for each in group):
            group = latest[incident.run_id] = []
            groups.append(group)
        group.append(incident)
    return [_seen(group) for group in reversed(groups)]


def moment_s(incident: Incident | IncidentLine) -> float:
    """Unix seconds; 0.0 if the record does not say."""
    try:
        return datetime.fromisoformat(incident.time).timestamp()
    except (ValueError, OverflowError, OSError):
        return 0.0


def _over_s(group: list[IncidentLine]) -> float:
    """When training went on again, unix seconds."""
    totals = [each.total_ms for each in group if each.total_ms is not None]
    is_over = len(totals) == len(group)
    return max(moment_s(each) for each in group) + max(totals) / 1e3 if is_over else math.inf


def _seen(group: list[IncidentLine]) -> RecordedFault:
    totals = [each.total_ms for each in group if each.total_ms is not None]
    return RecordedFault(
        cause=next((each for each in group if each.rank is not None), group[0]),
        at_unix_s=moment_s(group[0]),
        records=tuple((each.host, each.number, each.time) for each in group),
        is_open=any(each.is_open for each in group),
        total_ms=max(totals, default=None),
    )
