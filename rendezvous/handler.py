"""torch's rendezvous on etcd v3: `--rdzv-backend=unicron --rdzv-endpoint=host:port[,host:port]`.

Works under plain torchrun as well, by the entry point `torchrun.handlers`. Who trains together is decided in
``membership``; here it is waited for, and each round gets a store of its own, which its first node hosts.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from unicron_elastic.recovery.quarantine import Quarantined
from unicron_elastic.rendezvous.cluster_node import ClusterNode
from unicron_elastic.rendezvous.cluster_records import NodeRecord
from unicron_elastic.rendezvous.job_presence import JobPresence
from unicron_elastic.rendezvous.job_records import JobKeys
from unicron_elastic.rendezvous.membership import (
    Formed,
    Member,
    Place,
    Round,
    Settings,
    lost,
    next_round,
    nodes_waiting,
)
from unicron_elastic.rendezvous.store import StoreError

__all__ = ["BACKEND", "ClusterRendezvous", "create_handler", "creator"]

BACKEND = "unicron"
LEASE_TTL_S = 3.0
_PROPOSE_S = 0.5  # between two nodes' turns to write the next round, should the first not do it
_LONGEST_S = 86_400.0  # of all that may be waited for; a lease cannot be longer
_LOOK_S = 1.0  # although nothing changes, as time is a reason, too


class ClusterRendezvous(RendezvousHandler):  # type: ignore[misc]
    """One agent's part in one job."""

    outlives_stores = True  # the next round has another store, and another host for it

    def __init__(
        self,
        presence: JobPresence,
        node: ClusterNode,
        member: Member,
        keys: JobKeys,
        *,
        run_id: str,
        settings: Settings,
        address: str,
        join_timeout_s: float = 600.0,
        connect_timeout_s: float = 30.0,
    ) -> None:
        """``address`` is where other nodes find this one."""
        self._presence = presence
        self._node = node
        self._keys = keys
        self._run_id = run_id
        self._settings = settings
        self._address = address
        self._join_timeout_s = join_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._member = member
        self._round: Round | None = None  # in which this node trains
        self._store: Store | None = None
        self._tells_lost = False

    @property
    def use_agent_store(self) -> bool:
        """The workers use the store that the round's first agent hosts."""
        return os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"

    def get_backend(self) -> str:
        """The name on the command line."""
        return BACKEND

    def get_run_id(self) -> str:
        """The job's id."""
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits for the other nodes, then opens the round's store.

        Raises RendezvousClosedError if the job is over, RendezvousTimeoutError if too few nodes come in time, and
        RendezvousConnectionError if etcd cannot be used.
        """
        deadline = time.monotonic() + self._join_timeout_s
        while True:
            self._store = self._round = None
            found = self._meet(deadline)
            opened = self._open_store(found, deadline)
            if opened is None:
                continue  # its first node was lost meanwhile
            (self._store, where), self._round = opened, found
            rank = found.rank_of(self._member.node_id)
            assert rank is not None
            return RendezvousInfo(PrefixStore("agents", self._store), rank, len(found.places), where)

    def is_closed(self) -> bool:
        """Whether the job is over, as far as that can be seen."""
        return bool(self._presence.view().closed)

    def set_closed(self) -> None:
        """Ends the job for all nodes."""
        self._presence.close_job(f"The job was closed by {self._member.host}.")

    def watch_nodes(
        self,
        on_fault: Callable[[str], None],
        *,
        on_cancel: Callable[[Exception], None] = lambda _error: None,
        on_drain: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        """From now on each is called, once a round at most and from other threads.

        ``on_fault``: why the round cannot go on; ``on_cancel``: the job is to end; ``on_drain``: this node is to leave.
        """
        if self._round is not None:
            watch = RoundWatch(self, self._round, on_fault, on_cancel, on_drain)
            self._tells_lost = True
            self._presence.on_change = self._node.on_change = watch.look
            self._node.on_fault = watch.told
            watch.look()

    def tell_fault(self, reason: str) -> None:
        """Tells the other nodes of the round of a fault here, at once."""
        if self._round is not None:
            self._node.tell_fault(self._round.number, reason)

    def keep_out(self, quarantined: Quarantined) -> str:
        """Puts this node on the cluster's list; why that was not possible, or ""."""
        return self._node.keep_out(quarantined)

    def num_nodes_waiting(self) -> int:
        """For how many nodes it is worth to begin another round: those who wait, and those that are lost.

        The latter only if nobody else is told of them. A blind node begins nothing: what it saw last may be wrong.
        """
        if self._round is None or self._presence.blind:
            return 0
        view = self._presence.view()
        if view.round is None or view.closed:
            return 0
        if view.round.number > self._round.number:
            return 1  # the others have gone on without this node
        return nodes_waiting(view, self._settings) or (0 if self._tells_lost else len(self._lost(self._round)))

    def shutdown(self) -> bool:
        """Leaves, and ends the job if that is why.

        torch's launcher calls this after whatever happened. An error of this node alone must not end the job of all,
        so what is on its way up decides: nothing, or the report of failed workers, is the job's end.
        """
        error = sys.exc_info()[1]
        if error is None or isinstance(error, ChildFailedError):
            self.set_closed()
        self.leave()
        return True

    def leave(self) -> None:
        """Goes without ending the job."""
        self._store = self._round = None
        self._presence.leave()
        self._node.leave()

    def why_stay(self, nodes: int) -> str:
        """Why the job, of ``nodes`` now, cannot go on without this one; "" if it can."""
        return f"the job needs all {nodes} of its nodes." if nodes <= self._settings.min_nodes else ""

    def take_leave(self, nodes: int) -> str:
        """Takes one of the places of this round that the job can spare; why there is none, or "" if there was one."""
        if self._round is None:
            return "it is in no round."
        return self._presence.take_leave(self._round.number, nodes - self._settings.min_nodes)

    # -- how it is done ----------------------------------------------------------------------------------------------

    def _meet(self, deadline: float) -> Round:
        """Says that this node waits, and waits for a round with it."""
        self._wait_for_more_than(self._presence.view().round)
        enough_since: float | None = None
        unchanged_since, last_view = time.monotonic(), None
        while True:
            view, now = self._presence.view(), time.monotonic()
            if view.closed:
                raise RendezvousClosedError(f"the job {self._run_id!r} is over: {view.closed}")
            mine = next((member for member in view.training if member.node_id == self._member.node_id), None)
            if view.round is not None and mine is not None and view.round.number >= self._member.waits_for:
                return view.round
            if now > deadline:
                raise RendezvousTimeoutError(
                    f"no round of the job {self._run_id!r} began within {self._join_timeout_s:g} s"
                )
            is_enough = len(view.waiting) >= self._settings.min_nodes
            enough_since = (enough_since or now) if is_enough else None
            if view != last_view:
                unchanged_since, last_view = now, view
            decided = next_round(view, self._settings, 0.0 if enough_since is None else now - enough_since)
            pause_s = _LOOK_S
            if view.round is not None and self._presence.unheard(view.round):
                pass  # they may still train
            elif isinstance(decided, Formed):
                turn = next((n for n, each in enumerate(view.waiting) if each.node_id == self._member.node_id), 0)
                wait_s = unchanged_since + turn * _PROPOSE_S - now
                if wait_s <= 0:
                    self._presence.propose(decided.round)
                    pause_s = _PROPOSE_S
                else:
                    pause_s = wait_s
            elif decided.again_in_s is not None:
                pause_s = min(pause_s, decided.again_in_s)
            if self._presence.view() == view:
                self._presence.wait(min(pause_s, max(0.0, deadline - now) + 0.01))

    def why_over(self, this_round: Round) -> str:
        """Why ``this_round`` cannot go on, as a sentence; "": it can, or is over already, or this node is blind."""
        if self._round is not this_round or self._presence.blind:
            return ""
        if why := self._presence.get(self._keys.lost(self._member.node_id)):
            return f"This node was taken out of the job: {why}"
        gone = self._lost(this_round)
        told = [self._presence.get(self._keys.lost(place.node_id)) for place in gone]
        words = [why for why in told if why]
        if silent := [place.host for place, why in zip(gone, told, strict=True) if not why]:
            are = "is" if len(silent) == 1 else "are"
            words.append(f"{', '.join(silent)} {are} lost: the lease in the cluster's store is gone.")
        return " ".join(words)

    def why_cancelled(self, this_round: Round) -> str:
        """Why an operator ends the job; "": nobody does."""
        why = self._presence.get(self._keys.cancelled) if self._round is this_round else None
        return f"the job {self._run_id!r} was cancelled: {why}" if why else ""

    def why_drained(self, this_round: Round) -> str:
        """Why an operator wants this node to leave its job; "": nobody does."""
        return self._node.why_kept_out() if self._round is this_round else ""

    def _lost(self, this_round: Round) -> list[Place]:
        """Nodes that have left the round; nobody, if the store has gone on to another one."""
        view = self._presence.view()
        if view.round is None or view.round.number != this_round.number:
            return []
        unheard = self._presence.unheard(this_round)
        return [place for place in lost(view) if place not in unheard]

    def _wait_for_more_than(self, before: Round | None) -> None:
        number = 0 if before is None else before.number
        self._member = replace(self._member, waits_for=max(number, self._member.waits_for) + 1)
        try:
            self._node.enter(self._connect_timeout_s)
            if why := self._node.why_kept_out():
                raise RendezvousClosedError(why)
            self._presence.join(self._member, self._connect_timeout_s)
        except (StoreError, OSError) as error:
            raise RendezvousConnectionError(f"the job {self._run_id!r} cannot be joined: {error}") from error
        if cancelled := self._presence.get(self._keys.cancelled):
            raise RendezvousClosedError(f"the job {self._run_id!r} was cancelled: {cancelled}")

    def _open_store(self, found: Round, deadline: float) -> tuple[Store, RendezvousStoreInfo] | None:
        """The round's store and where it is; None if its host is lost before it is there."""
        key = self._keys.store(found.number)
        timeout = timedelta(seconds=self._join_timeout_s)
        if found.places[0].node_id == self._member.node_id:
            store = TCPStore("0.0.0.0", 0, None, True, timeout, wait_for_workers=False)
            self._presence.say(key, f"{self._address}:{store.port}")
            return store, RendezvousStoreInfo(self._address, store.port)
        while (where := self._presence.get(key)) is None:
            view = self._presence.view()
            is_over = view.round is None or view.round.number != found.number or found.places[0] in lost(view)
            if is_over or time.monotonic() > deadline:
                return None
            self._presence.wait(_LOOK_S)
        host, _, port = where.rpartition(":")
        if not host or not port.isascii() or not port.isdecimal():
            raise RendezvousConnectionError(f"{key} should hold HOST:PORT, and holds {where[:80]!r}")
        store = TCPStore(host, int(port), None, False, timeout, wait_for_workers=False)
        return store, RendezvousStoreInfo(host, int(port))


class RoundWatch:
    """Looks at one round from the threads that hear of changes; each word is said once."""

    def __init__(
        self,
        handler: ClusterRendezvous,
        watched: Round,
        on_fault: Callable[[str], None],
        on_cancel: Callable[[Exception], None],
        on_drain: Callable[[str], None],
    ) -> None:
        self._handler = handler
        self._round = watched
        self._on_fault, self._on_cancel, self._on_drain = on_fault, on_cancel, on_drain
        self._lock = threading.Lock()
        self._said: set[str] = set()

    def look(self) -> None:
        """Asks whether there is anything to say."""
        if why := self._handler.why_over(self._round):
            self._once("fault", lambda: self._on_fault(why))
        if cancelled := self._handler.why_cancelled(self._round):
            self._once("cancel", lambda: self._on_cancel(RendezvousClosedError(cancelled)))
        if drained := self._handler.why_drained(self._round):
            self._once("drain", lambda: self._on_drain(drained))

    def told(self, number: int, reason: str) -> None:
        """Another node has told of a fault."""
        if number == self._round.number:
            self._once("fault", lambda: self._on_fault(reason))

    def _once(self, what: str, say: Callable[[], None]) -> None:
        with self._lock:
            if what in self._said:
                return
            self._said.add(what)
        say()


def creator() -> Callable[[RendezvousParameters], ClusterRendezvous]:
    """What the entry point `torchrun.handlers` names."""
    return create_handler


def create_handler(parameters: RendezvousParameters) -> ClusterRendezvous:
    """As torch's registry wants it. Raises ValueError for what cannot be right, with what would be."""
    from unicron_elastic.rendezvous.etcd_options import etcd_address
    from unicron_elastic.rendezvous.etcd_store import EtcdStore

    given = {name: str(value) for name, value in parameters.config.items()}
    address = etcd_address(parameters.endpoint, given, spell=lambda name: f"--rdzv-conf {name}")
    keys = JobKeys(parameters.run_id)
    settings = Settings(
        min_nodes=parameters.min_nodes,
        max_nodes=parameters.max_nodes,
        last_call_s=_seconds(parameters, "last_call_timeout", 30.0),
        target_nodes=_target(parameters),
    )
    host = os.environ.get("UNICRON_NODE_NAME", "").strip() or socket.gethostname()
    node_id, label = f"{host}/{uuid.uuid4().hex[:12]}", str(parameters.get("label", ""))
    record = NodeRecord(node_id=node_id, host=host, job=parameters.run_id, label=label, pid=os.getpid())
    lease_ttl_s = _seconds(parameters, "lease_ttl", LEASE_TTL_S, 1.0)
    bind, here = parameters.local_addr or "", parameters.local_addr or socket.getfqdn()
    return ClusterRendezvous(
        JobPresence(lambda: EtcdStore(address), keys, lease_ttl_s),
        ClusterNode(lambda: EtcdStore(address), lease_ttl_s, record, bind=bind, address=here),
        Member(node_id=node_id, host=host, label=label, waits_for=0),
        keys,
        run_id=parameters.run_id,
        settings=settings,
        address=here,
        join_timeout_s=_seconds(parameters, "join_timeout", 600.0),
        connect_timeout_s=_seconds(parameters, "connect_timeout", 30.0),
    )


def _target(parameters: RendezvousParameters) -> int | None:
    value = parameters.get("target_nodes")
    if value is None:
        return None
    if not str(value).isascii() or not str(value).isdecimal():
        raise ValueError(f"--rdzv-conf target_nodes must be a number of nodes, not {value!r}")
    return int(value)


def _seconds(parameters: RendezvousParameters, name: str, default: float, least: float = 0.0) -> float:
    value = parameters.get(name, default)
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if not least <= seconds <= _LONGEST_S:
        raise ValueError(f"--rdzv-conf {name} must be {least:g} to {_LONGEST_S:g} seconds, not {value!r}")
    return seconds
