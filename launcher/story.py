"""Incidents as text for people: the table of all and the story of one. Pure.

Everything reads the same without colour, at 80 columns and in a pipe.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from datetime import datetime, timezone

from unicron_elastic.faults.text import one_line, shorten
from unicron_elastic.incident import PHASES, Incident

__all__ = ["moment_of", "story", "table"]

_DONE = {"restart": "restarted", "fail": "job ended", "observe": "observed", "": "undecided"}
_COLUMNS = ("#", "time", "rank", "sev", "status", "done", "total")
_NUMBERS = ("#", "rank", "total")
_STATUS = _COLUMNS.index("status")
_NARROWEST_STATUS = len("status")
_GAP = "  "
_BAR_CELLS = 24
_INDENT = "     "


def moment_of(incident: Incident) -> datetime:
    """When it was recorded, for sorting; the beginning of time if the record does not say."""
    try:
        return datetime.fromisoformat(incident.time).astimezone()
    except (ValueError, OverflowError, OSError):
        return datetime.fromtimestamp(0, timezone.utc)


def table(incidents: Iterable[Incident], width: int | None) -> str:
    """All incidents grouped by run, the newest run last. ``width`` None: nothing is wrapped or cut, for grep."""
    runs: dict[str, list[Incident]] = {}
    for incident in sorted(incidents, key=lambda each: (moment_of(each), each.number)):
        runs[incident.run_id] = [*runs.pop(incident.run_id, []), incident]  # moved to the end: it is the newest so far
    return "\n".join(_run(incidents, width) for incidents in runs.values())


def _run(incidents: list[Incident], width: int | None) -> str:
    last = incidents[-1]
    hosts = {incident.host for incident in incidents}
    count = f"{len(incidents)} incident{'s' if len(incidents) != 1 else ''}"
    where = f"on {one_line(last.host)}" if len(hosts) == 1 else f"on {len(hosts)} hosts"
    heading, *rows = _rows(incidents, width)
    lines = [f"Run {one_line(last.run_id)}: {one_line(last.job)}, {count} {where}", heading]
    for incident, row in zip(incidents, rows, strict=True):
        host = f"{one_line(incident.host)}: " if len(hosts) > 1 else ""
        lines += [row, *_wrapped(host + one_line(incident.reason), width)]
    return "\n".join(lines) + "\n"


def _rows(incidents: list[Incident], width: int | None) -> list[str]:
    """The heading and one line for each incident, in even columns of which only the status gives way."""
    rows = [_COLUMNS, *map(_cells, incidents)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    if width is not None:
        too_wide = sum(widths) + len(_GAP) * (len(widths) - 1) - width
        widths[_STATUS] -= min(max(too_wide, 0), widths[_STATUS] - _NARROWEST_STATUS)
    return [_GAP.join(map(_fitted, row, widths, _COLUMNS)).rstrip() for row in rows]


def _cells(incident: Incident) -> tuple[str, ...]:
    rank = "-" if incident.rank is None else str(incident.rank)
    done = _DONE.get(incident.action, one_line(incident.action))
    status = one_line(incident.status)
    return str(incident.number), _time(incident), rank, f"SEV{incident.severity}", status, done, _ms(incident.total_ms)


def _fitted(cell: str, width: int, column: str) -> str:
    return cell.rjust(width) if column in _NUMBERS else shorten(cell, width).ljust(width)


def story(incident: Incident, width: int | None) -> str:
    """One incident: what happened, what was decided and why, what followed, and what each phase cost."""
    title = f"Incident {incident.number} of run {one_line(incident.run_id)}: {one_line(incident.job)}"
    lines = [title, "", *_wrapped(one_line(incident.reason), width), ""]
    for name, value in _facts(incident):
        lines += textwrap.wrap(
            value, _text_width(width), initial_indent=f"  {name:<12}", subsequent_indent=" " * 14
        ) or [f"  {name:<12}-"]
    lines += ["", "Timeline", *_timeline(incident)]
    if incident.consequences:
        lines += ["", "What other ranks reported because of it"]
        lines += [line for each in incident.consequences for line in _wrapped(one_line(each), width)]
    return "\n".join([*lines, *_exception(incident)]) + "\n"


def _facts(incident: Incident) -> list[tuple[str, str]]:
    step = "" if incident.step is None else f", {incident.step:,} steps after it started"
    code = "" if incident.exit_code is None else f", exit code {incident.exit_code}"
    who = "another node" if incident.rank is None else f"rank {incident.rank}"
    done = _DONE.get(incident.action, incident.action)
    facts = [
        ("when", _time(incident)),
        ("where", f"{who} of generation {incident.generation}, seen on {incident.host}{step}"),
        ("what", f"{incident.status} (SEV{incident.severity}){code}"),
        ("noticed by", incident.method),
        ("done", f"{done}. {incident.decision}".rstrip()),
        ("restarts", f"{incident.restarts_used} of {incident.max_restarts} used"),
    ]
    if incident.micro_batches_reused is not None:
        again = incident.micro_batches_recomputed or 0
        facts.append(("work", f"{incident.micro_batches_reused} micro-batches reused, {again} computed again"))
    if incident.evidence is not None:
        facts.append(("evidence", incident.evidence))
    if incident.superseded_by is not None:
        facts.append(("then", f"incident {incident.superseded_by} came before the first step after this one"))
    return [(name, one_line(value)) for name, value in facts]


def _timeline(incident: Incident) -> list[str]:
    """Each moment with what its phase took, and a bar that starts where the phase before it ended."""
    total = max((ms for phase in PHASES if (ms := _since_fault(incident, phase)) is not None), default=0.0)
    lines = [f"  {'':<12}{'phase':>12}{'since fault':>14}"]
    for phase in PHASES:
        took, since = incident.phase_ms(phase), _since_fault(incident, phase)
        if since is None:
            lines.append(f"  {phase.replace('_', ' '):<12}{'-':>12}{'-':>14}")
            continue
        bar = _bar(since - (took or 0.0), since, total) if took is not None else ""
        row = f"  {phase.replace('_', ' '):<12}{'' if took is None else _ms(took):>12}{_ms(since):>14}  {bar}"
        lines.append(row.rstrip())
    return lines


def _since_fault(incident: Incident, phase: str) -> float | None:
    at: float | None = getattr(incident, f"{phase}_at")
    return None if at is None or incident.occurred_at is None else (at - incident.occurred_at) * 1e3


def _bar(start: float, end: float, total: float) -> str:
    if not 0 <= start <= end <= total or not 0 < total < float("inf"):
        return ""  # moments that run backwards: show the numbers, do not draw them
    first, last = round(start / total * _BAR_CELLS), round(end / total * _BAR_CELLS)
    return " " * first + ("#" * (last - first) or "|")


def _exception(incident: Incident) -> list[str]:
    if not (incident.exception_type or incident.message or incident.stack):
        return []
    place = f" at {one_line(incident.location)}" if incident.location else ""
    text = (incident.stack or f"{incident.exception_type or 'message'}: {incident.message or ''}").rstrip()
    cleaned = ["".join(c if c.isprintable() else " " for c in line.expandtabs(4)) for line in text.splitlines()]
    title = "Exception" if incident.exception_type or incident.message else "Stack"
    return ["", f"{title}{place}", *(f"  {line}".rstrip() for line in cleaned)]


def _wrapped(text: str, width: int | None) -> list[str]:
    if width is None:
        return [_INDENT + text]
    return textwrap.wrap(text, _text_width(width), initial_indent=_INDENT, subsequent_indent=_INDENT)


def _text_width(width: int | None) -> int:
    return 1_000_000 if width is None else max(width, 40)


def _time(incident: Incident) -> str:
    return one_line(incident.time)[:19].replace("T", " ") or "-"


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.1f} ms" if abs(value) < 99.95 else f"{value:,.0f} ms"
