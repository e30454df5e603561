"""What a node of a simulated job hears while its workers run, as round_watch.py, handler.py and peers.py tell it."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from random_cluster_meeting import Meeting
from random_cluster_store import FAILED, RECALLED

from unicron_elastic.membership import rounds as membership
from unicron_elastic.membership.decision import Decision, why_not
from unicron_elastic.membership.rounds import Round
from unicron_elastic.recovery import events

if TYPE_CHECKING:
    from random_cluster import Cluster

__all__ = ["POLL_S", "Watching"]

POLL_S, STORE_LOST_S = 0.1, 10.0


class Watching(Meeting):
    """A node as far as it looks after the round in which it trains."""

    def __init__(self, cluster: Cluster, node_id: str, host: str) -> None:
        super().__init__(cluster, node_id, host)
        self.recalled = ("", "")  # as it was told
        self.said: set[str] = set()  # by the watch of the round: each word once
        self.asks = False  # the watch of the peers, which says one word
        self.has_lost_store = False

    @property
    @abstractmethod
    def generation(self) -> int:
        """Of the workers that run."""

    @abstractmethod
    def post(self, event: events.Event) -> None:
        """To the agent's loop."""

    def watch(self) -> None:
        """Begins with a round whose workers have started."""
        assert self.round is not None
        number, store = self.round.number, self.cluster.round_stores[self.round.number]
        self.said, self.asks, self.has_lost_store = set(), True, False
        self.recalled = ("", "")
        if store.news:
            self.hear_news(number)
        elif not store.is_up:
            self.cluster.after(0.0, POLL_S, self.lose_round_store, number)
        self.look()

    def unwatch(self) -> None:
        """The workers of this round have ended."""
        self.asks, self.said = False, {"fault", "waiting"}

    # -- the watch of the round ------------------------------------------------------------------------------------

    def look_while_running(self) -> None:
        assert self.round is not None
        if why := self._why_over(self.round):
            self._tell_fault(why)
        self._look_who_departs(self.round)
        if not why and (waiting := self._nodes_waiting()) and "waiting" not in self.said:
            self.said.add("waiting")
            self.post(events.MembershipChanged(at=0.0, nodes_waiting=waiting, generation=self.generation))

    def _look_who_departs(self, found: Round) -> None:
        nodes = tuple(p.node_id for p in found.places if p.node_id in self.departing and p.node_id != self.id)
        if nodes and f"departs {nodes}" not in self.said:
            self.said.add(f"departs {nodes}")
            reason = f"{' '.join(nodes)} leaves."
            self.post(events.NodesDepart(at=0.0, nodes=nodes, reason=reason, generation=self.generation))
        why = "This node is recalled." if f"{RECALLED}{self.host}" in self.mirror else ""
        recalled = why, self.why_stay(found) if why else ""
        if recalled != self.recalled:
            self.recalled = recalled
            self.post(events.NodeRecalled(at=0.0, reason=why, why_stay=recalled[1]))

    def _tell_fault(self, reason: str) -> None:
        if "fault" not in self.said:
            self.said.add("fault")
            self.post(events.PeerFailed(at=0.0, reason=reason, generation=self.generation))

    def _why_over(self, found: Round) -> str:
        if self.is_blind:
            return self._why_blind_too_long()
        if why := self.why_removed(self.id):
            return f"This node was taken out of the job: {why}"
        if FAILED in self.mirror and not self.cluster.executor.misses_failures:
            return f"The job is over: {self.mirror[FAILED].value}"
        view = self.view
        if view.round is None or view.round.number != found.number:
            return ""
        missing = view.lost if self.cluster.executor.counts_newcomers else view.gone
        missing = tuple(place for place in missing if place.node_id not in self.departing)
        return " ".join(self.why_removed(place.node_id) or f"{place.host} is lost." for place in missing)

    def _why_blind_too_long(self) -> str:
        for_s, patience_s = self.cluster.now - self.blind_since, self.cluster.settings.blind_patience_s
        if self.cluster.executor.trains_on_blindly or not why_not(Decision.TRAIN, "no sight", for_s, patience_s):
            return ""
        self.cluster.faults += "fault" not in self.said  # it costs a restart
        return f"The cluster's store has not been seen for {for_s:.0f} s: others may go on without it now."

    def _nodes_waiting(self) -> int:
        view = self.view
        if self.round is None or self.is_blind or view.round is None or view.closed:
            return 0
        return 1 if view.round.number > self.round.number else membership.nodes_waiting(view, self.cluster.settings)

    def hear_fault(self, number: int, reason: str) -> None:
        """Told by way of the coordinator."""
        if self.is_up and not self.mode and self.round is not None and self.round.number == number:
            self._tell_fault(reason)

    # -- the watch of the peers ------------------------------------------------------------------------------------

    def hear_news(self, number: int) -> None:
        """The round's store tells of a fault."""
        store = self.cluster.round_stores[number]
        if self._asks_in(number) and store.is_up:
            self.asks = False
            self.post(events.PeerFailed(at=0.0, reason=store.news, generation=self.generation))

    def lose_round_store(self, number: int) -> None:
        if not self.is_up or self.round is None or self.round.number != number:
            return
        if self.mode in ("arrives", "agrees"):
            self.look()
        elif self.mode == "exits":
            self.exit()
        elif self._asks_in(number) and not self.has_lost_store and not any("departs" in word for word in self.said):
            self.has_lost_store = True
            self.cluster.after(STORE_LOST_S, STORE_LOST_S + POLL_S, self._miss_round_store, number)

    def _miss_round_store(self, number: int) -> None:
        if self._asks_in(number):
            self.asks = False
            self.cluster.faults += 1  # nobody had a better reason
            reason = "the node that hosts this round's store is gone."
            self.post(events.PeerFailed(at=0.0, reason=reason, generation=self.generation))

    def _asks_in(self, number: int) -> bool:
        return self.is_up and self.asks and not self.mode and self.round is not None and self.round.number == number

    @abstractmethod
    def exit(self) -> None:
        """The job ends here."""
