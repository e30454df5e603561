"""Ends waits for futures, which are made in C++ and cannot be looked into, when the world that they are of is left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from unicron_elastic.engine.transport.waiter import LOOK_S, PATIENCE_S, InThread


class FutureWatch:
    """A `FutureWatch` breaks a group's connections if futures do not end by themselves once ``is_left`` says so."""

    def __init__(self, is_left: Callable[[], bool], break_off: Callable[[], object]) -> None:
        self._is_left = is_left
        self._break_off = break_off
        self._lock = threading.Lock()
        self._futures: list[Any] = []
        self._is_watching = False

    def add(self, future: Any) -> None:
        """Watch over one until it is done."""
        with self._lock:
            self._futures.append(future)
            if self._is_watching:
                return
            self._is_watching = True
        InThread(self._watch)

    def _watch(self) -> None:
        left_at: float | None = None
        while self._are_some_left():
            if self._is_left():
                left_at = left_at or time.monotonic()
                if time.monotonic() - left_at > PATIENCE_S:
                    self._break_off()
                    with self._lock:
                        self._futures.clear()
            time.sleep(LOOK_S)

    def _are_some_left(self) -> bool:
        with self._lock:
            self._futures = [each for each in self._futures if not each.done()]
            self._is_watching = bool(self._futures)
            return self._is_watching
