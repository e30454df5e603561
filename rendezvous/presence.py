"""An agent's presence in its job: a lease that is kept alive, a member under it, and a copy of what the others say.

Trouble with the store is waited out: training needs no store. What was said is said again once there is sight, also
to a store that has come back without its data.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable

from unicron_elastic.rendezvous.job_records import JobKeys, JobMirror, member_text, round_text
from unicron_elastic.rendezvous.membership import JobView, Member, Place, Round
from unicron_elastic.rendezvous.store import (
    Blind,
    Changes,
    LeaseGoneError,
    Put,
    Replaced,
    Sighted,
    Store,
    StoreClosedError,
    StoreDeniedError,
    StoreError,
    StoreReplacedError,
    Watch,
    WatchItem,
)

__all__ = ["JobPresence"]

JOB_LEASE_S = 60.0  # so long a job's own keys outlive its last agent
CLOSED_FOR_S = 600.0  # so long it is known that a job is over
SAY_AGAIN_S = 5.0  # so long nodes may take to tell of themselves again to a store that lost its data
_BEATS_PER_LEASE = 3
_RETRY_S = 0.2

logger = logging.getLogger(__name__)


class JobPresence:
    """From ``join`` to ``leave``. Safe from any thread; no method but ``join`` raises a StoreError."""

    def __init__(self, open_store: Callable[[], Store], keys: JobKeys, lease_ttl_s: float) -> None:
        """``open_store`` opens another object for the same store each time."""
        self._open_store = open_store
        self._keys = keys
        self._ttl_s = lease_ttl_s
        self._changed = threading.Condition(threading.RLock())
        self._store: Store | None = None
        self._watch: Watch | None = None
        self._mirror: JobMirror | None = None
        self._member: Member | None = None
        self._lease_id: int | None = None
        self._job_lease_id: int | None = None
        self._round: Round | None = None  # the latest that was seen, to be said again to a store that forgot it
        self._said: dict[str, bytes] = {}  # further keys under this agent's lease
        self._must_reopen = False
        self._is_gone = threading.Event()
        self._thread: threading.Thread | None = None
        self.blind = ""  # why the store cannot be seen; "": it can
        self.on_change: Callable[[], None] = lambda: None  # called from another thread, sometimes for nothing
        self._forgotten_at = -math.inf  # when the store had lost its data
        self._seen: set[str] = set()  # nodes that have told of themselves since

    def join(self, member: Member, timeout_s: float) -> None:
        """Becomes a member, or says what has changed of it. Raises StoreError if the store does not let it in in time.

        An unreachable store is waited for.
        """
        self._member = member
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._settle()
                break
            except (StoreDeniedError, StoreClosedError):
                raise
            except StoreError:
                if time.monotonic() + _RETRY_S > deadline:
                    raise
                time.sleep(_RETRY_S)
        if self._thread is None:
            self._thread = threading.Thread(target=self._stay, name="unicron-presence", daemon=True)
            self._thread.start()

    def view(self) -> JobView:
        """The job as it was when last seen."""
        with self._changed:
            found = JobView() if self._mirror is None else self._mirror.view()
            if found.round is not None:
                self._round = found.round
            self._seen.update(member.node_id for member in found.members)
            return found

    def unheard(self, found: Round) -> list[Place]:
        """Those of a round of whom a store that lost its data does not know yet whether they live."""
        with self._changed:
            if time.monotonic() - self._forgotten_at > SAY_AGAIN_S + self._ttl_s:
                return []
            return [place for place in found.places if place.node_id not in self._seen]

    def wait(self, timeout_s: float) -> None:
        """Waits until something may have changed."""
        with self._changed:
            self._changed.wait(timeout_s)

    def get(self, key: str) -> str | None:
        """What a key of the job holds."""
        with self._changed:
            entry = None if self._mirror is None else self._mirror.get(key)
            return None if entry is None else entry.value.decode(errors="replace")

    def propose(self, found: Round) -> bool:
        """Writes the next round, unless somebody was faster or the job is over. Whether it surely was written."""
        with self._changed:
            mirror, store = self._mirror, self._store
            if mirror is None or store is None:
                return False
            guards = {self._keys.round: mirror.revision(self._keys.round), self._keys.closed: 0}
        try:
            put = Put(self._keys.round, round_text(found), self._job_lease_id)
            return store.commit(guards, [put]) is not None
        except (StoreError, LeaseGoneError):
            return False

    def say(self, key: str, text: str) -> None:
        """Writes a key that goes with this agent, now or when the store can be reached."""
        self._said[key] = text.encode()
        with contextlib.suppress(StoreError, LeaseGoneError):
            if self._store is not None:
                self._store.put(key, self._said[key], self._lease_id)

    def close_job(self, reason: str) -> None:
        """Ends the job for all its nodes, if the store can be reached."""
        try:
            if self._store is None:
                self._store = self._open_store()
            lease = self._store.grant(CLOSED_FOR_S)
            self._store.commit({}, [Put(self._keys.closed, reason.encode(), lease.lease_id)], [self._keys.round])
        except (StoreError, LeaseGoneError) as error:
            logger.warning("The end of the job could not be told: %s.", error)

    def take_leave(self, number: int, spare: int) -> str:
        """Takes one of the ``spare`` places that round ``number`` can do without; why there is none, or "".

        Nodes that would leave at the same moment count each other by compare-and-set.
        """
        try:
            store = self._store
            while store is not None:
                entry = store.read(self._keys.leaving).entry
                words = [] if entry is None else entry.value.split()
                taken = int(words[1]) if len(words) == 2 and words[0] == b"%d" % number and words[1].isdigit() else 0
                if taken >= spare:
                    return "other nodes leave already, and the job needs the rest."
                told, revision = b"%d %d" % (number, taken + 1), 0 if entry is None else entry.revision
                if store.compare_and_set(self._keys.leaving, told, revision, self._job_lease_id) is not None:
                    return ""
        except (StoreError, LeaseGoneError) as error:
            return f"the other nodes could not be asked whether they can spare it ({error})."
        return "the cluster's store is not open."

    def leave(self) -> None:
        """Takes back what this agent has said, and goes. May come twice."""
        self._is_gone.set()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join(self._ttl_s)
        with contextlib.suppress(StoreError):
            if self._store is not None and self._lease_id is not None:
                self._store.revoke(self._lease_id, timeout_s=self._ttl_s)
        if self._store is not None:
            self._store.close()
        with self._changed:
            self._store = self._mirror = self._watch = self._lease_id = None
            self._changed.notify_all()

    # -- what keeps it up --------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Opens what is not open, and says all there is to say. Raises StoreError."""
        try:
            self._open_and_say()
        except LeaseGoneError as error:
            self._lease_id = self._job_lease_id = None
            raise StoreError(f"a lease ran out at once: {error}") from None

    def _open_and_say(self) -> None:
        if self._must_reopen and self._store is not None:
            self._store.close()
            with self._changed:
                self._forgotten_at = time.monotonic()
                self._seen.clear()
            self._store = self._lease_id = self._job_lease_id = None
        self._must_reopen = False
        if self._store is None:
            self._store = self._open_store()
            self._look(self._store)
        self._hold_job(self._store)
        if self._lease_id is None or self._store.keep_alive(self._lease_id) is None:
            self._lease_id = self._store.grant(self._ttl_s).lease_id
        self._say_all(self._store)

    def _look(self, store: Store) -> None:
        snapshot = store.read_prefix(self._keys.prefix)
        with self._changed:
            self._mirror = JobMirror(self._keys, snapshot)
            self.blind = ""
            self._watch = store.watch(snapshot, lambda item: self._heard(store, item))
            self._changed.notify_all()

    def _hold_job(self, store: Store) -> None:
        """Keeps the job's own lease alive, which any of its agents may have begun."""
        if self._job_lease_id is not None and store.keep_alive(self._job_lease_id) is not None:
            return
        entry = store.read(self._keys.lease).entry
        if entry is not None and entry.value.isdigit() and store.keep_alive(int(entry.value)) is not None:
            self._job_lease_id = int(entry.value)
            return
        lease = store.grant(JOB_LEASE_S)
        revision = 0 if entry is None else entry.revision
        if store.compare_and_set(self._keys.lease, str(lease.lease_id).encode(), revision, lease.lease_id) is not None:
            self._job_lease_id = lease.lease_id
            return
        store.revoke(lease.lease_id)
        raise StoreError("another agent begins the job's lease at this moment")

    def _say_all(self, store: Store) -> None:
        assert self._member is not None
        said = {self._keys.member(self._member.node_id): member_text(self._member), **self._said}
        store.commit({}, [Put(key, text, self._lease_id) for key, text in said.items()])
        if self._round is not None and store.read(self._keys.round).entry is None:
            put = Put(self._keys.round, round_text(self._round), self._job_lease_id)
            store.commit({self._keys.round: 0, self._keys.closed: 0}, [put])

    def _stay(self) -> None:
        """Keeps the leases alive until this agent goes."""
        pause_s = self._ttl_s / _BEATS_PER_LEASE
        while not self._is_gone.wait(pause_s):
            self.on_change()  # time is a change, too
            try:
                self._beat()
                pause_s = self._ttl_s / _BEATS_PER_LEASE
            except StoreReplacedError:
                self._must_reopen, pause_s = True, _RETRY_S
            except StoreError as error:
                logger.debug("%s", error)
                pause_s = _RETRY_S

    def _beat(self) -> None:
        store, lease_id, job_lease_id = self._store, self._lease_id, self._job_lease_id
        if store is None or self._must_reopen or lease_id is None or job_lease_id is None:
            self._settle()
        elif store.keep_alive(lease_id) is None or store.keep_alive(job_lease_id) is None:
            self._lease_id = self._job_lease_id = None
            self._settle()

    def _heard(self, store: Store, item: WatchItem) -> None:
        """From the store's thread."""
        with self._changed:
            if store is not self._store or self._mirror is None:
                return
            match item:
                case Changes():
                    self._mirror.apply(item.changes)
                    for change in item.changes:
                        if change.key in self._mirror.odd:
                            logger.warning("%s: it is ignored.", self._mirror.odd[change.key])
                    self.view()
                case Blind():
                    self.blind = item.reason
                    logger.warning("The cluster's store cannot be seen: %s. Training goes on.", item.reason)
                case Sighted():
                    self.blind = ""
                    logger.warning("The cluster's store can be seen again.")
                case Replaced():
                    self.blind = item.reason
                    self._must_reopen = True
                    logger.warning("The cluster's store has lost its data: %s. It is told again.", item.reason)
            self._changed.notify_all()
        self.on_change()
