"""The thread of an agent that does what ``coordination`` decides: connections here, the store's part in a second one.

The store may keep a call waiting for seconds; connections must not wait that long.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from unicron_elastic.base.text import one_line
from unicron_elastic.membership import coordination
from unicron_elastic.membership.coordination import CoordinationState, Leader, handle
from unicron_elastic.rendezvous.cluster.heartbeat_wire import LINE_BYTES_MAX, Hello
from unicron_elastic.rendezvous.cluster.links import Links
from unicron_elastic.rendezvous.cluster.presence import ClusterPresence
from unicron_elastic.rendezvous.records.cluster import LeaderRecord, unreachable_key
from unicron_elastic.rendezvous.store.interface import LeaseGoneError, StoreError

TICK_S = 0.1
TELL_S = 1.0  # between two looks of who listens, as time is a change, too; the store may be deaf for longer
_REASON_CHARACTERS = 2000

logger = logging.getLogger(__name__)


class NodeHeartbeats:
    """One agent's part in noticing who is gone, and the way in which faults are told."""

    def __init__(
        self,
        hello: Hello,
        bind: str,
        address: str,
        *,
        is_dedicated: bool = False,
        may_lead: bool = True,
        on_fault: Callable[[int, str], None] = lambda _round, _reason: None,
        say: Callable[[str], None] = logger.info,
    ) -> None:
        """Listens on ``bind``, "" for all; others find it at ``address``.

        ``on_fault`` hears, from another thread, of faults in a round of this job, by its number. Raises OSError if
        there can be no port.
        """
        self._hello = hello
        self._address = address
        self._on_fault = on_fault
        self._say = say
        self._presence: ClusterPresence | None = None
        self.on_change: Callable[[], None] = lambda: None  # in the store, sometimes for nothing; from its thread
        # Told the revision of the leader's key when this agent begins to coordinate, and 0 when it ends.
        self.on_lead: Callable[[int], None] = lambda _revision: None
        self._told_lead = 0
        self._state = CoordinationState(me=hello.node_id, host=hello.host, is_dedicated=is_dedicated, may_lead=may_lead)
        self.lost_nodes = 0  # that this agent has removed
        self.turned_at = time.monotonic()  # when the loop last went round
        self._is_looking = False
        self._posted: deque[Callable[[], None]] = deque()
        self._links = Links(
            bind,
            hello,
            on_opened=lambda node: self._handle(coordination.LinkOpened(time.monotonic(), node)),
            on_lost=lambda node: self._handle(coordination.LinkLost(time.monotonic(), node)),
            on_probed=lambda node, answer: self._handle(coordination.Probed(time.monotonic(), node, answer)),
            on_message=self._heard,
        )
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_over = threading.Event()
        self._is_look_due = False
        self._threads = [
            threading.Thread(target=self._run, name="unicron-heartbeats", daemon=True),
            threading.Thread(target=self._work, name="unicron-coordination", daemon=True),
        ]

    @property
    def address(self) -> str:
        """Where this agent listens."""
        return (
            f"[{self._address}]:{self._links.port}" if ":" in self._address else f"{self._address}:{self._links.port}"
        )

    @property
    def leads(self) -> bool:
        """Whether this agent coordinates."""
        return self._state.leads

    @property
    def state(self) -> CoordinationState:
        """What this agent knows of the others. From any thread."""
        return self._state

    @property
    def secret(self) -> str:
        """What all agents of the cluster know; "" before the start."""
        return self._links.secret

    def start(self, presence: ClusterPresence) -> None:
        """Begins, once the presence has entered."""
        self._presence = presence
        self._links.secret = presence.known_secret() or presence.secret()
        presence.on_change = self._store_changed
        self._post(self._look)
        for thread in self._threads:
            thread.start()

    def tell_fault(self, number: int, reason: str) -> None:
        """Tells the other nodes of the job, through the coordinator, of a fault in its round ``number``."""
        told = {"fault": {"job": self._hello.job, "round": number, "reason": _bounded(reason)}}

        def tell() -> None:
            if self._state.leads:
                self._links.tell_nodes(self._hello.job, told)
            else:
                self._links.tell_coordinator(told)

        self._post(tell)

    def close(self) -> None:
        """Ends both threads and all connections. May come twice."""
        if self._presence is not None:
            self._presence.on_change = lambda: None
        self._is_over.set()
        self._todo.put(None)
        self._links.wake()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(2.0)
        if not self._threads[0].is_alive():
            self._links.close()

    def _store_changed(self) -> None:
        if not self._is_look_due:  # many changes at once are looked at once
            self._is_look_due = True
            self._post(self._look)
        self.on_change()

    # -- the thread of the connections ---------------------------------------------------------------------------------

    def _run(self) -> None:
        ticked_at = told_at = 0.0
        while not self._is_over.is_set():
            try:
                self._links.poll(TICK_S)
                self.turned_at = time.monotonic()
                while self._posted:
                    self._posted.popleft()()
                now = time.monotonic()
                if now - ticked_at >= TICK_S:
                    ticked_at = now
                    self._handle(coordination.MembershipTick(now))
                if now - told_at >= TELL_S:
                    told_at = now
                    self.on_change()
            except Exception:  # without this thread nobody would hear of anything any more
                logger.exception("An error in the heartbeats of this agent, which go on")
                self._is_over.wait(TICK_S)

    def _post(self, call: Callable[[], None]) -> None:
        self._posted.append(call)
        self._links.wake()

    def _look(self) -> None:
        """What the store says now."""
        self._is_look_due = False  # first, so that a change from now on is looked at again
        presence, now = self._presence, time.monotonic()
        assert presence is not None
        blind = presence.blind
        if bool(blind) != bool(self._state.blind):
            self._handle(coordination.Sight(now, blind))
        if blind:
            return
        if not presence.known_secret():  # a store that has lost its data
            self._todo.put(self._make_secret)
        if presence.leader != self._state.leader:
            self._handle(coordination.CoordinatorSeen(now, presence.leader))
        self._links.secret = presence.known_secret() or self._links.secret
        leader, accusers = presence.accusers
        self._handle(coordination.Accused(now, leader, accusers))

    def _handle(self, event: coordination.Event) -> None:
        before = self._state
        self._state, commands = handle(before, event)
        if before.leader is not self._state.leader:
            self._coordinator_changed(before.leader)
        self._tell_lead()
        for command in commands:
            self._do(command)

    def _tell_lead(self) -> None:
        """Nothing is decided for others before these have told a store that lost its data what they know."""
        is_told_again = self._presence is not None and self._presence.is_told_again
        leads = 0 if is_told_again else _own_revision(self._state)
        if leads != self._told_lead:
            self._told_lead = leads
            self.on_lead(leads)

    def _coordinator_changed(self, before: Leader | None) -> None:
        now = self._state.leader
        is_same = before is not None and now is not None and before.node_id == now.node_id
        if is_same:
            return
        self._links.leads = self._state.leads
        self._links.drop()
        if self._state.leads:
            self._say(f"{self._hello.host} coordinates the cluster now.")

    def _heard(self, node_id: str, job: str, told: Mapping[str, Any]) -> None:
        fault = told.get("fault")
        if not isinstance(fault, dict):
            return  # of a later version
        number, reason = fault.get("round"), fault.get("reason")
        if not isinstance(number, int) or not isinstance(reason, str):
            return
        if self._state.leads:
            if fault.get("job") != job:
                return  # an agent speaks for its own job alone
            self._links.tell_nodes(job, told, but=node_id)
        if fault.get("job") == self._hello.job:
            try:
                self._on_fault(number, one_line(reason, _REASON_CHARACTERS))
            except Exception:
                logger.exception("A fault that another node has told could not be passed on")

    def _do(self, command: coordination.Command) -> None:
        match command:
            case coordination.Connect():
                self._links.connect(command.leader.node_id, command.leader.address)
            case coordination.Probe():
                self._links.probe(command.node_id, command.address)
            case coordination.LookAtNodes():
                if not self._is_looking:  # a slow store is not asked faster than it answers
                    self._is_looking = True
                    self._todo.put(self._look_at_nodes)
            case _:
                self._todo.put(lambda: self._do_in_store(command))

    # -- the thread of the store ---------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (call := self._todo.get()) is not None:
            try:
                call()
            except (StoreError, LeaseGoneError) as error:
                logger.debug("%s", error)  # decided again, when there is sight
            except Exception:
                logger.exception("An error in the coordination of the cluster, which goes on")

    def _look_at_nodes(self) -> None:
        assert self._presence is not None
        self._is_looking = False
        nodes, missed = self._presence.nodes()
        self._post(lambda: self._handle(coordination.NodesSeen(time.monotonic(), nodes)))
        if revision := _own_revision(self._state):
            for each in missed:
                self._presence.tell_missed(each, revision)

    def _make_secret(self) -> None:
        assert self._presence is not None
        self._presence.secret()

    def _do_in_store(self, command: coordination.Command) -> None:
        presence = self._presence
        assert presence is not None
        record = LeaderRecord(
            node_id=self._hello.node_id,
            host=self._hello.host,
            address=self.address,
            is_dedicated=self._state.is_dedicated,
            since_unix_s=time.time(),
        )
        match command:
            case coordination.BecomeCoordinator():
                presence.lead(record, command.revision)
            case coordination.Accuse():
                presence.say(unreachable_key(self._hello.node_id), command.leader)
            case coordination.Withdraw():
                presence.unsay(unreachable_key(self._hello.node_id))
            case coordination.Remove():
                is_back = command.node.node_id in self._state.links  # while the store took its time
                if not is_back and presence.remove(command):
                    self.lost_nodes += 1
                    self._say(command.reason)
            case coordination.Depose():
                if presence.lead(record, command.leader.revision, command):
                    self.lost_nodes += command.node is not None
                    self._say(command.reason)
            case _:
                raise AssertionError(command)


def _own_revision(state: CoordinationState) -> int:
    """Return the revision of the leader's key, if this agent holds it; else 0."""
    return state.leader.revision if state.leads and state.leader is not None else 0


def _bounded(reason: str) -> str:
    """Cut it to what a line has room for: JSON may take twelve bytes for a character."""
    return reason[: _REASON_CHARACTERS if len(json.dumps(reason[:_REASON_CHARACTERS])) < LINE_BYTES_MAX // 2 else 500]
