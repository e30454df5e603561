"""What was saved by not restarting all workers for a fault: by restarts that were measured, or not at all. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from unicron_elastic.base.incident import Incident
from unicron_elastic.base.text import one_line
from unicron_elastic.launcher.view.incidents.picture import shown_ms

_IN_PLACE = ("go on", "reattempt")
_NAMED_MOST = 4


def what_was_saved(incident: Incident, known: Iterable[Incident]) -> str:
    """One or two sentences; "" where nothing could have been saved. ``known``: incidents to compare with."""
    total_ms = incident.total_ms
    if total_ms is None or incident.action not in (*_IN_PLACE, "restart"):
        return ""
    cost = _cost(incident, total_ms)
    if incident.action == "restart":
        return f"{cost} All workers were restarted, so nothing was saved."
    restarts, source = _restarts(incident, known)
    if not restarts:
        return f"{cost} No restart of this job was measured where this was read, so what it saved is not known."
    restart_ms = median(restarts)
    if restart_ms <= total_ms:
        return f"{cost} A restart of all workers took {shown_ms(restart_ms)} ({source}): no time was saved."
    return (
        f"{cost} A restart of all workers took {shown_ms(restart_ms)} ({source}): "
        f"{shown_ms(restart_ms - total_ms)} saved."
    )


def _cost(incident: Incident, total_ms: float) -> str:
    workers = incident.workers
    if not workers:
        return f"The first step came {shown_ms(total_ms)} after the fault."
    lost_s = workers * total_ms / 1e3
    who = "1 worker" if workers == 1 else f"{workers} workers"
    return (
        f"The first step came {shown_ms(total_ms)} after the fault: {lost_s:,.3g} worker-seconds of the {who} "
        f"on {one_line(incident.host)}."
    )


def _restarts(incident: Incident, known: Iterable[Incident]) -> tuple[list[float], str]:
    """How long restarts took, in milliseconds, and which they were: of this run, else of this script."""
    same_job = [each for each in known if each.action == "restart" and each.job == incident.job]
    of_run = [each for each in same_job if each.run_id == incident.run_id and each.total_ms is not None]
    found = of_run or [each for each in same_job if each.total_ms is not None]
    totals = [each.total_ms for each in found if each.total_ms is not None]
    if len(totals) == 1:
        return totals, f"measured: incident {_called(found[0], incident)}"
    names = ", ".join(_called(each, incident) for each in found[:_NAMED_MOST])
    more = f" and {len(found) - _NAMED_MOST} more" if len(found) > _NAMED_MOST else ""
    return totals, f"the median of those measured: incidents {names}{more}"


def _called(each: Incident, incident: Incident) -> str:
    number = f"{each.number}" if each.run_id == incident.run_id else f"{one_line(each.run_id)}:{each.number}"
    return number if each.host == incident.host else f"{number} on {one_line(each.host)}"
