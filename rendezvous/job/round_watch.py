"""What an agent hears of the round in which it trains, each word once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from unicron_elastic.compat.rendezvous import RendezvousClosedError
from unicron_elastic.membership.rounds import Round


class _Rounds(Protocol):
    def why_over(self, this_round: Round) -> str:
        """Why a round cannot go on, as a sentence; "": it can."""

    def why_taken_out(self, this_round: Round) -> str:
        """Why the others took this node for lost, as a sentence; "": they did not."""

    def nodes_gone(self, this_round: Round) -> tuple[str, ...]:
        """The nodes of a round that are gone, if that is all that is the matter."""

    def nodes_waiting(self, this_round: Round) -> int:
        """For how many nodes it is worth to begin another round."""

    def why_cancelled(self, this_round: Round) -> str:
        """Why an operator ends the job; "": nobody does."""

    def why_recalled(self, this_round: Round) -> tuple[str, str, bool]:
        """Why this node is to leave, "": it is not; why it stays, "": it may leave; whether it is drained."""

    def nodes_departing(self, this_round: Round) -> tuple[tuple[str, ...], str]:
        """The other nodes of a round that are well and leave it, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundListener:
    """What is called, each once a round at most.

    ``on_fault``: why the round cannot go on; ``on_cancel``: the job is to end; ``on_waiting``: how many nodes wait.
    ``on_taken_out``: why the others took this node, which lives, for lost. ``on_lost``: which nodes are gone, each time
    that more are, and why; each is called instead of ``on_fault`` if that is all there is. ``on_depart``: which nodes
    are well and leave, each time that more do, and why. ``on_recall``: why this node is wanted elsewhere or drained,
    why it must stay, and whether it is drained, each time that changes. ``on_change`` is called whenever something may
    have changed. ``on_told`` hears instead of ``on_fault`` what another node tells, and says itself.
    """

    on_fault: Callable[[str], None]
    on_told: Callable[[str], None] | None = None
    on_lost: Callable[[tuple[str, ...], str], None] | None = None
    on_taken_out: Callable[[str], None] | None = None
    on_change: Callable[[], None] = lambda: None
    on_cancel: Callable[[Exception], None] = lambda _error: None
    on_waiting: Callable[[int], None] = lambda _nodes: None
    on_recall: Callable[[str, str, bool], None] = lambda _reason, _why_stay, _is_drained: None
    on_depart: Callable[[tuple[str, ...], str], None] = lambda _nodes, _reason: None


class RoundWatch:
    """Looks at one round from the threads that hear of changes; each word is said once."""

    def __init__(
        self,
        handler: _Rounds,
        watched: Round,
        listener: RoundListener,
    ) -> None:
        self._handler = handler
        self._round = watched
        self._listener = listener
        self._lock = threading.Lock()
        self._said: set[str] = set()
        self._recalled = ("", "", False)  # as it was told

    def look(self) -> None:
        """Asks whether there is anything to say."""
        self._listener.on_change()
        why = self._handler.why_over(self._round)
        if why:
            self._say_why_over(why)
        if cancelled := self._handler.why_cancelled(self._round):
            self._once("cancel", lambda: self._listener.on_cancel(RendezvousClosedError(cancelled)))
        self._look_who_departs()
        # A round whose lost nodes the others go on without is not over for them: it takes newcomers.
        is_over = bool(why) and not (self._listener.on_lost is not None and self._handler.nodes_gone(self._round))
        if (waiting := self._handler.nodes_waiting(self._round)) and not is_over:
            self._once("waiting", lambda: self._listener.on_waiting(waiting))

    def _say_why_over(self, why: str) -> None:
        nodes = self._handler.nodes_gone(self._round)
        on_lost, on_taken_out = self._listener.on_lost, self._listener.on_taken_out
        if on_taken_out is not None and (taken_out := self._handler.why_taken_out(self._round)):
            self._once("fault", lambda: on_taken_out(taken_out))
        elif nodes and on_lost is not None:
            self._once(f"lost {' '.join(nodes)}", lambda: on_lost(nodes, why))
        else:
            self._once("fault", lambda: self._listener.on_fault(why))

    def _look_who_departs(self) -> None:
        nodes, reason = self._handler.nodes_departing(self._round)
        if nodes:
            self._once(f"departs {' '.join(nodes)}", lambda: self._listener.on_depart(nodes, reason))
        recalled = self._handler.why_recalled(self._round)
        with self._lock:
            is_known, self._recalled = self._recalled == recalled, recalled
        if not is_known:
            self._listener.on_recall(*recalled)

    def told(self, number: int, reason: str) -> None:
        """Another node has told of a fault."""
        if number == self._round.number:
            hear = self._listener.on_told or self._listener.on_fault
            self._once("fault", lambda: hear(reason))

    def _once(self, what: str, say: Callable[[], None]) -> None:
        with self._lock:
            if what in self._said:
                return
            self._said.add(what)
        say()
