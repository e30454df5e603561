"""The incident ledgers of real jobs as a history, with what each fault cost as it was measured there.

A fault often makes several records: each node that goes on without a lost one tells of it, and ranks complain of a
closed connection before it is known that the peer's node is gone. Records of one run that follow each other before
training went on are one fault here: the worst of them says what it was.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from unicron_elastic.base.incident import Incident
from unicron_elastic.base.ledger import find_ledgers, read_ledger
from unicron_elastic.base.text import one_line
from unicron_elastic.faults import Status
from unicron_elastic.simulation.history.events import FaultStruck, History, MeasuredFault

_LOST = re.compile(r"(\S+) is lost\b")
# A rank that complains of its peer, and the notice that the peer's node is gone: at most so long between them, which is
# how long the lease of a silent node lasts, and a second for the notice to come.
_SLACK_S = 6.0
_MOMENT_MAX_S = 1e12  # no clock says more, and NaN is not less
_STATUS_OF: Mapping[str, Status] = {status.value: status for status in Status}


@dataclass(frozen=True, slots=True)
class _Disturbance:
    """Records of one run and one cause, from the ledger at ``path``; ``hosts`` tell of it. Moments are Unix seconds."""

    path: Path
    worst: Incident
    hosts: frozenset[str]
    occurred_at: float
    noticed_at: float
    stopped_at: float | None
    regrouped_at: float | None
    first_step_at: float | None
    is_over: bool


def read_ledgers(
    paths: Sequence[Path],
    *,
    started_at: float | None = None,
    duration_s: float | None = None,
    hosts: Sequence[str] = (),
    repair_s: float | None = None,
) -> History:
    """The faults of one or several ledgers (of several jobs of one cluster), or of all in a folder.

    A ledger says neither when a job began nor when it ended, nor which hosts had no fault, nor when a lost one came
    back: ``started_at`` (Unix seconds) and ``duration_s`` say so, else the history goes from the first fault to the
    last first step; ``hosts`` are nodes 0, 1, ..., and hosts that are not among them follow in alphabetical order;
    ``repair_s`` is that of every lost node. Raises ``ValueError`` naming file, line and reason; OSError.
    """
    files = [file for path in paths for file in (sorted(find_ledgers(path)) if path.is_dir() else [path])]
    if not files:
        raise ValueError(f"{paths[0] if paths else 'nothing'}: there is no incident ledger (incidents.jsonl)")
    found = [each for file in files for each in _disturbances(file)]
    if not found:
        raise ValueError(f"{files[0]}:1: the ledger has no incident")
    found.sort(key=lambda each: (each.occurred_at, each.worst.run_id, each.worst.host))
    began = found[0].occurred_at if started_at is None else started_at
    ended = max(_ends(each) for each in found)
    numbers = _numbers(hosts, found)
    length_s = max(ended - began, 1e-3) if duration_s is None else duration_s
    for each in found:
        if not 0 <= each.occurred_at - began <= length_s:
            raise ValueError(
                f"{_where(each.path, each.worst)} was at {each.occurred_at - began:.3f} s, outside of the history, "
                f"which is from 0 to {length_s:g} s"
            )
    return History.of(
        (fault for each in found for fault in _faults(each, began, numbers, repair_s)),
        name=files[0].parent.name or files[0].stem,
        duration_s=length_s,
        nodes=len(numbers),
        source=f"the incident {'ledger' if len(files) == 1 else 'ledgers'} {', '.join(map(str, files))}",
    )


def _where(path: Path, incident: Incident) -> str:
    """The file and line of an incident's last record, and which it is."""
    last = 0
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            record = json.loads(line)
            key = tuple(record.get(name) for name in ("run_id", "host", "number", "time"))
            if key == (incident.run_id, incident.host, incident.number, incident.time):
                last = number
    return one_line(f"{path}:{last}: incident {incident.number} of run {incident.run_id} on {incident.host}")


def _ends(each: _Disturbance) -> float:
    moments = (each.occurred_at, each.noticed_at, each.stopped_at, each.regrouped_at, each.first_step_at)
    return max(moment for moment in moments if moment is not None)


def _disturbances(path: Path) -> list[_Disturbance]:
    incidents, problems = read_ledger(path)
    if problems:
        raise ValueError(problems[0])
    runs: dict[str, list[_Disturbance]] = {}
    for each in sorted((_alone(path, incident) for incident in incidents), key=lambda each: each.occurred_at):
        before = runs.setdefault(each.worst.run_id, [])
        if before and _is_same(before[-1], each):
            before[-1] = _merged(before[-1], each)
        else:
            before.append(each)
    return [each for run in runs.values() for each in run]


def _alone(path: Path, incident: Incident) -> _Disturbance:
    """One record by itself. Raises ``ValueError`` for a time, a status or moments that make no sense."""
    if incident.status not in _STATUS_OF:
        raise ValueError(f"{_where(path, incident)}: status is {incident.status!r}: known are {', '.join(_STATUS_OF)}")
    try:
        written_at = datetime.fromisoformat(incident.time).timestamp()
    except (ValueError, OverflowError, OSError):
        raise ValueError(
            f"{_where(path, incident)}: time is {incident.time!r}: it must be ISO 8601, as the ledger writes it"
        ) from None
    # The first record is written when the fault is noticed, so that moment is the one of which both clocks are known.
    noticed = incident.noticed_at if incident.noticed_at is not None else incident.occurred_at
    if noticed is None:
        raise ValueError(f"{_where(path, incident)}: neither occurred_at nor noticed_at is given")

    def wall(moment: float | None) -> float | None:
        return None if moment is None else written_at + (moment - noticed)

    moments = (incident.occurred_at, noticed, incident.stopped_at, incident.regrouped_at, incident.first_step_at)
    known = [moment for moment in moments if moment is not None]
    if not all(abs(moment) < _MOMENT_MAX_S for moment in known) or known != sorted(known):
        order = "occurred, noticed, stopped, regrouped, first step"
        raise ValueError(f"{_where(path, incident)}: its moments are not in their order: {order}")
    return _Disturbance(
        path=path,
        worst=incident,
        hosts=frozenset({incident.host, *_struck(incident)}),
        occurred_at=written_at if incident.occurred_at is None else written_at + (incident.occurred_at - noticed),
        noticed_at=written_at,
        stopped_at=wall(incident.stopped_at),
        regrouped_at=wall(incident.regrouped_at),
        first_step_at=wall(incident.first_step_at),
        is_over=incident.first_step_at is not None,
    )


def _is_same(before: _Disturbance, each: _Disturbance) -> bool:
    """Whether a record tells of the same cause: it began before training had gone on after the one before."""
    if each.worst.host == before.worst.host and before.is_over:
        return False  # on one host records follow each other
    slack_s = 0.0 if before.is_over else _SLACK_S
    return each.occurred_at <= _ends(before) + slack_s


def _merged(one: _Disturbance, other: _Disturbance) -> _Disturbance:
    worst, less = (one, other) if _badness(one) <= _badness(other) else (other, one)
    return _Disturbance(
        path=worst.path,
        worst=worst.worst,
        hosts=one.hosts | other.hosts,
        occurred_at=min(one.occurred_at, other.occurred_at),
        noticed_at=worst.noticed_at,
        stopped_at=_latest(one.stopped_at, other.stopped_at),
        regrouped_at=_latest(one.regrouped_at, other.regrouped_at),
        first_step_at=_latest(one.first_step_at, other.first_step_at),
        is_over=worst.is_over or less.is_over,
    )


def _badness(each: _Disturbance) -> tuple[int, int, float]:
    """Ascending: what is known of a node comes before what a rank complained of; then the first to tell of it."""
    return each.worst.severity, 0 if each.worst.rank is None else 1, each.occurred_at


def _latest(one: float | None, other: float | None) -> float | None:
    known = [moment for moment in (one, other) if moment is not None]
    return max(known) if known else None


def _struck(incident: Incident) -> list[str]:
    """The hosts that a fault struck: those that are lost, else the one that tells of it."""
    lost = _LOST.findall(incident.reason) if incident.rank is None else []
    return list(dict.fromkeys(lost)) or [incident.host]


def _numbers(hosts: Sequence[str], found: Iterable[_Disturbance]) -> dict[str, int]:
    names = frozenset().union(*(each.hosts for each in found))
    return {name: number for number, name in enumerate([*dict.fromkeys(hosts), *sorted(names - set(hosts))])}


def _faults(each: _Disturbance, began: float, numbers: Mapping[str, int], repair_s: float | None) -> list[FaultStruck]:
    """One for each struck host; what was measured stands with the first, so that it is not counted twice."""
    after = each.occurred_at
    phases: dict[str, float | None] = {}
    for name in ("noticed", "stopped", "regrouped", "first_step"):
        moment = getattr(each, f"{name}_at")
        phases[f"{name}_s"] = None if moment is None else round(max(moment - after, 0.0), 6)
        after = after if moment is None else max(moment, after)
    incident = each.worst
    kind = _STATUS_OF[incident.status]
    measured = MeasuredFault(job=incident.run_id, host=incident.host, action=incident.action, **phases)
    first = FaultStruck(
        at_s=max(each.occurred_at - began, 0.0),
        node=0,
        kind=kind,
        repair_s=repair_s if incident.severity == 1 else None,
    )
    return [
        replace(first, node=numbers[name], measured=None if place else measured)
        for place, name in enumerate(_struck(incident))
    ]
