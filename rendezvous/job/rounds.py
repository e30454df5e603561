"""The store of one round, for its agents and their workers: its first node hosts it, and all wait there for each other.

torch's agent asks this store for what the other agents say and waits for it, deaf to everything else. So nobody is let
through before all have come: who is lost on the way is noticed here, and the others meet again.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from torch.distributed import DistError, PrefixStore, Store, TCPStore
from torch.distributed import Store as TorchStore

from unicron_elastic.base.store_link import break_when_silent
from unicron_elastic.compat.rendezvous import RendezvousClosedError, RendezvousStoreInfo
from unicron_elastic.membership.rounds import Round
from unicron_elastic.rendezvous.job.bound_store import bound_store

CONNECT_TIMEOUT_S = 15.0
_ARRIVED = "arrived"
_LOOK_S = 0.002
_LOOK_PER_NODE_S = 0.0002  # or hundreds of nodes would keep the store busy with nothing else


class RoundStoreError(Exception):
    """The store's node is gone, or cannot be reached."""


def host(address: str, timeout_s: float) -> TCPStore:
    """A new store in this process, at ``address`` if that is this node's, else at all addresses.

    Its calls wait for up to ``timeout_s`` seconds for what others write.
    """
    return bound_store(address, timedelta(seconds=timeout_s))


def visit(address: str, timeout_s: float) -> tuple[TCPStore, str, int]:
    """The store at HOST:PORT, and both. Raises ValueError for another text, and RoundStoreError."""
    name, _, port = address.rpartition(":")
    if not name or not (port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 65536):
        raise ValueError(f"should hold HOST:PORT, and holds {address[:80]!a}")
    connect_timeout = timedelta(seconds=min(timeout_s, CONNECT_TIMEOUT_S))
    try:
        store = TCPStore(name, int(port), None, False, connect_timeout, wait_for_workers=False)
    except (DistError, OSError, RuntimeError) as error:
        raise RoundStoreError(str(error)) from error
    break_when_silent(int(port))
    store.set_timeout(timedelta(seconds=timeout_s))
    return store, name, int(port)


def place_for_workers(store: TorchStore, rank: int, address: str) -> RendezvousStoreInfo:
    """Return where the first worker is to host a store for the workers alone: a port that is free on the first node.

    ``rank`` and ``address`` are those of this node, which must have arrived. Raises RoundStoreError.
    """
    try:
        return RendezvousStoreInfo.build(rank, PrefixStore("unicron/workers", store), address)
    except (DistError, OSError, RuntimeError) as error:
        raise RoundStoreError(str(error)) from error


def arrive(store: TorchStore, size: int, is_off: Callable[[], bool]) -> bool:
    """Waits until all ``size`` agents have come; False as soon as ``is_off`` says that this will not be.

    Raises RoundStoreError.
    """
    shared = PrefixStore("unicron", store)
    try:
        count = shared.add(_ARRIVED, 1)
        while count < size:
            if is_off():
                return False
            time.sleep(max(_LOOK_S, _LOOK_PER_NODE_S * size))
            count = shared.add(_ARRIVED, 0)
    except (DistError, OSError, RuntimeError) as error:
        raise RoundStoreError(str(error)) from error
    return True


# What an agent hears of the round in which it trains, each word once.


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
    have changed.
    """

    on_fault: Callable[[str], None]
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
            self._once("fault", lambda: self._listener.on_fault(reason))

    def _once(self, what: str, say: Callable[[], None]) -> None:
        with self._lock:
            if what in self._said:
                return
            self._said.add(what)
        say()


# The job's count of restarts, agreed upon by its agents.


def agree_on_restarts(store: Store, group_rank: int, group_size: int, restarts_used: int) -> int:
    """The greatest count any agent of this round knows; every agent must call it once per round.

    torch counts per agent: only the one that saw a failure counts it, so ranks disagree on RESTART_COUNT
    (pytorch#108158). An agent that saw the failure has counted one more than before, several that saw the same one
    agree, and one that joins knows nothing: the greatest is the job's.
    """
    if group_size <= 1 or os.environ.get("TORCH_ELASTIC_WORKER_IDENTICAL", "0") == "1":
        return restarts_used
    shared = PrefixStore("unicron/restarts", store)
    shared.set(str(group_rank), str(restarts_used))
    return max(int(count) for count in shared.multi_get([str(rank) for rank in range(group_size)]))
