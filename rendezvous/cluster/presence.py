"""An agent's presence in the cluster, whatever its job: its node's key, and what all agents say of the coordinator."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple
from urllib.parse import unquote

from unicron_elastic.base.quarantine import Quarantined
from unicron_elastic.membership.coordination import Depose, Leader, Node, Remove
from unicron_elastic.rendezvous.records.cluster import (
    CLUSTER,
    LEADER,
    NODES,
    QUARANTINE,
    ROSTER,
    SECRET,
    UNREACHABLE,
    LeaderRecord,
    NodeRecord,
    RosterRecord,
    add_quarantined,
    leader_text,
    node_key,
    node_text,
    parse_leader,
    parse_node,
    parse_quarantined,
    parse_roster,
    quarantine_key,
    quarantine_text,
    roster_key,
    roster_text,
)
from unicron_elastic.rendezvous.records.job import JobKeys, lost_text
from unicron_elastic.rendezvous.records.plan_keys import status_key
from unicron_elastic.rendezvous.store.interface import Change, Entry, Put, Snapshot, Store, StoreError, Write
from unicron_elastic.rendezvous.store.session import Presence

LOST_FOR_S = 600.0  # so long it is known why a node was removed

logger = logging.getLogger(__name__)


class Missed(NamedTuple):
    """A host that belongs to the cluster and has no agent, and the revision of its key."""

    record: RosterRecord
    revision: int


class ClusterMirror:
    """What is below ``cluster/``, read when it changes."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._entries: dict[str, Entry] = {}
        self.odd: dict[str, str] = {}
        self.leader: Leader | None = None
        self.quarantined: dict[str, Quarantined] = {}  # by host
        for entry in snapshot.entries:
            self._take(entry.key, entry)

    def apply(self, changes: Iterable[Change]) -> None:
        """Takes changes over, which come in order."""
        for change in changes:
            self._take(change.key, change.entry)

    def get(self, key: str) -> Entry | None:
        """What a key holds."""
        return self._entries.get(key)

    def accusers(self) -> tuple[str, frozenset[str]]:
        """The coordinator, and those who say that they cannot reach it."""
        leader = "" if self.leader is None else self.leader.node_id
        accused = ((key, entry) for key, entry in self._entries.items() if key.startswith(UNREACHABLE))
        said = ((key, entry.value.decode(errors="replace")) for key, entry in accused)
        return leader, frozenset(unquote(key.removeprefix(UNREACHABLE)) for key, who in said if who == leader)

    def _take(self, key: str, entry: Entry | None) -> None:
        self.odd.pop(key, None)
        self._entries.pop(key, None)
        if entry is not None:
            self._entries[key] = entry
        try:
            if key == LEADER:
                self.leader = None if entry is None else _leader(entry)
            elif key.startswith(QUARANTINE):
                self._take_quarantined(key, entry)
        except ValueError as error:
            self.odd[key] = str(error)

    def _take_quarantined(self, key: str, entry: Entry | None) -> None:
        for host in [host for host in self.quarantined if quarantine_key(host) == key]:
            del self.quarantined[host]
        if entry is not None:
            found = parse_quarantined(entry)
            self.quarantined[found.node] = found


class ClusterPresence(Presence[ClusterMirror]):
    """From ``enter`` to ``leave``; the commands of ``coordination`` that need the store raise StoreError."""

    tells_sight = False

    def __init__(
        self, open_store: Callable[[], Store], lease_ttl_s: float, record: NodeRecord | None, address: str = ""
    ) -> None:
        """``record`` is this agent's node, which listens at ``address``; None for a coordinator without one."""
        super().__init__(open_store, CLUSTER, ClusterMirror, lease_ttl_s)
        self._record = None if record is None else replace(record, address=address)
        if record is not None and self._record is not None:
            self._said[node_key(record.node_id)] = node_text(self._record)
        self._is_on_roster = False

    @property
    def leader(self) -> Leader | None:
        """Return who coordinates, as last seen."""
        with self._changed:
            return None if self._mirror is None else self._mirror.leader

    @property
    def accusers(self) -> tuple[str, frozenset[str]]:
        """Return the coordinator's id and the ids of agents that report it unreachable."""
        with self._changed:
            return ("", frozenset()) if self._mirror is None else self._mirror.accusers()

    def quarantined(self, host: str) -> Quarantined | None:
        """Why a host is kept out of the cluster's jobs; None if it is not."""
        now = time.time()
        with self._changed:
            found = None if self._mirror is None else self._mirror.quarantined.get(host)
            return None if found is None or (found.until is not None and found.until <= now) else found

    def join_roster(self) -> None:
        """Says that this host belongs to the cluster, which misses it until it leaves the roster. Raises StoreError."""
        self._is_on_roster = True
        self._say_more(self._opened())

    def leave_roster(self) -> None:
        """Takes that back, unless another agent says it of this host by now. Raises StoreError."""
        self._is_on_roster = False
        if self._record is not None:
            found = self._opened().read(roster_key(self._record.host)).entry
            if found is not None and _is_of(found, self._record.node_id):
                self._opened().commit({found.key: found.revision}, deletes=[found.key])

    def keep_out(self, quarantined: Quarantined) -> None:
        """Puts a host on the cluster's list, together with why it is there already. Raises StoreError."""
        key = quarantine_key(quarantined.node)
        self._opened().update(
            key,
            lambda found: Write(puts=(Put(key, quarantine_text(add_quarantined(found, quarantined))),)),
            what=f"the quarantine of node {quarantined.node}",
        )

    def known_secret(self) -> str:
        """What all agents of the cluster know; "" if that has not been seen yet."""
        return self.get(SECRET) or ""

    def secret(self) -> str:
        """The same, made if there is none. Raises StoreError."""
        store = self._opened()
        while (entry := store.read(SECRET).entry) is None:
            store.create(SECRET, secrets.token_hex(32).encode())
        return entry.value.decode(errors="replace")

    def nodes(self) -> tuple[tuple[Node, ...], tuple[Missed, ...]]:
        """All agents of the cluster, and the hosts that belong to it of whose loss nobody told. Raises StoreError."""
        found, roster = list[Node](), list[Missed]()
        for entry in self._opened().read_prefix(NODES).entries:
            try:
                if entry.key.startswith(ROSTER):
                    roster.append(Missed(parse_roster(entry), entry.revision))
                else:
                    told = parse_node(entry)
                    found.append(Node(told.node_id, told.host, told.address, told.job, entry.revision))
            except ValueError as error:
                logger.debug("%s", error)
        there = {node.node_id for node in found}
        missed = [each for each in roster if each.record.node_id not in there and not each.record.reason]
        return tuple(found), tuple(missed)

    def tell_missed(self, missed: Missed, leader_revision: int) -> None:
        """Writes since when a host is lost, of which the lease alone has told. Raises StoreError."""
        reason = f"{missed.record.host} is lost: nothing was heard of its agent until the agent's lease ran out."
        guards = {LEADER: leader_revision, roster_key(missed.record.host): missed.revision}
        self._opened().commit(guards, [_loss(missed.record, reason)])

    def lead(self, record: LeaderRecord, revision: int, deposes: Depose | None = None) -> bool:
        """Takes the leader's key, if it is at ``revision``, and removes who had it. Raises StoreError."""
        store, node = self._opened(), None if deposes is None else deposes.node
        lease_id = self._lease_id
        if lease_id is None:
            raise StoreError("this agent has no lease at the moment")  # without one the key would outlive it
        guards, puts, deletes = {LEADER: revision}, [Put(LEADER, leader_text(record), lease_id)], list[str]()
        if deposes is not None:
            guards[node_key(deposes.by.node_id)] = deposes.by.revision
        if deposes is not None and node is not None:
            more, deletes = _removal(store, node, deposes.reason, deposes.has_ended)
            puts += more
        return store.commit(guards, puts, deletes) is not None

    def remove(self, told: Remove) -> bool:
        """Removes a node by the right of the leader's key. False if one or the other has changed. Raises StoreError."""
        store, node = self._opened(), told.node
        puts, deletes = _removal(store, node, told.reason, told.has_ended)
        guards = {LEADER: told.leader_revision, node_key(node.node_id): node.revision}
        return store.commit(guards, puts, deletes) is not None

    def _say_more(self, store: Store) -> None:
        if self._is_on_roster and self._record is not None:
            record = RosterRecord(host=self._record.host, node_id=self._record.node_id)
            store.put(roster_key(record.host), roster_text(record))

    def _opened(self) -> Store:
        store = self._store
        if store is None or self._must_reopen:
            raise StoreError("the cluster's store is not open")
        return store


def _removal(store: Store, node: Node, reason: str, has_ended: bool) -> tuple[list[Put], list[str]]:
    """The node's keys go, and why is kept where its job finds it, and where people do if its host belongs here."""
    deletes = [node_key(node.node_id), status_key(node.node_id)]
    if not node.job:
        found = store.read(roster_key(node.host)).entry
        belongs = found is not None and _is_of(found, node.node_id)
        return [_loss(RosterRecord(host=node.host, node_id=node.node_id), reason)] if belongs else [], deletes
    keys = JobKeys(node.job)
    lease_id = store.grant(LOST_FOR_S).lease_id
    told = lost_text(node.node_id, reason, has_ended=has_ended)
    return [Put(keys.lost(node.node_id), told, lease_id)], [*deletes, keys.member(node.node_id)]


def _loss(record: RosterRecord, reason: str) -> Put:
    lost = replace(record, reason=reason, lost_unix_s=time.time())
    return Put(roster_key(record.host), roster_text(lost))


def _is_of(entry: Entry, node_id: str) -> bool:
    """Whether it was this agent that said last that its host belongs to the cluster."""
    try:
        return parse_roster(entry).node_id == node_id
    except ValueError:
        return False


def _leader(entry: Entry) -> Leader:
    record = parse_leader(entry)
    return Leader(record.node_id, record.host, record.address, entry.revision, record.is_dedicated)
