"""What the nodes of a simulated job share: the store with the job's records, and the store of each round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from unicron_elastic.membership.rounds import JobMember, Round

if TYPE_CHECKING:
    from random_cluster import Cluster
    from random_cluster_meeting import Meeting

__all__ = [
    "CLOSED",
    "DEPARTING",
    "FAILED",
    "LEASE_TTL_S",
    "LEAVING",
    "MEMBER",
    "RECALLED",
    "REMOVED",
    "ROUND",
    "STORE",
    "EtcdStore",
    "Executor",
    "Key",
    "Removal",
    "RoundStore",
]

LEASE_TTL_S = 3.0
ROUND, CLOSED, FAILED, LEAVING = "round", "closed", "failed", "leaving"
MEMBER, REMOVED, STORE = "members/", "lost/", "stores/"  # what comes before a node's id, or a round's number
RECALLED, DEPARTING = "recalled/", "departing/"  # before a host, or a node's id


@dataclass(frozen=True, slots=True, kw_only=True)
class Executor:
    """What carries the decisions out, where it matters how. The defaults are what the decisions rely on.

    Each of the others breaks an invariant, and a test shows which.
    """

    regroups_blindly: bool = False  # nobody looks whether a node is lost while all of a new round meet in its store
    closes_on_leaving: bool = False  # a node that leaves closes the job, as one does whose workers failed for good
    counts_newcomers: bool = False  # who gives its place up to meet a newcomer is told as lost: that is a restart
    misses_failures: bool = False  # who trains does not look whether the job has failed
    says_once: bool = False  # what could not be said, as the store was away, is not said as long as the lease lives
    newcomers_are_free: bool = False  # not even workers whose peers stop for a newcomer, and who fail of it, may count
    trains_on_blindly: bool = False  # a node that is blind does not stop its workers, however long that lasts
    notices_late: bool = False  # a blind node's patience begins when the silence is noticed, not with the silence
    looks_late: bool = False  # the end of its patience is noticed when a call to the store has failed, which takes long
    # Who waits counts from the last look at which a node of the round was there, with no margin; it counts on while it
    # is blind, and when another round has come meanwhile.
    counts_early: bool = False
    waits_removed: bool = False  # who is removed while it waits for a round does not say again that it waits
    proposes_late: bool = False  # the round may change between the look at it and the proposal of the next one


@dataclass(frozen=True, slots=True)
class Removal:
    """Why an agent is no member any more. ``has_ended``: its workers are certain to be no more."""

    node_id: str
    reason: str
    has_ended: bool


@dataclass(frozen=True, slots=True)
class Key:
    """What one key of the store holds."""

    value: Any
    revision: int
    created: int
    lease: int | None


@dataclass(slots=True)
class RoundStore:
    """What the first node of a round hosts: the counts of restarts, the news, the exit barrier."""

    host: Meeting
    size: int
    is_up: bool = True
    is_silent: bool = False  # its host is gone, and nobody was told
    arrived: int = 0
    news: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)


class EtcdStore:
    """One truth with revisions and leases; nodes hear of each change in order, each after a while of its own."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.revision = 0
        self.keys: dict[str, Key] = {}
        self.leases: dict[int, float] = {}  # when each runs out; inf: it is kept alive
        self.is_away = False
        self.rounds: list[Round] = []

    def grant(self) -> int:
        self.revision += 1
        self.leases[self.revision] = float("inf")
        return self.revision

    def commit(
        self, guards: Mapping[str, int], puts: Mapping[str, tuple[Any, int | None]], deletes: Iterable[str] = ()
    ) -> bool:
        for key, revision in guards.items():
            found = self.keys.get(key)
            if (0 if found is None else found.revision) != revision:
                return False
        self.revision += 1
        changes: list[tuple[str, Key | None]] = []
        for key, (value, lease) in puts.items():
            before = self.keys.get(key)
            created = before.created if before else self.revision
            told = replace(value, joined=created) if isinstance(value, JobMember) else value
            self.keys[key] = Key(told, self.revision, created, lease)
            changes.append((key, self.keys[key]))
            if key == ROUND:
                self.cluster.check_round(None if before is None else before.value, value)
        changes += [(key, None) for key in deletes if self.keys.pop(key, None) is not None]
        for node in self.cluster.nodes:
            if node.has_entered and node.is_up:
                node.hear_later(self.revision, changes)
        return True

    def revoke(self, lease: int) -> None:
        if self.leases.pop(lease, None) is not None:
            self.commit({}, {}, [name for name, key in self.keys.items() if key.lease == lease])

    def remove(self, node_id: str, reason: str, *, has_ended: bool) -> None:
        """The coordinator finds that an agent is gone."""
        if not self.is_away and f"{MEMBER}{node_id}" in self.keys:
            self.cluster.faults += 1
            self.cluster.say("store", f"removes {node_id}")
            told = Removal(node_id, reason, has_ended)
            self.commit({}, {f"{REMOVED}{node_id}": (told, None)}, [f"{MEMBER}{node_id}"])

    def run_out(self, lease: int, at: float) -> None:
        """The lease is kept alive no more, and is gone at ``at``, unless the store is away then."""
        if lease in self.leases:
            self.leases[lease] = at
            self.cluster.at(at, self._expire, lease, at)

    def _expire(self, lease: int, at: float) -> None:
        if self.leases.get(lease) == at and not self.is_away:
            self.cluster.faults += 1  # whoever is taken for lost costs a restart
            self.revoke(lease)

    def come_back(self) -> None:
        """Leases have their full time again, as under a new leader."""
        self.is_away = False
        for lease, ends in list(self.leases.items()):
            if ends != float("inf"):
                self.run_out(lease, self.cluster.now + LEASE_TTL_S)
