"""The one thread that looks for the web page: at the store while somebody asks, and at the WAF all the time.

However many ask, the store is read at most once a second, and what is shown is made once. Nobody who asks waits for the
store but the first.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from unicron_elastic.launcher.export.web.waf_history import SAMPLE_S, WafHistory
from unicron_elastic.metrics.figures import PlanFigures
from unicron_elastic.rendezvous.store.interface import Store, StoreError

EVERY_S = 1.0  # between two looks at the store
BUSY_SHARE = 0.1  # of a core at most goes into looks: those that are dear are made less often
FIRST_S = 3.0  # for the first look, that somebody waits for
IDLE_S = 30.0  # without anybody asking, after which the store is closed
PACKED_FROM_BYTES = 2048

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Body:
    """What is answered, plainly and packed with gzip; the latter is b"" where that is not worth it."""

    plain: bytes
    packed: bytes = b""


def body(told: Mapping[str, Any]) -> Body:
    """Return the answer as JSON. Raises ValueError for a number that JSON does not have."""
    plain = json.dumps(told, allow_nan=False, separators=(",", ":")).encode(errors="backslashreplace")
    if len(plain) < PACKED_FROM_BYTES:
        return Body(plain)
    packer = zlib.compressobj(level=1, wbits=31)  # 31: with gzip's header
    return Body(plain, packer.compress(plain) + packer.flush())


@dataclass(frozen=True, slots=True)
class _Seen:
    """``state``: as of the latest look that worked; ``trouble``: why a later one did not, as a sentence."""

    state: Mapping[str, Any] | None = None
    trouble: str = ""


class Watcher:
    """From ``start`` to ``close``. ``state`` and ``waf`` from any thread."""

    def __init__(
        self,
        open_store: Callable[[], Store],
        read: Callable[[Store], Mapping[str, Any]],
        figures: Callable[[], PlanFigures | None],
        *,
        every_s: float = EVERY_S,
        sample_s: float = SAMPLE_S,
        idle_s: float = IDLE_S,
    ) -> None:
        """``read`` makes what is shown of the store, and raises StoreError; ``figures`` has it at hand."""
        self._open_store, self._read, self._figures = open_store, read, figures
        self._every_s, self._sample_s, self._idle_s = every_s, sample_s, idle_s
        self._changed = threading.Condition()
        self._store: Store | None = None
        self._seen = _Seen()
        self._told = body({"state": None, "trouble": "The cluster is being read."})
        self._asked_at, self._looked_at, self._sampled_at = 0.0, 0.0, 0.0  # monotonic; 0.0: never
        self._pause_s = self._every_s  # after the latest look
        self._is_over = False
        self._history = WafHistory()
        self._thread = threading.Thread(target=self._run, name="unicron-web-watch", daemon=True)

    def start(self) -> None:
        """Begins to look."""
        self._thread.start()

    def close(self) -> None:
        """Looks no more. May come twice."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(self._every_s)

    def state(self) -> Body:
        """What the store has, at most a look old; that of the latest look that worked if there is trouble with it."""
        with self._changed:
            was_idle = time.monotonic() - self._asked_at > self._idle_s
            self._asked_at = time.monotonic()
            self._changed.notify_all()
            if was_idle:  # what is known is old
                asked_at = self._asked_at
                self._changed.wait_for(lambda: self._is_over or self._looked_at > asked_at, FIRST_S)
            return self._told

    def waf(self, span: str) -> Body:
        """The WAF over a span of ``web_history.SPANS``."""
        with self._changed:
            told = self._history.to_json(span)
        return body(told)

    def _run(self) -> None:
        while self._wait():
            if time.monotonic() - self._sampled_at >= self._sample_s or not self._sampled_at:
                self._sample()
            if self._is_look_due():
                self._look()
            elif self._store is not None and time.monotonic() - self._asked_at > self._idle_s:
                self._close_store()
        self._close_store()

    def _wait(self) -> bool:
        """Until there may be something to do; False at the end."""
        with self._changed:
            now = time.monotonic()
            until = self._sampled_at + self._sample_s
            if self._asked_at > self._looked_at:
                until = min(until, self._looked_at + self._pause_s)
            if not self._is_over and self._sampled_at and until > now:
                self._changed.wait(until - now)
            return not self._is_over

    def _is_look_due(self) -> bool:
        return self._asked_at > self._looked_at and time.monotonic() - self._looked_at >= self._pause_s

    def _sample(self) -> None:
        self._sampled_at = time.monotonic()
        try:
            figures = self._figures()
        except Exception:  # what is shown must not depend on what goes wrong in telling it
            logger.warning("The WAF cannot be told to the web page", exc_info=True)
            figures = None
        with self._changed:
            self._history.add(time.time(), figures)

    def _look(self) -> None:
        seen, began_s = self._seen, time.thread_time()
        try:
            seen = _Seen(self._read(self._opened()))
            told = _told(seen)
        except StoreError as error:
            self._close_store()  # another object for it may have better luck
            seen = replace(seen, trouble=f"etcd cannot be read: {error}.")
            told = _told(seen)
        except Exception:
            logger.warning("The state of the cluster cannot be told to the web page", exc_info=True)
            seen = replace(self._seen, trouble="The state cannot be told, by an error that this process has logged.")
            told = _told(seen)
        self._pause_s = max(self._every_s, (time.thread_time() - began_s) / BUSY_SHARE)
        with self._changed:
            self._seen, self._told, self._looked_at = seen, told, time.monotonic()
            self._changed.notify_all()

    def _opened(self) -> Store:
        if self._store is None:
            self._store = self._open_store()
        return self._store

    def _close_store(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            with suppress(StoreError):
                store.close()


def _told(seen: _Seen) -> Body:
    return body({"state": seen.state, "trouble": seen.trouble})
