"""Incidents as text for people: the table of all and the story of one. Pure.

Everything reads the same without colour, at 80 columns and in a pipe.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from datetime import datetime, timezone

from unicron_elastic.base.incident import Incident
from unicron_elastic.base.text import one_line
from unicron_elastic.launcher.common.tables import aligned, wrapped
from unicron_elastic.launcher.view.incidents.names_of import names_of
from unicron_elastic.launcher.view.incidents.picture import amount_of, picture, shown_ms
from unicron_elastic.launcher.view.incidents.what_was_saved import what_was_saved

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


def by_time(incidents: Iterable[Incident]) -> list[Incident]:
    """All incidents from the oldest on."""
    return sorted(incidents, key=lambda each: (moment_of(each), each.number, each.host))


def table(incidents: Iterable[Incident], width: int | None) -> str:
    """All incidents grouped by run, the newest run last. ``width`` None: nothing is wrapped or cut, for grep."""
    runs: dict[str, list[Incident]] = {}
    for incident in by_time(incidents):
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
    rows = [_COLUMNS, *map(_cells, incidents, names_of(incidents))]
    return aligned(rows, width, [_STATUS], _NUMBERS)


def _cells(incident: Incident, name: str) -> tuple[str, ...]:
    rank = "-" if incident.rank is None else str(incident.rank)
    done = _DONE.get(incident.action, one_line(incident.action))
    status = one_line(incident.status)
    return (
        one_line(name),
        _time(incident),
        rank,
        f"SEV{incident.severity}",
        status,
        done,
        shown_ms(incident.total_ms),
    )


def story(incident: Incident, width: int | None, known: Iterable[Incident] = (), evidence: str = "") -> str:
    """One incident: what happened, what was decided and why, what followed, and what each phase cost.

    ``known``: incidents to compare it with, and to tell it from; ``evidence``: the text of its report, if it can be
    read here.
    """
    of_run = by_time(each for each in known if each.run_id == incident.run_id)
    name = names_of(of_run)[of_run.index(incident)] if incident in of_run else str(incident.number)
    title = f"Incident {one_line(name)} of run {one_line(incident.run_id)}: {one_line(incident.job)}"
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
