"""Where workers that began again got their state from, as part of the incident for which they had to. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from unicron_elastic.base.incident import Incident
from unicron_elastic.base.text import one_line, shorten

LATE_S = 600.0  # after the fault: then it belongs to something else
_TEXT_CHARACTERS = 300
_SOURCES_MOST = 16
_BYTES_MAX = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMove:
    """A worker has its state, at ``at`` in monotonic seconds, after ``took_s``: ``bytes`` of it, from ``source``."""

    at: float
    took_s: float
    bytes: int
    source: str


def state_move(took_s: float, count: int, sources: Sequence[str], now: float) -> StateMove:
    """What a worker says of it, just now. Raises ValueError for what cannot be; the script may have written it."""
    if not 0 <= took_s <= LATE_S:
        raise ValueError("took_s must be seconds")
    if not 0 <= count <= _BYTES_MAX:
        raise ValueError("bytes must be a count")
    names = list(dict.fromkeys(one_line(each) for each in sources[:_SOURCES_MOST]))
    return StateMove(at=now, took_s=took_s, bytes=count, source=shorten(", ".join(names), _TEXT_CHARACTERS))


class StateMoves:
    """Of one node: what is known of its newest incident beside what its state machine says."""

    def __init__(self) -> None:
        self._incident: Incident | None = None
        self._moves: list[StateMove] = []

    def recorded(self, incident: Incident) -> Incident:
        """The record with the moves that belong to it."""
        if self._incident is None or incident.number > self._incident.number:
            self._moves = []
        if self._incident is None or incident.number >= self._incident.number:
            self._incident = incident
            return _with(incident, self._moves)
        return incident

    def moved(self, move: StateMove) -> Incident | None:
        """The record of the newest incident with one more move, to be recorded again; None, if it belongs to none."""
        incident = self._incident
        began_at = move.at - move.took_s
        if incident is None or incident.occurred_at is None or incident.action in ("", "fail", "observe", "isolate"):
            return None
        if not incident.occurred_at <= began_at <= incident.occurred_at + LATE_S:
            return None
        self._moves.append(move)
        return _with(incident, self._moves)


def _with(incident: Incident, moves: list[StateMove]) -> Incident:
    if not moves:
        return incident
    ended_at, began_at = max(move.at for move in moves), min(move.at - move.took_s for move in moves)
    return replace(
        incident,
        state_at=ended_at,
        state_s=ended_at - began_at,
        state_bytes=sum(move.bytes for move in moves),
        state_from=shorten("; ".join(dict.fromkeys(move.source for move in moves)), _TEXT_CHARACTERS),
    )
