"""A watch on etcd: a thread that keeps a stream open, notices when it is silent, and finds its way back."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from unicron_elastic.rendezvous.store.connection import WATCH, EtcdConnection, EtcdServer
from unicron_elastic.rendezvous.store.follower import Follower
from unicron_elastic.rendezvous.store.interface import (
    Change,
    Deliver,
    Snapshot,
    StoreClosedError,
    StoreDeniedError,
    StoreError,
    StoreReplacedError,
    StoreUnreachableError,
    Watch,
    WatchItem,
)
from unicron_elastic.rendezvous.store.library import grpc, messages
from unicron_elastic.rendezvous.store.meaning import describe

_PAUSES_S = (0.0, 0.1, 0.2, 0.4, 1.0)  # before each attempt to return; the last one again and again
_LASTING_S = 1.0  # a stream that lived so long may be opened anew without a pause
_CLOSE_S = 5.0
_PULSES = 6  # signs of life that are asked for before silence means anything

logger = logging.getLogger(__name__)


class WatchView:
    """How a watch looks at the store: what it asks for, and what it understands of the answers."""

    def __init__(
        self,
        first_key: bytes,
        end_key: bytes,
        read: Callable[[float], Snapshot],
        change: Callable[[Any], Change | None],
    ) -> None:
        self.first_key = first_key
        self.end_key = end_key
        self.read = read  # the prefix as it is now, within so many seconds
        self.change = change  # an event as a change; None for a key of the store's own


class EtcdWatch(Watch):
    """Follows a prefix in a daemon thread. Blind when a stream breaks or nothing was heard for ``blind_after_s``."""

    def __init__(
        self,
        connection: EtcdConnection,
        view: WatchView,
        follower: Follower,
        deliver: Deliver,
        *,
        timeout_s: float,
        blind_after_s: float,
    ) -> None:
        self._connection = connection
        self._view = view
        self._follower = follower
        self._deliver = deliver
        self._timeout_s = timeout_s
        self._blind_after_s = blind_after_s
        self._heard_at = time.monotonic()
        self._stream: _Stream | None = None
        self._has_returned = False
        self._closed = threading.Event()
        self._telling = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="unicron-watch", daemon=True)

    def start(self) -> None:
        """Begins; returns at once."""
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether it may still tell something."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Close as Watch says."""
        if (
            not self._connection.is_ours
        ):  # in a forked child there is no such thread, and its locks may be held for ever
            return
        self._closed.set()
        stream = self._stream
        if stream is not None:
            stream.cancel()
        if threading.current_thread() is not self._thread:
            with self._telling:  # an item that is being told may end, and after it there is none
                pass
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        attempt = 0
        while not self._closed.wait(_PAUSES_S[min(attempt, len(_PAUSES_S) - 1)]):
            self._has_returned = False
            began_at = time.monotonic()
            try:
                self._follow()
            except StoreReplacedError as error:
                self._tell(self._follower.replaced(str(error)))
                return
            except StoreClosedError:
                return
            except StoreError as error:
                self._tell(self._follower.lost_sight(str(error), time.monotonic() - self._heard_at))
            has_lasted = self._has_returned and time.monotonic() - began_at > _LASTING_S
            attempt = 0 if has_lasted else attempt + 1

    def _follow(self) -> None:
        """Follows one stream until it ends: by return if another one may begin at once, else by a StoreError."""
        server = self._connection.prove(self._timeout_s)
        if self._follower.knows_nothing:
            self._tell(self._follower.summed_up(self._view.read(self._timeout_s)))
        stream = self._stream = _Stream(server, self._request(), self._blind_after_s)
        try:
            if self._closed.is_set():  # it may have looked for a stream to cancel before there was one
                return
            for answer in stream:
                self._heard_at = time.monotonic()
                if answer.canceled:
                    self._cancelled(answer, server)
                    return
                self._understand(answer)
            raise StoreUnreachableError(f"etcd at {server.endpoint} ended the watch")
        except grpc.RpcError as error:
            self._connection.check_open()
            if stream.is_silent:
                self._connection.fail(server)
                said = f"was silent for {self._blind_after_s:.1f} s"
            else:
                server.distrust(renew=False)
                said = describe(error, self._timeout_s)
            raise StoreUnreachableError(f"etcd at {server.endpoint} {said}") from error
        finally:
            stream.cancel()
            self._stream = None

    def _request(self) -> Any:
        view = self._view
        create = messages.WatchCreateRequest(
            key=view.first_key, range_end=view.end_key, start_revision=self._follower.revision + 1
        )
        return messages.WatchRequest(create_request=create)

    def _understand(self, answer: Any) -> None:
        if answer.created:
            # Asked only now: the stream is known to come from the store that this answer proves to be the right one.
            if self._follower.is_blind:
                self._tell(self._follower.reached(self._view.read(self._timeout_s)))
            else:  # nothing was missed: that it is the right one is enough, and a prefix may be large
                self._connection.prove(self._timeout_s)
            self._has_returned = True
        changes = [self._view.change(event) for event in answer.events]
        self._tell(self._follower.moved(change for change in changes if change is not None))

    def _cancelled(self, answer: Any, server: EtcdServer) -> None:
        if answer.compact_revision:
            self._tell(self._follower.summed_up(self._view.read(self._timeout_s)))
            self._has_returned = True
            return
        reason = answer.cancel_reason or "it gives no reason"
        if "permission denied" in reason:
            raise StoreDeniedError(f"etcd at {server.endpoint} does not allow this user to watch the keys")
        server.distrust(renew=False)
        raise StoreUnreachableError(f"etcd at {server.endpoint} ended the watch: {reason}")

    def _tell(self, items: list[WatchItem]) -> None:
        for item in items:
            with self._telling:
                if self._closed.is_set():
                    return
                try:
                    self._deliver(item)
                except Exception:  # the items after it matter more than the receiver's bug
                    logger.exception("the receiver of a watch failed")


class _Stream:
    """The answers of a watch. Asks the server for a sign of life several times before it counts as silent."""

    def __init__(self, server: EtcdServer, create: Any, blind_after_s: float) -> None:
        self.is_silent = False
        self._create = create
        self._blind_after_s = blind_after_s
        self._waits_since: float | None = time.monotonic()  # None while an answer is being worked on
        self._over = threading.Event()
        self._call = server.stream(WATCH, self._requests())

    def __iter__(self) -> Iterator[Any]:
        while True:
            self._waits_since = time.monotonic()
            try:
                answer = next(self._call)
            except StopIteration:
                return
            self._waits_since = None
            yield answer

    def cancel(self) -> None:
        """Ends it from any thread."""
        self._over.set()
        self._call.cancel()

    def _requests(self) -> Iterator[Any]:
        """Runs in a daemon thread of gRPC's."""
        yield self._create
        pulse = messages.WatchRequest(progress_request=messages.WatchProgressRequest())
        pause_s = self._blind_after_s / _PULSES
        due_at = time.monotonic() + pause_s
        while not self._over.wait(pause_s):
            now, since = time.monotonic(), self._waits_since
            late_s = now - due_at
            if since is not None and late_s > pause_s:  # this process stood: no answer could be heard
                since = self._waits_since = since + late_s
            if since is not None and now - since > self._blind_after_s:
                self.is_silent = True
                self._call.cancel()
                return
            yield pulse
            due_at = time.monotonic() + pause_s
