"""What all incidents of a node come to: counted from their records, live ones and those of its ledger alike.

A record may come again, with more known of its incident. Counters must never fall: an incident is counted once, with
the severity and status that it had when it was decided what to do, and each of its phases once it is known. So the
same records in the same order always come to the same, and a process that starts anew goes on where its ledger ends.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from unicron_elastic.base.incident import PHASES, Incident
from unicron_elastic.faults import SEVERITY_OF, Status
from unicron_elastic.metrics.definitions import RECOVERY_BUCKETS_S
from unicron_elastic.metrics.figures import Distribution, IncidentFigures

_OBSERVED = "observe"  # nothing was done, as the job goes on


@dataclass(slots=True)
class _Known:
    is_counted: bool = False
    phases: set[str] = field(default_factory=set)
    has_recovered: bool = False


class IncidentTotals:
    """Grows with every record; never falls."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], _Known] = {}
        # With zeros, as nobody sees the growth of a counter that was not there. The ladder makes faults worse only.
        self._counts = {
            (severity, status.value): 0 for status in Status for severity in range(1, SEVERITY_OF[status] + 1)
        }
        self._lost_gpu_s = dict.fromkeys(PHASES[1:], 0.0)
        self._recoveries = [0] * (len(RECOVERY_BUCKETS_S) + 1)
        self._recovery_s = 0.0
        self._reused = self._recomputed = 0

    def add(self, incident: Incident) -> None:
        """Takes in one record of one node's incident of one run."""
        known = self._known.setdefault((incident.number, incident.time), _Known())
        is_decided = bool(incident.action) or incident.is_closed
        if is_decided and not known.is_counted:
            known.is_counted = True
            what = incident.severity, incident.status
            self._counts[what] = self._counts.get(what, 0) + 1
        if incident.action != _OBSERVED:
            self._add_phases(incident, known)
        if incident.total_ms is not None and not known.has_recovered:
            known.has_recovered = True
            seconds = max(0.0, incident.total_ms / 1e3)
            self._recoveries[bisect_left(RECOVERY_BUCKETS_S, seconds)] += 1
            self._recovery_s += seconds
            self._reused += incident.micro_batches_reused or 0
            self._recomputed += incident.micro_batches_recomputed or 0

    def _add_phases(self, incident: Incident, known: _Known) -> None:
        for phase in PHASES[1:]:
            spent_ms = incident.phase_ms(phase)
            if spent_ms is not None and phase not in known.phases:
                known.phases.add(phase)
                self._lost_gpu_s[phase] += max(0.0, spent_ms / 1e3) * (incident.workers or 0)

    def figures(self) -> IncidentFigures:
        """What it comes to now."""
        return IncidentFigures(
            counts=tuple((*key, count) for key, count in sorted(self._counts.items())),
            lost_gpu_s=tuple(self._lost_gpu_s.items()),
            recovery=Distribution(tuple(self._recoveries), self._recovery_s),
            reused=self._reused,
            recomputed=self._recomputed,
        )
