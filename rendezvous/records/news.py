"""What jobs and nodes tell for people to look at: how far a job is, and a node's last incidents. It decides nothing.

Apart from the keys that agents watch, so that nobody is woken by it. Each is bound to a lease, and so goes by itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any
from urllib.parse import quote, unquote

from unicron_elastic.base.incident import Incident
from unicron_elastic.base.text import one_line
from unicron_elastic.rendezvous.store.interface import Entry
from unicron_elastic.rendezvous.store.records import number_in, object_in, odd

NEWS = "news/"
JOB_NEWS = f"{NEWS}jobs/"
INCIDENTS = f"{NEWS}incidents/"
JOB_NEWS_FOR_S = 60.0  # so long it is known how far a job was that says nothing any more
INCIDENTS_FOR_S = 86_400.0  # so long it is known what happened on a node, since the last time

INCIDENTS_MOST = 8  # of a node
_TEXT_CHARACTERS = 500
_RECORD_MAX_BYTES = 64 * 1024
_SECONDS_MAX = 1e12
# Of an incident all but what is long: that stays in the ledger, on the node.
_NEEDED = [each.name for each in fields(Incident) if each.default is MISSING]
_KEPT = [each.name for each in fields(Incident) if each.name not in ("message", "stack", "consequences")]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobNews:
    """How far a run is, as the agent of its first node says at ``at_unix_s``.

    ``step``: optimizer steps of the furthest worker there since its process began; None: not known. ``step_s``: seconds
    of the latest. ``stepped_unix_s``: when the latest ended. ``world``: the number of those who train together; 0: they
    do not change in place.
    """

    at_unix_s: float
    step: int | None
    step_s: float | None
    stepped_unix_s: float | None
    world: int
    nodes: int
    workers: int
    restarts_used: int
    max_restarts: int
    is_incident_open: bool = False


def job_news_key(run_id: str) -> str:
    """Return the key of a job's news, by its --rdzv-id: the same for all starts of one that is planned."""
    return f"{JOB_NEWS}{quote(run_id, safe='')}"


def run_of_news(key: str) -> str:
    """The run of such a key."""
    return unquote(key.removeprefix(JOB_NEWS))


def job_news_text(news: JobNews) -> bytes:
    """What such a key holds."""
    return json.dumps(asdict(news), allow_nan=False).encode()


def parse_job_news(entry: Entry) -> JobNews:
    """Raises ValueError for what no job says."""
    told = object_in(entry, _RECORD_MAX_BYTES)
    try:
        counts = ("world", "nodes", "workers", "restarts_used", "max_restarts")
        at_unix_s = _seconds_in(told, "at_unix_s")
        if at_unix_s is None:
            raise ValueError("at_unix_s must be unix seconds")
        return JobNews(
            at_unix_s=at_unix_s,
            step=None if told.get("step") is None else number_in(told, "step"),
            step_s=_seconds_in(told, "step_s"),
            stepped_unix_s=_seconds_in(told, "stepped_unix_s"),
            is_incident_open=told.get("is_incident_open") is True,
            **{name: number_in(told, name) for name in counts},
        )
    except ValueError as error:
        raise odd(entry, "news of a job", error) from None


def incidents_key(host: str) -> str:
    """Return the key of a node's incidents."""
    return f"{INCIDENTS}{quote(host, safe='')}"


def with_incident(incidents: Iterable[Incident], incident: Incident) -> tuple[Incident, ...]:
    """The last ones of a node with one more, or with more known of one of them; the newest last."""
    me = incident.run_id, incident.number, incident.time
    others = [each for each in incidents if (each.run_id, each.number, each.time) != me]
    return (*others, incident)[-INCIDENTS_MOST:]


def incidents_text(incidents: Iterable[Incident]) -> bytes:
    """What such a key holds. Of long texts only the beginning, and no stack."""
    return json.dumps({"incidents": [_brief(each) for each in incidents]}, allow_nan=False).encode()


def parse_incidents(entry: Entry) -> tuple[Incident, ...]:
    """Raises ValueError for what is no list of a node's incidents."""
    told = object_in(entry, _RECORD_MAX_BYTES).get("incidents")
    try:
        if not isinstance(told, list):
            raise ValueError("incidents must be a list")
        found = tuple(_incident(each) for each in told[-INCIDENTS_MOST:])
    except ValueError as error:
        raise odd(entry, "incidents", error) from None
    return tuple(each for each in found if incidents_key(each.host) == entry.key)


def _brief(incident: Incident) -> dict[str, Any]:
    found = {name: getattr(incident, name) for name in _KEPT}
    return {name: _bounded(value) for name, value in found.items() if value is not None or name in _NEEDED}


def _bounded(value: Any) -> Any:
    return one_line(value, _TEXT_CHARACTERS) if isinstance(value, str) else value


def _incident(told: object) -> Incident:
    if not isinstance(told, dict):
        raise ValueError("each must be an object")
    known = {name: _bounded(told[name]) for name in _KEPT if name in told}
    if not all(math.isfinite(value) for value in known.values() if isinstance(value, float)):
        raise ValueError("each number must be finite")
    return Incident.from_json(known)


def _seconds_in(told: Mapping[str, Any], name: str) -> float | None:
    value = told.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= _SECONDS_MAX:
        raise ValueError(f"{name} must be seconds, from 0 to {_SECONDS_MAX:g}")
    return float(value)
