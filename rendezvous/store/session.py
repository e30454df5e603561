"""An agent's presence in the cluster's store: a lease that is kept alive, keys under it, and a copy of one prefix.

Trouble with the store is waited out: training needs no store. What was said is said again once there is sight, also
to a store that has come back without its data.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from unicron_elastic.base.text import one_line
from unicron_elastic.rendezvous.store.attention import Attention
from unicron_elastic.rendezvous.store.interface import (
    Blind,
    Change,
    Changes,
    Deliver,
    Entry,
    LeaseGoneError,
    Put,
    Replaced,
    Sighted,
    Snapshot,
    Store,
    StoreClosedError,
    StoreDeniedError,
    StoreError,
    StoreReplacedError,
    Watch,
    WatchItem,
)

_BEATS_PER_LEASE = 3
_RETRY_S = 0.2
SAY_AGAIN_S = 5.0  # so long others may take to tell again what they know, when the store lost its data, or all stood

logger = logging.getLogger(__name__)


class Mirror(Protocol):
    """A copy of what is below one prefix of the store."""

    @property
    def odd(self) -> dict[str, str]:
        """What could not be read, {key: why}."""

    def apply(self, changes: Iterable[Change]) -> None:
        """Takes changes over, which come in order."""

    def get(self, key: str) -> Entry | None:
        """What a key holds."""


M = TypeVar("M", bound=Mirror)


class Presence(Generic[M]):
    """From ``enter`` to ``leave``. Safe from any thread; no method but ``enter`` raises a StoreError."""

    silent_s = 2.0  # before it is said that the store does not let it in
    tells_sight = True  # whether blindness is said in the log: one of several presences is enough

    def __init__(
        self, open_store: Callable[[], Store], prefix: str, make_mirror: Callable[[Snapshot], M], lease_ttl_s: float
    ) -> None:
        """``open_store`` opens another object for the same store each time."""
        self._open_store = open_store
        self._prefix = prefix
        self._make_mirror = make_mirror
        self._ttl_s = lease_ttl_s
        self._changed = threading.Condition(threading.RLock())
        self._store: Store | None = None
        self._watch: Watch | None = None
        self._mirror: M | None = None
        self._lease_id: int | None = None
        self._kept_until = 0.0  # until when there is no need to keep leases alive
        self._said: dict[str, bytes] = {}  # keys under this agent's lease
        self._taken_back: set[str] = set()  # that may still be there
        self._must_reopen = False
        self._is_unsaid = False
        self._is_gone = threading.Event()
        self._thread: threading.Thread | None = None
        self.blind = ""  # why the store cannot be seen; "": it can
        self.blind_since = 0.0  # monotonic, while it cannot
        self._settling = threading.RLock()
        self.changes = 0  # that were seen so far
        self.on_change: Callable[[], None] = lambda: None  # called from another thread, sometimes for nothing
        self._attention = Attention(lease_ttl_s / _BEATS_PER_LEASE, SAY_AGAIN_S + lease_ttl_s)

    def enter(self, timeout_s: float) -> None:
        """Says what there is to say. Raises StoreError if the store does not let it in in time.

        An unreachable store is waited for.
        """
        deadline, tell_at = time.monotonic() + timeout_s, time.monotonic() + self.silent_s
        while True:
            try:
                self._settle()
                self._attention.kept(time.monotonic())
                break
            except (StoreDeniedError, StoreClosedError):
                raise
            except StoreError as error:
                now = time.monotonic()
                if now + _RETRY_S > deadline:
                    raise
                if now >= tell_at:
                    tell_at = deadline
                    logger.warning("%s; it is tried for %.0f s more.", one_line(str(error)), deadline - now)
                time.sleep(_RETRY_S)
        if self._thread is None:
            self._thread = threading.Thread(target=self._stay, name="unicron-presence", daemon=True)
            self._thread.start()

    @property
    def is_up(self) -> bool:
        """Whether the store is open, and what was said there is kept alive."""
        return self._store is not None and self._lease_id is not None and not self._must_reopen

    @property
    def is_told_again(self) -> bool:
        """Whether others may still be telling again what they know: the store lost its data, or all stood, just now."""
        return self._attention.is_back(time.monotonic())

    def wait(self, timeout_s: float, since: int | None = None) -> None:
        """Waits until something may have changed, ``since`` what ``changes`` was: else since now."""
        with self._changed:
            if since is None or since == self.changes:
                self._changed.wait(timeout_s)

    @property
    def mirror(self) -> M | None:
        """What was last seen, which another thread changes; None while the store is not open."""
        return self._mirror

    def get(self, key: str) -> str | None:
        """What a key below the prefix holds, as one line."""
        with self._changed:
            entry = None if self._mirror is None else self._mirror.get(key)
            return None if entry is None else one_line(entry.value)

    def say(self, key: str, text: str) -> None:
        """Writes a key that goes with this agent, now or when the store can be reached."""
        self._said[key] = text.encode()
        store, lease_id = self._store, self._lease_id  # another thread may close them
        try:
            if store is not None and lease_id is not None:  # else they are being opened, and all is said then
                store.put(key, text.encode(), lease_id)
        except (StoreError, LeaseGoneError):
            self._is_unsaid = True  # the next beat says it

    def claim(self, key: str, text: str) -> bool:
        """Writes a key that goes with this agent, if nobody has it. False also if the store cannot be reached."""
        store, lease_id = self._store, self._lease_id
        if store is None or lease_id is None:
            return False
        try:
            is_ours = store.create(key, text.encode(), lease_id) is not None
        except (StoreError, LeaseGoneError):
            return False
        if is_ours:
            self._said[key] = text.encode()
        return is_ours

    def unsay(self, key: str) -> None:
        """Takes back what was said."""
        if self._said.pop(key, None) is None:
            return
        self._taken_back.add(key)
        store = self._store
        try:
            if store is not None:
                store.delete(key)
                self._taken_back.discard(key)
        except StoreError:
            self._is_unsaid = True  # the next beat takes it back

    def leave(self) -> None:
        """Takes back what this agent has said, and goes. May come twice."""
        self._is_gone.set()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join(self._ttl_s)
        with contextlib.suppress(StoreError):
            if self._store is not None and self._lease_id is not None:
                self._store.revoke(self._lease_id, timeout_s=self._ttl_s)
                self._clear_away(self._store)
        if self._store is not None:
            self._store.close()
        with self._changed:
            self._store = self._mirror = self._watch = self._lease_id = None
            self.changes += 1
            self._changed.notify_all()

    # -- for those that hold more than one lease -------------------------------------------------------------------

    def _hold(self, store: Store) -> None:
        """Takes what else must be there before anything is said. Raises StoreError."""

    def _is_held(self, store: Store) -> bool:  # noqa: ARG002 - for those that hold something
        """Whether that is still there; keeps it alive. Raises StoreError."""
        return True

    def _let_go(self) -> None:
        """Forgets it."""

    def _read(self, store: Store) -> Snapshot:
        """Read what this agent is to know. Raises StoreError."""
        return store.read_prefix(self._prefix)

    def _follow(self, store: Store, seen: Snapshot, deliver: Deliver) -> Watch:
        """Have ``deliver`` hear from now on what changes of that."""
        return store.watch(seen, deliver)

    def _look_anew(self) -> None:
        """Read that again, and follow it, as it may be more now, or less."""
        with self._settling:
            store, watch = self._store, self._watch
            if store is None or self._must_reopen:
                return  # the next beat opens it, and looks
            if watch is not None:
                watch.close()
            try:
                self._look(store)
            except StoreError as error:
                with self._changed:
                    self._blinded(str(error))
                    self._must_reopen = True

    def _clear_away(self, store: Store) -> None:
        """Takes away what nobody needs now that this agent has gone. Raises StoreError."""

    def _say_more(self, store: Store) -> None:
        """Says what does not go with this agent. Raises StoreError."""

    # -- what keeps it up --------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Opens what is not open, and says all there is to say. Raises StoreError."""
        try:
            with self._settling:
                self._open_and_say()
        except LeaseGoneError as error:
            self._forget_leases()
            raise StoreError(f"a lease ran out at once: {error}") from None

    def _open_and_say(self) -> None:
        if self._must_reopen and self._store is not None:
            self._store.close()
            with self._changed:
                self._attention.broke(time.monotonic())
            self._store = None
            self._forget_leases()
        self._must_reopen = False
        if self._store is None:
            self._store = self._open_store()
            self._look(self._store)
        self._keep_leases(self._store)
        self._is_unsaid = False
        puts = [Put(key, text, self._lease_id) for key, text in self._said.copy().items()]
        deletes = self._taken_back - self._said.keys()
        if puts or deletes:
            self._commit(self._store, puts, deletes)
            self._taken_back -= deletes
        self._say_more(self._store)

    def _keep_leases(self, store: Store) -> None:
        """Have them, kept alive lately enough."""
        if self._lease_id is not None and time.monotonic() < self._kept_until:
            return
        self._hold(store)
        if self._lease_id is None or store.keep_alive(self._lease_id) is None:
            self._lease_id = store.grant(self._ttl_s).lease_id
        self._kept_until = time.monotonic() + self._ttl_s / _BEATS_PER_LEASE / 2

    def _commit(self, store: Store, puts: list[Put], deletes: set[str]) -> None:
        try:
            store.commit({}, puts, deletes)
        except StoreError:
            self._is_unsaid = True
            raise

    def _forget_leases(self) -> None:
        self._lease_id, self._kept_until = None, 0.0
        self._let_go()

    def _look(self, store: Store) -> None:
        snapshot = self._read(store)
        with self._changed:
            self._mirror = self._make_mirror(snapshot)
            self.blind = ""
            self._watch = self._follow(store, snapshot, lambda item: self._heard(store, item))
            self.changes += 1
            self._changed.notify_all()

    def _stay(self) -> None:
        """Keeps the leases alive until this agent goes."""
        pause_s = self._ttl_s / _BEATS_PER_LEASE
        while not self._is_gone.wait(pause_s):
            try:
                self.on_change()  # time is a change, too
                self._beat()
                with self._changed:
                    self._attention.kept(time.monotonic())
                pause_s = self._ttl_s / _BEATS_PER_LEASE
            except StoreReplacedError as error:
                self._lost_data(str(error))
                pause_s = _RETRY_S
            except StoreError as error:
                logger.debug("%s", error)
                pause_s = _RETRY_S
            except Exception:  # without this thread the lease would run out
                logger.exception("An error in what keeps this agent's lease alive, which goes on")
                pause_s = _RETRY_S

    def _beat(self) -> None:
        store, lease_id = self._store, self._lease_id
        if store is None or self._must_reopen or lease_id is None or self._is_unsaid:
            self._settle()
        elif store.keep_alive(lease_id) is None or not self._is_held(store):
            self._forget_leases()
            self._settle()

    def _heard(self, store: Store, item: WatchItem) -> None:
        """Take news from the store's thread."""
        with self._changed:
            if store is not self._store or self._mirror is None:
                return
            match item:
                case Changes():
                    self._take(self._mirror, item.changes)
                case Blind():
                    self._blinded(item.reason, item.silent_s)
                    self._tell_sight("The cluster's store cannot be seen: %s. Training goes on.", item.reason)
                case Sighted():
                    self.blind = ""
                    self._tell_sight("The cluster's store can be seen again.")
                case Replaced():
                    self._lost_data(item.reason)
            self.changes += 1
            self._changed.notify_all()
        self.on_change()

    def _blinded(self, reason: str, silent_s: float = 0.0) -> None:
        if not self.blind:
            self.blind_since = time.monotonic() - silent_s
        self.blind = reason

    def _lost_data(self, reason: str) -> None:
        """Heard by the watch or by a call, whichever came first."""
        with self._changed:
            if not self._must_reopen:
                self._blinded(reason)
                self._must_reopen = True
                self._tell_sight("The cluster's store has lost its data: %s. It is told again.", reason)

    def _take(self, mirror: M, changes: tuple[Change, ...]) -> None:
        mirror.apply(changes)
        for change in changes:
            if change.key in mirror.odd:
                logger.warning("%s: it is ignored.", mirror.odd[change.key])

    def _tell_sight(self, words: str, *reason: str) -> None:
        if self.tells_sight:
            logger.warning(words, *reason)
