"""Whether the training state may be copied: from the first micro-batch of a step to its first reduction.

The training loop opens and closes it; whoever copies, in other threads, holds it. Meanwhile the loop does not leave the
step. Between two steps, where scripts evaluate and change learning rates, averages and counters, it is closed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

_LOOK_S = 0.02


class StateGate:
    """`StateGate` lets others begin to copy the state of one process while it is open, and counts those who do."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._step: int | None = None  # None: it is closed
        self._holds = 0
        self.on_expire: Callable[[], None] = lambda: None  # called when the state changes although it is held

    def open(self, step: int) -> None:
        """Lets others begin to copy the state, which has ``step`` optimizer steps behind it."""
        with self._changed:
            self._step = step
            self._changed.notify_all()

    def close(self) -> None:
        """Lets nobody begin to copy any more."""
        with self._changed:
            self._step = None

    @property
    def holds(self) -> int:
        """Return how many copy the state now."""
        return self._holds

    def wait_released(self, limit_s: float, may_go_on: Callable[[], bool]) -> bool:
        """Wait until nobody copies the state, or ``may_go_on`` is false; false after ``limit_s`` seconds."""
        with self._changed:
            waited_s = 0.0
            while self._holds and may_go_on():
                if waited_s >= limit_s:
                    return False
                self._changed.wait(_LOOK_S)
                waited_s += _LOOK_S
            return True

    def hold(self, timeout_s: float) -> int:
        """Waits until it is open, and begins to copy; returns how many optimizer steps the state has behind it.

        Raises TimeoutError.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._step is not None, timeout_s):
                raise TimeoutError(f"the training state was not at rest within {timeout_s:g} s")
            assert self._step is not None
            self._holds += 1
            return self._step

    def release(self) -> None:
        """Undoes one ``hold``."""
        with self._changed:
            self._holds -= 1
            self._changed.notify_all()
