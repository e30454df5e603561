"""The agent's event loop: sockets and timers in one thread, no polling."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol


class _HasFileno(Protocol):
    def fileno(self) -> int: ...


class Loop:
    """Calls back when a descriptor is readable or a time has come. ``call_soon`` may be used from other threads."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._soon: deque[Callable[[], None]] = deque()
        self._signals: deque[Callable[[], object]] = deque()
        self._is_running = False
        self._holds = 0  # how many want signals held
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._drain)

    def on_readable(self, source: _HasFileno, callback: Callable[[], None]) -> None:
        """Calls ``callback`` whenever ``source`` has something to read or was closed by its peer."""
        self._selector.register(source, selectors.EVENT_READ, callback)

    def forget(self, source: _HasFileno) -> None:
        """Undoes ``on_readable``; call it before closing ``source``. Unknown sources are ignored."""
        try:
            self._selector.unregister(source)
        except (KeyError, ValueError):
            pass

    def call_at(self, at: float, callback: Callable[[], None]) -> None:
        """Calls ``callback`` at the monotonic time ``at``."""
        heapq.heappush(self._timers, (at, next(self._numbers), callback))

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Calls ``callback`` in the loop's thread; safe from any thread."""
        self._soon.append(callback)
        self._wake()

    def _wake(self) -> None:
        try:
            self._wake_write.send(b"\0")
        except (BlockingIOError, OSError):
            pass  # the loop is awake already, or closed

    def run_until(self, is_done: Callable[[], bool], deadline: float | None = None) -> bool:
        """Runs until ``is_done()`` (true) or the monotonic ``deadline`` (false).

        Exceptions from callbacks and signal handlers pass through; the loop may then be run again.
        """
        was_running, self._is_running = self._is_running, True
        try:
            is_over = self._run(is_done, deadline)
        finally:
            self._is_running = was_running
        if not was_running:
            self._call_signal_handlers()
        return is_over

    def between_callbacks(self, handler: Callable[[int, Any], object]) -> Callable[[int, Any], None]:
        """A signal handler that calls ``handler`` where the loop loses nothing if it raises.

        Anywhere else an exception could fall between the reading of a message and what it tells. While the loop does
        not run, ``handler`` is called at once, except within ``signals_held``.
        """

        def handle(number: int, frame: Any) -> None:
            if not (self._is_running or self._holds):
                handler(number, frame)
                return
            self._signals.append(lambda: handler(number, None))
            self._wake()

        return handle

    @contextlib.contextmanager
    def signals_held(self) -> Iterator[None]:
        """Calls the handlers of signals that come meanwhile at the end of the outermost: what is done here is whole."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
            if not self._is_running:  # else between callbacks, as ever
                self._call_signal_handlers()

    def close(self) -> None:
        """Closes the loop's own descriptors and forgets its callbacks; what was registered belongs to others."""
        self._timers.clear()
        self._soon.clear()
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()

    def _run(self, is_done: Callable[[], bool], deadline: float | None) -> bool:
        while not is_done():
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                return False
            self._run_once(now, deadline)
            self._call_signal_handlers()
        return True

    def _call_signal_handlers(self) -> None:
        while self._signals and not self._holds:
            self._signals.popleft()()

    def _run_once(self, now: float, deadline: float | None) -> None:
        limits = [at for at in (self._timers[0][0] if self._timers else None, deadline) if at is not None]
        timeout = max(0.0, min(limits) - now) if limits else None
        if self._soon:  # left over from a round that an exception ended
            timeout = 0.0
        watched = self._selector.get_map()
        for key, _ in self._selector.select(timeout):
            if watched.get(key.fd) is key:  # an earlier callback of this round may have removed or replaced it
                key.data()
        while self._soon:
            self._soon.popleft()()
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()

    def _drain(self) -> None:
        try:
            self._wake_read.recv(4096)
        except BlockingIOError:
            pass
