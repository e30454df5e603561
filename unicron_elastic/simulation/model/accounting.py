"""What is achieved and what is lost, integrated over simulated time, and booked on the incidents that cost it.

At any moment the cluster would achieve ``ideal`` without faults. A job with nodes would achieve its *full* rate; it
stands still (booked as detection or transition), or lacks a part of it (sub-healthy), and pays its overhead. What all
jobs together lack to the ideal even at their full rates is sub-healthy, and divided between the incidents whose nodes
are away. So everything adds up, at every moment, to the ideal.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from unicron_elastic.faults import Severity, Status
from unicron_elastic.simulation.model.study_result import CurvePoint, LostIn, SimulatedIncident


@dataclass(slots=True, eq=False)
class IncidentEntry:
    """One incident while it is being booked. Amounts are weighted FLOP and seconds."""

    at_s: float
    node: int
    kind: Status
    job: str
    severity: Severity
    reason: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    lost_flop: float = 0.0
    away_from: tuple[float, float] | None = None  # when its node went, and the count of losses then

    def closed(self) -> SimulatedIncident:
        """Return the account as a value."""
        return SimulatedIncident(
            at_s=self.at_s,
            node=self.node,
            kind=str(self.kind),
            job=self.job,
            severity=int(self.severity),
            detection_s=self.seconds.get("detection", 0.0),
            transition_s=self.seconds.get("transition", 0.0),
            sub_healthy_s=self.seconds.get("sub_healthy", 0.0),
            lost_flop=self.lost_flop,
            reason=self.reason,
        )


@dataclass(frozen=True, slots=True)
class Stall:
    """A job stands still: in the phase "detection" or "transition", for an incident, or None for no fault."""

    phase: str
    entry: IncidentEntry | None


@dataclass(slots=True)
class _Account:
    """One job: what it would achieve in full, weighted FLOP/s, on how many GPUs, and what keeps it from that."""

    since_s: float
    full_waf: float = 0.0
    gpus: float = 0.0
    overhead: float = 0.0
    stall: Stall | None = None
    missing: tuple[tuple[IncidentEntry, float], ...] = ()
    missing_part: float = 0.0
    waf: float = 0.0

    def update(self) -> None:
        """What follows from the rest: asked for all jobs whenever one changes."""
        self.missing_part = min(1.0, sum(part for _, part in self.missing))
        self.waf = 0.0 if self.stall else self.full_waf * (1.0 - self.overhead) * (1.0 - self.missing_part)


class Books:
    """All accounts of one simulated cluster."""

    def __init__(self) -> None:
        self.entries: list[IncidentEntry] = []
        self._accounts: dict[str, _Account] = {}
        self._ideal_waf = 0.0
        self._ideal_gpus = 0.0
        self._since_s = 0.0
        self._away: dict[int, IncidentEntry] = {}
        self._lost_per_away = 0.0  # so much each incident would have lost whose node was always away
        self._waf = self._waf_ideal = self._gpu_s = 0.0
        self._lost_waf = dict.fromkeys(("detection", "transition", "sub_healthy", "overhead"), 0.0)
        self._lost_gpu_s = dict(self._lost_waf)
        self._curve: list[CurvePoint] = [CurvePoint(0.0, 0.0)]

    # -- what happens ----------------------------------------------------------------------------------------------

    def open(self, entry: IncidentEntry) -> IncidentEntry:
        """A fault has come."""
        self.entries.append(entry)
        return entry

    def ideal(self, at_s: float, waf_flops: float, gpus: float) -> None:
        """Book how much would be achieved from now on without faults, on so many GPUs."""
        self._settle_cluster(at_s)
        self._ideal_waf, self._ideal_gpus = waf_flops, gpus

    def job(
        self,
        at_s: float,
        name: str,
        *,
        full_waf: float,
        gpus: float,
        overhead: float,
        stall: Stall | None,
        missing: tuple[tuple[IncidentEntry, float], ...],
    ) -> None:
        """Book what a job is from now on; ``missing``: which part of its rate which incident takes."""
        self._settle_cluster(at_s)
        account = self._settled(at_s, name)
        account.full_waf, account.gpus, account.overhead = full_waf, gpus, overhead
        account.stall, account.missing = stall, missing
        account.update()
        self._draw_curve(at_s)

    def away(self, at_s: float, entry: IncidentEntry) -> None:
        """Book that the node of an incident is away from now on."""
        self._settle_with(at_s, entry)
        entry.away_from = at_s, self._lost_per_away
        self._away[id(entry)] = entry

    def back(self, at_s: float, entry: IncidentEntry) -> None:
        """Its node is back, and counts no more."""
        self._settle_with(at_s, entry)
        if entry.away_from is None:
            return
        since_s, before = entry.away_from
        entry.lost_flop += self._lost_per_away - before
        _add(entry, "sub_healthy", at_s - since_s)
        entry.away_from = None
        del self._away[id(entry)]

    def close(self, at_s: float) -> None:
        """The history is over."""
        for entry in list(self._away.values()):
            self.back(at_s, entry)
        self._settle_cluster(at_s)
        for name in self._accounts:
            self._settled(at_s, name)

    # -- what it came to -------------------------------------------------------------------------------------------

    @property
    def waf_now(self) -> float:
        """Weighted FLOP/s of all jobs."""
        return sum([account.waf for account in self._accounts.values()])

    @property
    def waf(self) -> float:
        """Weighted FLOP achieved up to the last moment that was booked."""
        return self._waf

    @property
    def waf_ideal(self) -> float:
        """The same without faults."""
        return self._waf_ideal

    @property
    def gpu_s(self) -> float:
        """GPU-seconds that would have been used without faults."""
        return self._gpu_s

    @property
    def lost_waf(self) -> LostIn:
        """Weighted FLOP."""
        return LostIn(**self._lost_waf)

    @property
    def lost_gpu_s(self) -> LostIn:
        """GPU-seconds."""
        return LostIn(**self._lost_gpu_s)

    @property
    def curve(self) -> tuple[CurvePoint, ...]:
        """What was achieved over time."""
        return tuple(self._curve)

    # -- integrals -------------------------------------------------------------------------------------------------

    def _settled(self, at_s: float, name: str) -> _Account:
        account = self._accounts.setdefault(name, _Account(at_s))
        passed_s, account.since_s = at_s - account.since_s, at_s
        if passed_s <= 0.0:
            return account
        self._waf += account.waf * passed_s
        if account.stall is not None:
            phase, entry = account.stall.phase, account.stall.entry
            self._lose(phase, account.full_waf * passed_s, account.gpus * passed_s)
            if entry is not None:
                _add(entry, phase, passed_s)
                entry.lost_flop += account.full_waf * passed_s
            return account
        rest = 1.0 - account.overhead
        self._lose(
            "overhead", account.full_waf * account.overhead * passed_s, account.gpus * account.overhead * passed_s
        )
        told = sum(part for _, part in account.missing)
        missing = account.missing_part
        self._lose(
            "sub_healthy", account.full_waf * rest * missing * passed_s, account.gpus * rest * missing * passed_s
        )
        for entry, part in account.missing:
            entry.lost_flop += account.full_waf * rest * passed_s * part * (missing / told if told else 0.0)
            if entry.away_from is None:
                _add(entry, "sub_healthy", passed_s)
        return account

    def _settle_with(self, at_s: float, entry: IncidentEntry) -> None:
        """The cluster, and the jobs that the incident takes something from."""
        self._settle_cluster(at_s)
        for name, account in self._accounts.items():
            if any(each is entry for each, _ in account.missing):
                self._settled(at_s, name)

    def _settle_cluster(self, at_s: float) -> None:
        passed_s, self._since_s = at_s - self._since_s, at_s
        if passed_s <= 0.0:
            return
        self._waf_ideal += self._ideal_waf * passed_s
        self._gpu_s += self._ideal_gpus * passed_s
        lacks_waf = (self._ideal_waf - sum([each.full_waf for each in self._accounts.values()])) * passed_s
        lacks_gpus = (self._ideal_gpus - sum([each.gpus for each in self._accounts.values()])) * passed_s
        self._lose("sub_healthy", lacks_waf, lacks_gpus)
        if self._away:
            self._lost_per_away += lacks_waf / len(self._away)

    def _lose(self, phase: str, waf: float, gpu_s: float) -> None:
        self._lost_waf[phase] += waf
        self._lost_gpu_s[phase] += gpu_s

    def _draw_curve(self, at_s: float) -> None:
        now = self.waf_now
        if self._curve[-1].at_s == at_s:
            self._curve.pop()
        if not self._curve or self._curve[-1].waf_flops != now:
            self._curve.append(CurvePoint(at_s, now))


def _add(entry: IncidentEntry, phase: str, seconds: float) -> None:
    entry.seconds[phase] = entry.seconds.get(phase, 0.0) + seconds
