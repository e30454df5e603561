"""The WAF over time, in the memory of who coordinates: the last hour closely, the last day roughly. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from unicron_elastic.metrics.figures import PlanFigures

SAMPLE_S = 5.0  # between two points of the last hour


@dataclass(frozen=True, slots=True)
class WafPoint:
    """All jobs together at one moment, in weighted FLOP/s; None: not known then."""

    at_unix_s: float
    plan_flops: float | None
    achieved_flops: float | None

    def to_json(self) -> list[float | None]:
        """Its three numbers."""
        return [round(self.at_unix_s, 1), _short(self.plan_flops), _short(self.achieved_flops)]


SPANS = {"hour": (SAMPLE_S, 720), "day": (60.0, 1440)}  # seconds between points, and how many are kept


class WafHistory:
    """`WafHistory` keeps the WAF of the last hour closely and of the last day roughly; for one thread at a time."""

    def __init__(self) -> None:
        self._points = {name: deque[WafPoint](maxlen=most) for name, (_, most) in SPANS.items()}

    def add(self, at_unix_s: float, figures: PlanFigures | None) -> None:
        """What is known now; ``figures``: None if this process does not coordinate, so that nothing is."""
        achieved = None if figures is None else sum(job.achieved_flops for job in figures.jobs)
        point = WafPoint(at_unix_s, None if figures is None else figures.waf_flops, achieved)
        for name, (apart_s, _) in SPANS.items():
            points = self._points[name]
            if points and point.at_unix_s < points[-1].at_unix_s:
                points.clear()  # the clock was set back
            if not points or int(points[-1].at_unix_s // apart_s) != int(at_unix_s // apart_s):
                points.append(point)

    def to_json(self, span: str) -> dict[str, Any]:
        """The points of a span of ``SPANS``, the oldest first."""
        apart_s, most = SPANS[span]
        points = [point.to_json() for point in self._points[span]]
        return {"span_s": apart_s * most, "apart_s": apart_s, "points": points}


def _short(value: float | None) -> float | None:
    """Six digits: more is noise, and bytes."""
    return None if value is None else float(f"{value:.6g}")
