"""Incidents as text for people: the table of all and the story of one. Pure.

Everything reads the same without colour, at 80 columns and in a pipe.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from statistics import median

from unicron_elastic.base.incident import PHASES, Incident
from unicron_elastic.base.text import one_line, shorten
from unicron_elastic.launcher.common.tables import aligned, wrapped

# One incident's phases as a picture in text: bars in proportion to time, one after the other. Pure.


_PIPE_WIDTH = 120  # columns, where nobody says how many there are
_NAME, _TOOK, _SINCE = 12, 11, 13  # columns of a row; the bar follows after a gap
_LEFT = 2 + _NAME + _TOOK + _SINCE + 2
_BAR_LEAST, _NOTE_LEAST = 16, 12
_MARK = {"state": "="}  # it is fetched while others may train on; else "#"


@dataclass(frozen=True, slots=True)
class _Row:
    """A phase from ``start_ms`` to ``end_ms`` after the fault. None: that moment has not come, or is not known."""

    name: str
    start_ms: float | None
    end_ms: float | None
    note: str = ""


def picture(incident: Incident, width: int | None) -> list[str]:
    """The heading and a row for each moment, of at most ``width`` columns; None: nobody says how many there are."""
    columns = max(_PIPE_WIDTH if width is None else width, _LEFT + _BAR_LEAST)
    rest = columns - _LEFT
    cells = max(_BAR_LEAST, rest // 2) if rest - _BAR_LEAST >= _NOTE_LEAST + 2 else rest
    rows = list(_picture_rows(incident))
    total_ms = max((row.end_ms for row in rows if row.end_ms is not None), default=0.0)
    scale = f"0{shown_ms(total_ms):>{cells - 1}}" if total_ms > 0 and math.isfinite(total_ms) else ""
    lines = [f"  {'':<{_NAME}}{'phase':>{_TOOK}}{'since fault':>{_SINCE}}  {scale}".rstrip()]
    for row in rows:
        note_width = None if width is None else max(0, rest - cells - 2)
        lines.append(_line(row, total_ms, cells, note_width))
    return lines


def shown_ms(value: float | None) -> str:
    """Milliseconds, three digits of them while they are few; seconds once they are many."""
    if value is None:
        return "-"
    if abs(value) >= 99_999.5:
        return f"{value / 1e3:,.0f} s"
    return f"{value:,.1f} ms" if abs(value) < 99.95 else f"{value:,.0f} ms"


def amount_of(count: int) -> str:
    """Bytes, in the unit that suits them."""
    value = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"


def _picture_rows(incident: Incident) -> Iterator[_Row]:
    """Return the rows in the order of their ends, as far as they came."""
    state = _state_row(incident)
    for phase in PHASES:
        end_ms, took_ms = _since_fault(incident, phase), incident.phase_ms(phase)
        start_ms = None if end_ms is None or took_ms is None else end_ms - took_ms
        if state is not None and state.end_ms is not None and end_ms is not None and state.end_ms < end_ms:
            yield state
            state = None
        yield _Row(phase.replace("_", " "), start_ms, end_ms, _note(incident, phase) if end_ms is not None else "")
    if state is not None:
        yield state


def _state_row(incident: Incident) -> _Row | None:
    if incident.state_at is None or incident.occurred_at is None:
        return None
    end_ms = (incident.state_at - incident.occurred_at) * 1e3
    parts = [amount_of(incident.state_bytes)] if incident.state_bytes else []
    parts += [f"from {one_line(incident.state_from)}"] if incident.state_from else []
    return _Row("state", end_ms - (incident.state_s or 0.0) * 1e3, end_ms, " ".join(parts))


def _note(incident: Incident, phase: str) -> str:
    """What happened at the end of a phase, in a few words."""
    if phase == "noticed":
        return f"by {one_line(incident.method)}"
    if phase == "stopped":
        return f"decided: {one_line(incident.action)}" if incident.action else ""
    if phase == "regrouped":
        return "all have met again"
    return "the job trains" if phase == "first_step" else ""


def _since_fault(incident: Incident, phase: str) -> float | None:
    at: float | None = getattr(incident, f"{phase}_at")
    return None if at is None or incident.occurred_at is None else (at - incident.occurred_at) * 1e3


def _line(row: _Row, total_ms: float, cells: int, note_width: int | None) -> str:
    if row.end_ms is None:
        return f"  {row.name:<{_NAME}}{'-':>{_TOOK}}{'-':>{_SINCE}}"
    took = "" if row.start_ms is None else shown_ms(row.end_ms - row.start_ms)
    numbers = f"  {row.name:<{_NAME}}{took:>{_TOOK}}{shown_ms(row.end_ms):>{_SINCE}}"
    bar = "" if row.start_ms is None else _bar(row, total_ms, cells)
    note = row.note if note_width is None else shorten(row.note, note_width) if note_width >= _NOTE_LEAST else ""
    return f"{numbers}  {bar:<{cells}}  {note}".rstrip() if note else f"{numbers}  {bar}".rstrip()


def _bar(row: _Row, total_ms: float, cells: int) -> str:
    start_ms, end_ms = row.start_ms, row.end_ms
    if start_ms is None or end_ms is None or not (0 <= start_ms <= end_ms <= total_ms and 0 < total_ms < math.inf):
        return ""  # moments that run backwards: show the numbers, do not draw them
    first, last = round(start_ms / total_ms * cells), round(end_ms / total_ms * cells)
    return " " * min(first, cells - 1) + (_MARK.get(row.name, "#") * (last - first) or "|")


# What was saved by not restarting all workers for a fault: by restarts that were measured, or not at all. Pure.


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


_DONE = {"restart": "restarted", "fail": "job ended", "observe": "observed", "": "undecided"}
_COLUMNS = ("#", "time", "rank", "sev", "status", "done", "total")
_NUMBERS = [_COLUMNS.index(name) for name in ("#", "rank", "total")]
_STATUS = _COLUMNS.index("status")
_EVIDENCE_LINES = 12  # the rest stays in its file


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
        lines += [row, *wrapped(host + one_line(incident.reason), width)]
    return "\n".join(lines) + "\n"


def _rows(incidents: list[Incident], width: int | None) -> list[str]:
    """The heading and one line for each incident, in even columns of which only the status gives way."""
    rows = [_COLUMNS, *map(_cells, incidents)]
    return aligned(rows, width, [_STATUS], _NUMBERS)


def _cells(incident: Incident) -> tuple[str, ...]:
    rank = "-" if incident.rank is None else str(incident.rank)
    done = _DONE.get(incident.action, one_line(incident.action))
    status = one_line(incident.status)
    return (
        str(incident.number),
        _time(incident),
        rank,
        f"SEV{incident.severity}",
        status,
        done,
        shown_ms(incident.total_ms),
    )


def story(incident: Incident, width: int | None, known: Iterable[Incident] = (), evidence: str = "") -> str:
    """One incident: what happened, what was decided and why, what followed, and what each phase cost.

    ``known``: incidents to compare it with; ``evidence``: the text of its report, if it can be read here.
    """
    title = f"Incident {incident.number} of run {one_line(incident.run_id)}: {one_line(incident.job)}"
    lines = [title, "", *wrapped(one_line(incident.reason), width), ""]
    for name, value in _facts(incident):
        lines += textwrap.wrap(
            value, _text_width(width), initial_indent=f"  {name:<12}", subsequent_indent=" " * 14
        ) or [f"  {name:<12}-"]
    lines += ["", "Timeline", *picture(incident, width)]
    if saved := what_was_saved(incident, known):
        lines += ["", *wrapped(saved, width)]
    if incident.consequences:
        lines += ["", "What other ranks reported because of it"]
        lines += [line for each in incident.consequences for line in wrapped(one_line(each), width)]
    return "\n".join([*lines, *_exception(incident), *_evidence(evidence)]) + "\n"


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
    if incident.state_from is not None:
        facts.append(("state", _state(incident)))
    if incident.evidence is not None:
        facts.append(("evidence", incident.evidence))
    if incident.superseded_by is not None:
        facts.append(("then", f"incident {incident.superseded_by} came before the first step after this one"))
    if incident.left is not None:
        facts.append(("then", incident.left))
    return [(name, one_line(value)) for name, value in facts]


def _state(incident: Incident) -> str:
    """Say from whom those that began again had their state, how much, and for how long that took."""
    much = f"{amount_of(incident.state_bytes)} " if incident.state_bytes else ""
    took = "" if incident.state_s is None else f" in {shown_ms(incident.state_s * 1e3)}"
    is_beside = incident.first_step_at is not None and (incident.state_at or 0.0) > incident.first_step_at
    return f"{much}from {incident.state_from}{took}{', while the others trained on' if is_beside else ''}"


def _evidence(text: str) -> list[str]:
    """The beginning of what was found out."""
    if not text.strip():
        return []
    lines = text.rstrip().splitlines()
    shown = [f"  {_printable(line)}".rstrip() for line in lines[:_EVIDENCE_LINES]]
    more = [f"  and {len(lines) - len(shown)} more lines"] if len(lines) > len(shown) else []
    return ["", "Evidence", *shown, *more]


def _exception(incident: Incident) -> list[str]:
    if not (incident.exception_type or incident.message or incident.stack):
        return []
    place = f" at {one_line(incident.location)}" if incident.location else ""
    text = (incident.stack or f"{incident.exception_type or 'message'}: {incident.message or ''}").rstrip()
    cleaned = [_printable(line) for line in text.splitlines()]
    title = "Exception" if incident.exception_type or incident.message else "Stack"
    return ["", f"{title}{place}", *(f"  {line}".rstrip() for line in cleaned)]


def _printable(line: str) -> str:
    return "".join(c if c.isprintable() else " " for c in line.expandtabs(4))


def _text_width(width: int | None) -> int:
    return 1_000_000 if width is None else max(width, 40)


def _time(incident: Incident) -> str:
    return one_line(incident.time)[:19].replace("T", " ") or "-"
