"""How a node of a simulated job meets the others, as handler.py and round_store.py do it."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING

from random_cluster_sight import RETRY_S, Sight
from random_cluster_store import (
    CLOSED,
    DEPARTING,
    LEAVING,
    MEMBER,
    RECALLED,
    REMOVED,
    ROUND,
    STORE,
    Removal,
    RoundStore,
)

from unicron_elastic.membership import rounds as membership
from unicron_elastic.membership.rounds import Formed, JobMember, JobView, Round

if TYPE_CHECKING:
    from random_cluster import Cluster

__all__ = ["Meeting"]

CONNECT_S, JOIN_S = 30.0, 600.0
STORE_CONNECT_S, STORE_CALL_S = 15.0, 30.0
PROPOSE_S, LOOK_S = 0.5, 1.0
NEVER_SEEN = JobView(closed="It was never seen.")


class Meeting(Sight):
    """A node as far as it meets others: from ``begin`` until ``start_workers``, again and again."""

    def __init__(self, cluster: Cluster, node_id: str, host: str) -> None:
        super().__init__(cluster, node_id)
        self.host = host
        self.member = JobMember(node_id=node_id, host=host, waits_for=0)
        # Of the regrouping: "enters", "joins", "meets", "opens", "visits", "arrives", "agrees", "starts"; "exits" is at
        # the end of the job; "": it handles events.
        self.mode = ""
        self.round: Round | None = None
        self.turn = 0  # counts looks that are planned, so that an old one is known
        self.restarts = 0
        self.deadline = 0.0
        self.enough_since: float | None = None
        self.unchanged_since, self.unattended_since, self.last_view = 0.0, 0.0, NEVER_SEEN

    @abstractmethod
    def start_workers(self, restarts: int) -> None:
        """All of the round have come."""

    @abstractmethod
    def look_while_running(self) -> None:
        """Something may have changed while the node is in a round."""

    @abstractmethod
    def lose_round_store(self, number: int) -> None:
        """The host of the round's store is gone, or has closed it."""

    @abstractmethod
    def check_reason(self, reason: str) -> None:
        """Fails if it is no sentence."""

    @abstractmethod
    def end(self, how: str) -> None:
        """The agent ends."""

    # -- to the store of the cluster -------------------------------------------------------------------------------

    def begin(self, restarts: int = 0) -> None:
        """``next_rendezvous``."""
        if self.round is not None:
            self.close_round_store()
        self.round, self.restarts, self.deadline = None, restarts, self.cluster.now + JOIN_S
        self._meet()

    def _meet(self) -> None:
        self._join(is_again=False)

    def _join(self, *, is_again: bool) -> None:
        """Says for which round this node waits; ``is_again``: one has begun without it."""
        if self.has_entered:
            return None if self._leaves_if_recalled() else self._announce(is_again)
        self.mode = "enters"
        return self._enter(self.cluster.now + CONNECT_S)

    def _enter(self, deadline: float) -> None:
        if not self.is_up:
            return None
        if self.settle():
            return None if self._leaves_if_recalled() else self.cluster.after(0.0, 0.05, self._announce, False)
        if self.cluster.now + RETRY_S > deadline:
            return self.end("cannot join")
        return self.cluster.at(self.cluster.now + RETRY_S, self._enter, deadline)

    def _announce(self, is_again: bool) -> None:
        number = 0 if self.view.round is None else self.view.round.number
        self.member = replace(self.member, waits_for=max(number, self.member.waits_for) + 1)
        self.says[f"{MEMBER}{self.id}"] = self.member
        self._take_removal_back()
        self.mode = "joins"
        self._settle_in(is_again)

    def _take_removal_back(self) -> None:
        if self.sees and (removed := f"{REMOVED}{self.id}") in self.mirror:
            self.etcd.commit({}, {}, [removed])

    def _settle_in(self, is_again: bool) -> None:
        if not self.is_up or self.mode != "joins":
            return
        if self.settle():
            self.mode = "meets"
            if not is_again:
                self.enough_since, self.last_view = None, NEVER_SEEN
                self.unchanged_since = self.unattended_since = self.cluster.now
            self.look()
        elif self.cluster.now + RETRY_S > self.deadline:
            self.end("cannot join again")
        else:
            self.cluster.at(self.cluster.now + RETRY_S, self._settle_in, is_again)

    # -- away from it ----------------------------------------------------------------------------------------------

    def why_stay(self, found: Round) -> str:
        """Why the job cannot do without a node of this round."""
        leaving = sum(place.node_id in self.departing and place.node_id != self.id for place in found.places)
        return f"the job needs all {len(found.places)} of its nodes." if self.spare(found) <= leaving else ""

    def spare(self, found: Round) -> int:
        """How many nodes of this round may leave: who waits would take their places, if it has none."""
        there, places = {member.node_id for member in self.view.members}, {place.node_id for place in found.places}
        others = sum(member.node_id not in places for member in self.view.waiting)
        return len(places) + others - len(places - there - self.departing) - self.cluster.settings.min_nodes

    def take_leave(self, found: Round, *, is_departure: bool) -> str:
        """One of the places that the job can spare; why there is none, or ""."""
        if self.is_blind or not self.sees:
            return "the other nodes could not be asked whether they can spare it (no sight)."
        entry = self.etcd.keys.get(LEAVING)
        taken = entry.value[1] if entry is not None and entry.value[0] == found.number else 0
        if taken >= self.spare(found):
            return "other nodes leave already, and the job needs the rest."
        departing = {f"{DEPARTING}{self.id}": ("This node is recalled.", None)} if is_departure else {}
        self.etcd.commit({}, {LEAVING: ((found.number, taken + 1), None), **departing})
        return ""

    def bid_farewell(self) -> None:
        """The others hear that its workers are no more."""
        if self.sees:
            told = Removal(self.id, f"{self.host} has left.", has_ended=True)
            self.etcd.commit({}, {f"{REMOVED}{self.id}": (told, None)})

    def _leaves_if_recalled(self) -> bool:
        if f"{RECALLED}{self.host}" not in self.mirror:
            return False
        found = self.view.round
        if found is not None and not self._may_go(found):
            return False
        self.end("recalled")
        return True

    def _may_go(self, found: Round) -> bool:
        if found.rank_of(self.id) is None:
            is_awaited = any(member.node_id == self.id for member in self.view.waiting)
            return not is_awaited or self.spare(found) > 0
        if self.take_leave(found, is_departure=True):
            return False
        self.bid_farewell()
        return True

    # -- to a round ------------------------------------------------------------------------------------------------

    def look(self) -> None:
        if not self.is_up:
            return
        self.turn += 1
        match self.mode:
            case "meets":
                self._look_for_round()
            case "opens":
                self._look_for_store()
            case "arrives":
                self._look_for_all()
            case "agrees":
                self._look_for_counts()
            case "" if self.round is not None:
                self.look_while_running()

    def _look_again(self, turn: int) -> None:
        if turn == self.turn:
            self.look()

    def _look_for_round(self) -> None:
        view, now = self.view, self.cluster.now
        if view.closed:
            return self.end(f"closed: {view.closed}")
        if self._leaves_if_recalled():
            return None
        if view.round is not None and view.round.number >= self.member.waits_for:
            is_mine = any(member.node_id == self.id for member in view.training)
            return self._open(view.round) if is_mine else self._join(is_again=True)
        if now > self.deadline:
            return self.end("no round began in time")
        if self.why_removed(self.id) and not self.cluster.executor.waits_removed:
            self._take_removal_back()
            self.settle()
        pause_s = self._decide(view, now)
        return self.cluster.at(now + pause_s + 1e-9, self._look_again, self.turn)

    def _decide(self, view: JobView, now: float) -> float:
        """Proposes the next round if it is time; seconds until the next look."""
        settings = self.cluster.settings
        is_enough = len(view.waiting) >= settings.min_nodes
        self.enough_since = (now if self.enough_since is None else self.enough_since) if is_enough else None
        is_early, is_news = self.cluster.executor.counts_early, self.is_blind or view.round != self.last_view.round
        if not membership.may_train_unseen(view) or (is_news and not is_early):
            self.unattended_since = now
        if view != self.last_view:
            self.unchanged_since, self.last_view = now, view
        enough_for_s = 0.0 if self.enough_since is None else now - self.enough_since
        unseen_for_s = now - self.unattended_since
        decided = membership.next_round(view, settings, enough_for_s, unseen_for_s)
        self.check_reason(decided.reason)
        if not isinstance(decided, Formed):
            return LOOK_S if decided.again_in_s is None else min(LOOK_S, decided.again_in_s)
        turn = next((n for n, each in enumerate(view.waiting) if each.node_id == self.id), 0)
        pause_s = self.unchanged_since + turn * PROPOSE_S - now
        if pause_s > 1e-9:
            return pause_s
        if self.cluster.executor.proposes_late and self.chance.random() < 0.2:
            self.cluster.after(0.0, 0.02, self._propose, decided.round)
        else:
            self._propose(decided.round)
        return PROPOSE_S

    def _propose(self, found: Round) -> None:
        if self.is_up and self.sees:
            key = self.mirror.get(ROUND)
            guards = {ROUND: 0 if key is None else key.revision, CLOSED: 0}
            self.etcd.commit(guards, {ROUND: (found, None)})

    # -- to the store of the round ---------------------------------------------------------------------------------

    def _open(self, found: Round) -> None:
        self.mode, self.round = "opens", found
        if found.places[0].node_id != self.id:
            return self.look()
        key = f"{STORE}{found.number}"
        self.cluster.round_stores[found.number] = RoundStore(self, len(found.places))
        self.says[key] = self.id
        self.cluster.after(0.0, 0.05, self.say, key)
        return self._arrive(found)

    def _is_off(self, found: Round) -> bool:
        """Whether a round cannot begin any more; a blind node does not know."""
        view = self.view
        is_other = view.round is None or view.round.number != found.number
        return not self.is_blind and (is_other or bool(view.lost) or bool(view.closed))

    def _look_for_store(self) -> None:
        found = self.round
        assert found is not None
        if f"{STORE}{found.number}" in self.mirror:
            self.mode = "visits"
            store = self.cluster.round_stores[found.number]
            longest_s = STORE_CONNECT_S if store.is_silent else 0.1
            return self.cluster.after(0.0, longest_s, self._arrive, found)
        if self._is_off(found) or self.cluster.now > self.deadline:
            return self._meet_anew()
        return self.cluster.at(self.cluster.now + LOOK_S, self._look_again, self.turn)

    def _arrive(self, found: Round) -> None:
        """Counted in the round's store, and waits there for all; is deaf while that does not answer."""
        if not self.is_up or self.round is not found:
            return
        self.mode = "arrives"
        store = self.cluster.round_stores[found.number]
        if store.is_up:
            store.arrived += 1
            self._wake_others(found, "arrives")
        self.look()

    def _look_for_all(self) -> None:
        found = self.round
        assert found is not None
        store = self.cluster.round_stores[found.number]
        if store.is_silent:
            return self.cluster.after(0.0, STORE_CALL_S, self._give_up, found)
        if not store.is_up:
            is_deaf = self.cluster.executor.regroups_blindly
            return self.end("the round's store is gone") if is_deaf else self._meet_anew()
        if store.arrived == store.size:
            self.mode = "agrees"
            self.cluster.after(0.0, 0.05, self._tell_count, found)
            return self.cluster.after(STORE_CALL_S, STORE_CALL_S, self._give_up, found)
        if self._is_off(found) and not self.cluster.executor.regroups_blindly:
            return self._meet_anew()
        if self.cluster.now > self.deadline and self.cluster.executor.regroups_blindly:
            return self.end("the others did not come to the round's store in time")
        return self.cluster.at(self.cluster.now + LOOK_S, self._look_again, self.turn)

    def _tell_count(self, found: Round) -> None:
        store = self.cluster.round_stores[found.number]
        if self.is_up and self.mode == "agrees" and self.round is found and store.is_up:
            store.counts[self.id] = self.restarts
            self._wake_others(found, "agrees")
            self.look()

    def _look_for_counts(self) -> None:
        """All tell each other their counts of restarts, each waits for all, deaf to all else."""
        assert self.round is not None
        store = self.cluster.round_stores[self.round.number]
        if not store.is_up and not store.is_silent:
            return self.begin(self.restarts)
        if len(store.counts) == store.size and store.is_up:
            self.mode = "starts"
            return self.cluster.after(0.05, 0.5, self.start_workers, max(store.counts.values()))
        return None

    def _wake_others(self, found: Round, mode: str) -> None:
        for node in self.cluster.alive:
            if node is not self and node.mode == mode and node.round is not None and node.round.number == found.number:
                self.cluster.after(0.0, 0.004, node.look)

    def _give_up(self, found: Round) -> None:
        """A call to the round's store was not answered in time."""
        if self.is_up and self.round is found and self.mode in ("arrives", "agrees"):
            self.begin(self.restarts) if self.mode == "agrees" else self._meet_anew()

    def _meet_anew(self) -> None:
        self.close_round_store()
        self.round = None
        self._meet()

    def close_round_store(self, *, is_silent: bool = False) -> None:
        """This node lets go of its round's store; who is connected to it notices, unless the host just vanished."""
        assert self.round is not None
        number = self.round.number
        store = self.cluster.round_stores.get(number)
        if store is None or store.host is not self or not store.is_up:
            return
        store.is_up, store.is_silent = False, is_silent
        for node in self.cluster.alive:
            if node is not self and node.round is not None and node.round.number == number:
                if is_silent:
                    self.cluster.after(STORE_CALL_S - 5.0, STORE_CALL_S, node.lose_round_store, number)
                else:
                    self.cluster.after(0.0, 0.15, node.lose_round_store, number)
