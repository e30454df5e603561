"""One agent as a node of the cluster: its key in the store, its heartbeats, and whether it is kept out of jobs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime

from unicron_elastic.base.quarantine import Quarantined, sentence, why_out
from unicron_elastic.rendezvous.cluster.cluster_answers import ClusterAnswers
from unicron_elastic.rendezvous.cluster.heartbeat_wire import Hello
from unicron_elastic.rendezvous.cluster.heartbeats import NodeHeartbeats
from unicron_elastic.rendezvous.cluster.presence import ClusterPresence
from unicron_elastic.rendezvous.plan.planner import Planner
from unicron_elastic.rendezvous.records.cluster import NodeRecord
from unicron_elastic.rendezvous.records.job import REASON_CHARACTERS
from unicron_elastic.rendezvous.store.interface import LeaseGoneError, Store, StoreError

logger = logging.getLogger(__name__)


class ClusterNode:
    """From ``enter`` to ``leave``. Safe from any thread.

    Without heartbeats, for want of a port, a node is missed by its lease alone: that is said, and it goes on.
    """

    def __init__(
        self,
        open_store: Callable[[], Store],
        lease_ttl_s: float,
        record: NodeRecord,
        *,
        bind: str,
        address: str,
        may_lead: bool = True,
    ) -> None:
        """``bind`` is the address to listen on, "" for all; ``address`` is where other nodes find this one.

        ``may_lead``: whether it coordinates the cluster if nobody else does.
        """
        self._host = record.host
        self._hello = Hello(record.node_id, record.host, record.job)
        self._bind, self._address = bind, address
        self._open_store, self._ttl_s, self._record = open_store, lease_ttl_s, record
        self._may_lead = may_lead
        self._planner = Planner(open_store, lambda words: logger.warning("%s", words))
        self._presence: ClusterPresence | None = None
        self._heartbeats: NodeHeartbeats | None = None
        self._entering = threading.Lock()
        self._sayings: dict[str, str] = {}
        self.on_fault: Callable[[int, str], None] = lambda _round, _reason: None  # from another thread
        self.on_change: Callable[[], None] = lambda: None  # from another thread, sometimes for nothing

    @property
    def leads(self) -> bool:
        """Whether this agent coordinates."""
        return self._heartbeats is not None and self._heartbeats.leads

    @property
    def presence(self) -> ClusterPresence | None:
        """What it sees of the cluster, to be looked at only; None unless it has entered."""
        return self._presence

    def answers(self) -> ClusterAnswers:
        """What it says of its part in the cluster, now."""
        return ClusterAnswers(self._heartbeats, self._planner)

    def enter(self, timeout_s: float, *, again: bool = False) -> None:
        """Says that this node is there; ``again``: although that was said. Raises StoreError, or OSError for a port."""
        with self._entering:
            if self._presence is not None:
                if again or not self._presence.is_up:
                    self._presence.enter(timeout_s)
                return
            heartbeats = NodeHeartbeats(
                self._hello,
                self._bind,
                self._address,
                may_lead=self._may_lead,
                on_fault=self._fault_told,
                say=lambda words: logger.warning("%s", words),
            )
            heartbeats.on_lead = self._planner.lead
            presence = ClusterPresence(self._open_store, self._ttl_s, self._record, heartbeats.address)
            for key, text in self._sayings.items():
                presence.say(key, text)
            try:
                presence.enter(timeout_s)
                heartbeats.start(presence)
            except BaseException:
                presence.leave()
                heartbeats.close()
                raise
            heartbeats.on_change = self._changed
            self._presence, self._heartbeats = presence, heartbeats

    def why_unreached(self) -> str:
        """Why it is not sure that other nodes reach this one, as a clause; "": its coordinator does, or it leads."""
        heartbeats = self._heartbeats  # another thread may leave
        return "" if heartbeats is None else heartbeats.state.why_unreached

    def tell_fault(self, number: int, reason: str) -> None:
        """Tells the other nodes of the job of a fault in its round ``number``."""
        heartbeats = self._heartbeats  # another thread may leave
        if heartbeats is not None:
            heartbeats.tell_fault(number, reason)

    def why_kept_out(self) -> str:
        """Why this node should be in no job, as a sentence; "" if nothing speaks against it."""
        found = None if self._presence is None else self._presence.quarantined(self._host)
        if found is None:
            return ""
        return sentence(found, time.time(), lambda seconds: datetime.fromtimestamp(seconds).astimezone())

    def why_drained(self) -> str:
        """The same as long as this node works in a job: it stays the same sentence."""
        found = None if self._presence is None else self._presence.quarantined(self._host)
        return "" if found is None else f"Node {self._host} {why_out(found, REASON_CHARACTERS)}."

    def keep_out(self, quarantined: Quarantined) -> str:
        """Puts this node on the cluster's list; why that was not possible, or ""."""
        if self._presence is None:
            return "the cluster's store is not open"
        try:
            self._presence.keep_out(quarantined)
        except (StoreError, LeaseGoneError) as error:
            return str(error)
        return ""

    def _fault_told(self, number: int, reason: str) -> None:
        self.on_fault(number, reason)  # which may be another one by now

    def _changed(self) -> None:
        self.on_change()

    def say(self, key: str, text: str) -> None:
        """Writes a key that goes with this agent, now or when the store can be reached."""
        self._sayings[key] = text
        if self._presence is not None:
            self._presence.say(key, text)

    def known_secret(self) -> str:
        """What all agents of the cluster know; "" if that has not been seen yet."""
        return "" if self._heartbeats is None else self._heartbeats.secret

    def claim(self, key: str) -> bool:
        """Writes a key that goes with this agent, if nobody has it."""
        return self._presence is not None and self._presence.claim(key, self._hello.node_id)

    def give_up(self, key: str) -> None:
        """Takes such a key back; without effect if that was done."""
        if self._presence is not None:
            self._presence.unsay(key)

    def join_roster(self) -> None:
        """Says that this host belongs to the cluster, which misses it until it leaves the roster. Raises StoreError."""
        if self._presence is not None:
            self._presence.join_roster()

    def leave_roster(self) -> None:
        """Takes that back, if the store can be reached; else this host will be missed."""
        if self._presence is not None:
            with suppress(StoreError):
                self._presence.leave_roster()

    def leave(self) -> None:
        """Goes. May come twice."""
        with self._entering:
            presence, heartbeats = self._presence, self._heartbeats
            self._presence = self._heartbeats = None
        self._planner.close()
        if presence is not None:
            presence.leave()  # before the connections end, so that nobody is missed
        if heartbeats is not None:
            heartbeats.close()
