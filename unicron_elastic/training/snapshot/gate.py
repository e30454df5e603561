"""When the training state is at rest, and may be copied: from the first micro-batch of a step to its optimizer step.

The training loop says so; whoever copies, in other threads, holds it. Meanwhile the loop does not leave the step. Who
begins to copy does so before the reduction, in which the other ranks hear of it. Between two steps, where scripts
evaluate and change learning rates, averages and counters, it is never at rest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

_LOOK_S = 0.02


class StateGate:
    """`StateGate` keeps the training state of one process unchanged while others copy it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._state: int | None = None
        self._is_closed = False
        self._holds = 0
        self.on_expire: Callable[[], None] = lambda: None  # called when the state changes although it is held

    def begin(self, state: int) -> None:
        """The state after ``state`` optimizer steps is at rest from now on."""
        with self._changed:
            self._state, self._is_closed = state, False
            self._changed.notify_all()

    def close(self) -> bool:
        """Nobody may begin to copy any more until the next ``begin``; returns whether somebody copies."""
        with self._changed:
            self._is_closed = True
            return self._holds > 0

    def end(self, limit_s: float, may_go_on: Callable[[], bool]) -> bool:
        """Wait until nobody holds the state: it is about to change.

        False if ``may_go_on`` became false first, and it stays at rest. After ``limit_s`` seconds it ends all the same.
        """
        with self._changed:
            waited_s = 0.0
            while self._holds and waited_s < limit_s:
                if not may_go_on():
                    return False
                self._changed.wait(_LOOK_S)
                waited_s += _LOOK_S
            is_expired = self._holds > 0
            self._state = None
        if is_expired:
            self.on_expire()
        return True

    def hold(self, timeout_s: float) -> int:
        """Waits until the state is at rest and keeps it there; returns how many optimizer steps it has behind it.

        Raises TimeoutError.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._state is not None and not self._is_closed, timeout_s):
                raise TimeoutError(f"the training state was not at rest within {timeout_s:g} s")
            assert self._state is not None
            self._holds += 1
            return self._state

    def release(self) -> None:
        """Undoes one ``hold``."""
        with self._changed:
            self._holds -= 1
            self._changed.notify_all()
