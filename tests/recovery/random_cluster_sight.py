"""How a node of a simulated job sees the store, and says there what it has to say, as presence.py does it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from random_cluster_store import CLOSED, DEPARTING, LEASE_TTL_S, MEMBER, REMOVED, ROUND, Key, Removal

from unicron_elastic.membership.rounds import JobView

if TYPE_CHECKING:
    from random_cluster import Cluster

__all__ = ["BEAT_S", "RETRY_S", "Sight"]

BEAT_S, RETRY_S = 1.0, 0.2
# A silent watch counts as blind after 3 to 3.5 s; the look that follows may wait for a call to the store to fail, 5 s.
NOTICE_S, LATE_LOOK_S = 3.5, 5.2


class Sight(ABC):
    """A node as far as it hears of the store's changes and keeps its keys there."""

    def __init__(self, cluster: Cluster, node_id: str) -> None:
        self.cluster, self.id = cluster, node_id
        self.etcd, self.chance = cluster.store, cluster.chance
        self.is_up, self.is_cut, self.is_blind, self.has_entered = True, False, False, False
        self.blind_since = self.silent_since = 0.0
        self.lease: int | None = None
        self.says: dict[str, Any] = {}
        self.is_unsaid = False
        self.mirror: dict[str, Key] = {}
        self.heard_until = 0.0
        self.heard_revision = 0
        self.view = JobView()

    @abstractmethod
    def look(self) -> None:
        """Something may have changed."""

    @property
    def sees(self) -> bool:
        return not self.is_cut and not self.etcd.is_away

    # -- what is heard ---------------------------------------------------------------------------------------------

    def hear_later(self, revision: int, changes: Sequence[tuple[str, Key | None]]) -> None:
        lag = self.chance.choice((0.001, 0.01, 0.1)) if self.chance.random() < 0.9 else 1.0
        self.heard_until = max(self.heard_until, self.cluster.now + self.chance.uniform(0, lag)) + 1e-6
        self.cluster.at(self.heard_until, self._hear, revision, changes)

    def _hear(self, revision: int, changes: Sequence[tuple[str, Key | None]]) -> None:
        if self.is_up and self.sees and revision > self.heard_revision:  # else it is heard when it sees again
            self.heard_revision = revision
            self._take(changes)

    def _hear_all(self) -> None:
        self.heard_revision = self.etcd.revision
        self.mirror.clear()
        self._take(list(self.etcd.keys.items()))

    def _take(self, changes: Sequence[tuple[str, Key | None]]) -> None:
        for name, key in changes:
            self.mirror.pop(name, None)
            if key is not None:
                self.mirror[name] = key
        members = tuple(self.mirror[name].value for name in sorted(self.mirror) if name.startswith(MEMBER))
        found, closed = self.mirror.get(ROUND), self.mirror.get(CLOSED)
        removed = (key.value for name, key in self.mirror.items() if name.startswith(REMOVED))
        self.view = JobView(
            members=members,
            round=None if found is None else found.value,
            closed="" if closed is None else closed.value,
            ended=frozenset(each.node_id for each in removed if each.has_ended),
        )
        self.look()

    @property
    def departing(self) -> set[str]:
        """The nodes that are well and leave, or have left so."""
        return {name.removeprefix(DEPARTING) for name in self.mirror if name.startswith(DEPARTING)}

    def why_removed(self, node_id: str) -> str:
        """Why an agent was removed from the job, or left it; "": it was not."""
        found = self.mirror.get(f"{REMOVED}{node_id}")
        return found.value.reason if found is not None and isinstance(found.value, Removal) else ""

    # -- blindness -------------------------------------------------------------------------------------------------

    def lose_sight(self) -> None:
        """This node is cut off from the store: its lease runs out a while after its last sign of life."""
        if self.lease is not None and self.etcd.leases.get(self.lease) == float("inf"):
            self.etcd.run_out(self.lease, self.cluster.now + LEASE_TTL_S - self.chance.uniform(0, BEAT_S))
        self.notice_blindness_later()

    def notice_blindness_later(self) -> None:
        if not self.is_blind and not (self.is_cut and self.etcd.is_away):  # else it was silent before
            self.silent_since = self.cluster.now
        self.cluster.after(0.0, NOTICE_S, self._notice_blindness)

    def _notice_blindness(self) -> None:
        if self.is_blind or self.sees or not self.is_up:
            return
        executor, now = self.cluster.executor, self.cluster.now
        self.is_blind, self.blind_since = True, now if executor.notices_late else self.silent_since
        due_s = self.blind_since + self.cluster.settings.blind_patience_s + 1e-6 - now
        self.cluster.after(due_s, due_s + executor.looks_late * LATE_LOOK_S, self.look)

    def regain_sight(self) -> None:
        if not self.sees or not self.is_up or not self.has_entered:
            return
        self.is_blind = False
        self._hear_all()
        self.cluster.after(0.0, RETRY_S, self._beat)

    # -- what is said ----------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Keeps the lease alive, or tells all again under a new one; so too what could not be said."""
        if not self.is_up or not self.sees or self.lease is None:
            return
        if self.lease not in self.etcd.leases or (self.is_unsaid and not self.cluster.executor.says_once):
            self.settle()
        else:
            self.etcd.leases[self.lease] = float("inf")

    def settle(self) -> bool:
        """Opens what is not open, and says all there is to say; False: the store cannot be reached."""
        if not self.sees or not self.is_up:
            return False
        if self.lease not in self.etcd.leases:
            self.lease = self.etcd.grant()
        self.etcd.leases[self.lease] = float("inf")
        if not self.has_entered:
            self.has_entered, self.is_blind = True, False
            self._hear_all()
        self.is_unsaid = False
        if self.says:
            self.etcd.commit({}, {name: (said, self.lease) for name, said in self.says.items()})
        return True

    def say(self, key: str) -> None:
        """Writes a key that goes with this agent, now or when the store can be reached."""
        if not self.is_up:
            return
        if self.sees and self.lease in self.etcd.leases:
            self.etcd.commit({}, {key: (self.says[key], self.lease)})
        else:
            self.is_unsaid = True
            self.cluster.after(0.0, BEAT_S, self._beat)
