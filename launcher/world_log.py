"""The worlds of a job in their order, on which its agents agree: the first to write a number decides.

Writing and looking may wait for the network, so a thread does it. Where a job has one agent there is nothing to agree.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from torch.distributed import Store

from unicron_elastic.recovery.commands import ChangeWorld
from unicron_elastic.world import World

__all__ = ["StoreLog", "WorldLog", "WorldWatch"]

LOOK_S = 0.02  # between two looks at a store that cannot tell of changes
RETRY_S = 0.2  # after it could not be reached


class WorldLog(Protocol):
    """Where the worlds of one generation are written."""

    def write(self, number: int, text: str) -> str:
        """Writes world ``number`` unless it is there; returns what is there now. Raises if that is not known."""

    def read(self, number: int) -> str | None:
        """World ``number``, if it is there. Raises if that is not known."""


class StoreLog:
    """In the store of the present round, which every generation has anew."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def write(self, number: int, text: str) -> str:
        """Raises DistError."""
        return bytes(self._store.compare_set(_key(number), "", text)).decode()

    def read(self, number: int) -> str | None:
        """Raises DistError."""
        key = _key(number)
        return bytes(self._store.get(key)).decode() if self._store.check([key]) else None


def _key(number: int) -> str:
    return f"unicron/worlds/{number}"


class WorldWatch:
    """Follows one log and adds to it, from ``start`` to ``stop``.

    ``make`` makes the world that follows one after a change, or None if there is nothing left to change. ``on_world``
    is called with each new one, from the thread; ``on_trouble`` once, when the log could not be reached.
    """

    def __init__(
        self,
        log: WorldLog,
        make: Callable[[World | None, ChangeWorld], World | None],
        on_world: Callable[[World], None],
        on_trouble: Callable[[str], None],
    ) -> None:
        self._log = log
        self._make = make
        self._on_world = on_world
        self._on_trouble = on_trouble
        self._world: World | None = None
        self._changes: deque[ChangeWorld] = deque()
        self._wake = threading.Event()
        self._is_stopped = False
        self._was_told = False
        self._thread = threading.Thread(target=self._follow, name="unicron-worlds", daemon=True)

    def start(self) -> None:
        """Begins to follow."""
        self._thread.start()

    def stop(self) -> None:
        """Follows no more; does not wait for an answer of the network."""
        self._is_stopped = True
        self._wake.set()

    def change(self, wanted: ChangeWorld) -> None:
        """Has the next world made; returns at once."""
        self._changes.append(wanted)
        self._wake.set()

    def look(self) -> None:
        """Looks soon: something may have changed."""
        self._wake.set()

    def _follow(self) -> None:
        while not self._is_stopped:
            pause_s = LOOK_S
            try:
                self._read_new()
                while self._changes and not self._is_stopped:
                    self._write(self._changes[0])
                    self._changes.popleft()
            except Exception as error:  # the store's node may be the one that is gone
                pause_s = RETRY_S
                if not self._was_told and not self._is_stopped:
                    self._was_told = True
                    self._on_trouble(str(error).partition("\n")[0])
            self._wake.wait(pause_s)
            self._wake.clear()

    def _read_new(self) -> None:
        while (text := self._log.read(self._next())) is not None:
            self._adopt(text)

    def _write(self, wanted: ChangeWorld) -> None:
        """Tries until this change is in the newest world, made by whomever."""
        while (world := self._make(self._world, wanted)) is not None:
            text = world.to_json()
            stands = self._log.write(world.number, text)
            self._adopt(stands)
            if stands == text:
                return

    def _next(self) -> int:
        return 1 if self._world is None else self._world.number + 1

    def _adopt(self, text: str) -> None:
        self._world = World.parse(text)
        if not self._is_stopped:
            self._on_world(self._world)
