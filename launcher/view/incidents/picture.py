"""One incident's phases as a picture in text: bars in proportion to time, one after the other. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from unicron_elastic.base.incident import PHASES, Incident
from unicron_elastic.base.text import one_line, shorten

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
