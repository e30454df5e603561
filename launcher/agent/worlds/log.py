"""The worlds of a job in their order, on which its agents agree: the first to write a number decides.

Writing and looking may wait for the network, so a thread does it. Where a job has one agent there is nothing to agree.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from torch.distributed import Store

from unicron_elastic.base.world import World
from unicron_elastic.recovery.commands import ChangeWorld

AWAY_S = 1.0  # without an answer, after which people are told
LOOK_S = 0.02  # between two looks at a store that cannot tell of changes
RETRY_S = 0.2  # after it could not be reached
AWAIT_S = 0.05  # between two looks for what other agents have to say


class LogNotReady(Exception):
    """Another agent has not said yet what is needed to begin the log, or has not begun it."""


class WorldLog(Protocol):
    """Where the worlds of one round are written, in places that count from 1: the first to write a place decides.

    It may keep the latest ones only: who is further behind does without those between.
    """

    def write(self, place: int, text: str) -> str:
        """Writes a world unless there is one in its place; returns what is there now. Raises if that is not known."""

    def after(self, place: int) -> tuple[int, str] | None:
        """The first world in a later place, if there is one, and which place that is. Raises if that is not known."""


class StoreLog:
    """In the store of the present round."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def write(self, place: int, text: str) -> str:
        """Raises DistError."""
        return bytes(self._store.compare_set(_key(place), "", text)).decode()

    def after(self, place: int) -> tuple[int, str] | None:
        """Raises DistError."""
        key = _key(place + 1)
        return (place + 1, bytes(self._store.get(key)).decode()) if self._store.check([key]) else None


def _key(place: int) -> str:
    return f"unicron/worlds/{place}"


class WorldWatch:
    """Follows one log and adds to it, from ``start`` to ``stop``; it does not look before somebody wants it to.

    ``tell`` says, once, what the other agents have to know. If ``do_others_train``, in a world from before, it looks
    without being asked: workers that fail before they have asked for a part are newcomers, too. That is asked whenever
    something may have changed. ``first`` gives the world with which this agent begins the log, if it does. ``make``
    makes the world that follows one after a change, or None if there is nothing left to change. Both may raise
    LogNotReady.
    ``on_world`` is called with each new one, from the thread; ``on_trouble`` once, when what is there is no world;
    ``on_away`` with the reason when the log cannot be reached for a while, and with "" when it can again.
    """

    def __init__(
        self,
        log: WorldLog,
        *,
        tell: Callable[[], None],
        do_others_train: Callable[[], bool],
        first: Callable[[], World | None],
        make: Callable[[World | None, ChangeWorld], World | None],
        on_world: Callable[[World], None],
        on_trouble: Callable[[str], None],
        on_away: Callable[[str], None],
    ) -> None:
        self._log = log
        self._tell = tell
        self._do_others_train = do_others_train
        self._first = first
        self._make = make
        self._has_told = False
        self._is_wanted = False
        self._has_begun = False
        self._place = 0
        self._on_world = on_world
        self._on_trouble = on_trouble
        self._on_away = on_away
        self._world: World | None = None
        self._changes: deque[ChangeWorld] = deque()
        self._wake = threading.Event()
        self._is_stopped = False
        self._failed_since: float | None = None  # monotonic
        self._is_away = False  # as was told
        self._was_told = False  # that what is there is no world
        self._thread = threading.Thread(target=self._follow, name="unicron-worlds", daemon=True)

    def start(self) -> None:
        """Begins to follow."""
        self._thread.start()

    def stop(self) -> threading.Thread:
        """Follow no more, and do not wait for an answer of the network.

        Return the thread that writes still that the training is over, if it is, and ends then.
        """
        self._is_stopped = True
        self._wake.set()
        return self._thread

    def want(self) -> None:
        """Looks from now on."""
        self._is_wanted = True
        self._wake.set()

    def change(self, wanted: ChangeWorld) -> None:
        """Begin to make the next world; return at once."""
        self._changes.append(wanted)
        self.want()

    def look(self) -> None:
        """Looks soon: something may have changed."""
        self._wake.set()

    def _follow(self) -> None:
        while not self._is_stopped:
            pause_s: float | None = LOOK_S
            began_at = time.monotonic()
            try:
                if not self._has_told:
                    self._tell()
                    self._has_told = True
                if not self._is_wanted and self._do_others_train():  # while it asks, another thread may want it
                    self._is_wanted = True
                if self._is_wanted:
                    self._look()
                    self._reached()
                else:
                    pause_s = None
            except LogNotReady:
                pause_s = AWAIT_S
            except Exception as error:  # the store's node may be the one that is gone
                pause_s = RETRY_S
                self._failed(error, began_at)
            self._wake.wait(pause_s)
            self._wake.clear()
        if any(change.over for change in self._changes):
            with contextlib.suppress(Exception):  # nobody can be told that it could not be
                self._look()

    def _look(self) -> None:
        self._begin()
        while (found := self._log.after(self._place)) is not None:
            self._adopt(*found)
        while self._changes:
            if self._changes[0].over or not self._is_stopped:
                self._write(self._changes[0])
            self._changes.popleft()

    def _begin(self) -> None:
        if not self._has_begun:
            world = self._first() if self._log.after(0) is None else None
            if world is not None:
                self._adopt(1, self._log.write(1, world.to_json()))
            self._has_begun = True

    def _write(self, wanted: ChangeWorld) -> None:
        """Tries until this change is in the newest world, made by whomever."""
        while (world := self._make(self._world, wanted)) is not None:
            text = world.to_json()
            stands = self._log.write(self._place + 1, text)
            self._adopt(self._place + 1, stands)
            if stands == text:
                return

    def _adopt(self, place: int, text: str) -> None:
        self._place = place
        try:
            self._world = World.parse(text)
        except ValueError as error:  # nobody can take it for a world: the next place has another
            if not self._was_told and not self._is_stopped:
                self._was_told = True
                self._on_trouble(str(error).partition("\n")[0])
            return
        if not self._is_stopped:
            self._on_world(self._world)

    def _reached(self) -> None:
        self._failed_since = None
        if self._is_away and not self._is_stopped:
            self._is_away = False
            self._on_away("")

    def _failed(self, error: Exception, began_at: float) -> None:
        if self._failed_since is None:
            self._failed_since = began_at
        is_away = time.monotonic() - self._failed_since >= AWAY_S
        if is_away and not self._is_away and not self._is_stopped:
            self._is_away = True
            self._on_away(str(error).partition("\n")[0])
