"""Where the members of a new world say where they are and hear the others, before they connect.

All of it can be broken off: if another member is lost meanwhile, a newer world comes, and to wait for the lost one
would be in vain.
"""

from __future__ import annotations

import math
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import DistStoreError, PrefixStore, Store, TCPStore

from unicron_elastic.base.store_link import break_when_silent, open_files
from unicron_elastic.base.world import World
from unicron_elastic.engine.transport.interruptible_store import LOOK_MAX_S, STORE_TIMEOUT_S, wait_until
from unicron_elastic.engine.transport.superseded import Superseded
from unicron_elastic.engine.transport.waiter import Patience

PROBE_S = 1.0  # so long a host has to answer a connection

_ALL, _LEFT = "all", "left"  # how a round has ended


def connect_store(address: str, is_superseded: Callable[[], bool] = lambda: False) -> Store:
    """The store at "host:port". Raises Superseded, or DistError if nobody answers there."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    _wait_for_server(host, int(port), is_superseded)
    before = open_files()
    store = TCPStore(
        host,
        int(port),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=STORE_TIMEOUT_S),
    )
    break_when_silent(int(port), before)
    return store


def _wait_for_server(host: str, port: int, is_superseded: Callable[[], bool]) -> None:
    """Until it answers: torch's own waiting cannot be broken off, and its node may be the one that is lost."""
    begin = time.monotonic()
    while True:
        try:
            socket.create_connection((host, port), PROBE_S).close()
            return
        except OSError as error:
            if is_superseded():
                raise Superseded from None
            if time.monotonic() - begin > STORE_TIMEOUT_S:
                raise DistStoreError(f"the members' store at {host}:{port} cannot be reached: {error}") from error
        time.sleep(LOOK_MAX_S)


class MissingError(Exception):
    """A member has not come to meet the others, although nobody says that it is gone."""


class Meeting:
    """The members of one world, as ``rank`` of it. ``is_superseded`` tells that a newer one has come."""

    def __init__(
        self,
        store: Store,
        world: World,
        rank: int,
        is_superseded: Callable[[], bool],
    ) -> None:
        self._all_worlds = PrefixStore("unicron/worlds", store)
        self._store = PrefixStore(f"unicron/world/{world.number}", store)
        self._world = world
        self._rank = rank
        self.is_superseded = is_superseded
        self._round = 0
        self.patience: Patience | None = None  # with others, where it has no fixed limit

    @property
    def store(self) -> Store:
        """That of this world's members."""
        return self._store

    def exchange(self, said: str, limit_s: float = math.inf) -> list[str]:
        """Speaks in the next round, and hears what each member says in it. Raises what ``hear`` raises."""
        self.say(said)
        return self.hear(limit_s)

    def say(self, said: str, *, is_new: bool = False) -> None:
        """Speaks in the next round, as all members do. ``is_new``: it was in no world before. Raises DistError."""
        self._round += 1
        store = self._of_round()
        store.set(str(self._rank), said)
        if not is_new:
            store.set("begun", "")
        if store.add("count", 1) == self._world.size:
            store.compare_set("end", "", _ALL)

    def wait_for_others(self, patience_s: float) -> None:
        """Waits until a member comes that is not new: until then they train. Raises Superseded, or DistError.

        That may take as long as their evaluation: each ``patience_s`` seconds it says for whom it waits. When they have
        ended, the agent ends this process.
        """
        store = self._of_round()
        try:
            while not wait_until(lambda: _has_begun(store), self.is_superseded, patience_s):
                sys.stderr.write(f"unicron: this rank waits to train with the others: {self._missing()}.\n")
        except Superseded:  # it has spoken, and others may take that for its coming
            store.compare_set("end", "", _LEFT)
            if bytes(store.get("end")).decode() == _LEFT:
                raise

    def hear(self, limit_s: float = math.inf) -> list[str]:
        """What each member says in this round, by rank, once all have spoken; Superseded for all or for nobody.

        Raises MissingError if its patience is over, or ``limit_s`` if it has none, and DistError if the store is gone.
        """
        store = self._of_round()
        try:
            if not wait_until(lambda: store.check(["end"]), self.is_superseded, limit_s, self.patience):
                raise MissingError(f"the members of world {self._world.number} wait in vain: {self._missing()}")
        except Superseded:
            store.compare_set("end", "", _LEFT)
        if bytes(store.get("end")).decode() == _LEFT:
            raise Superseded
        return [bytes(text).decode() for text in store.multi_get([str(rank) for rank in range(self._world.size)])]

    def _missing(self) -> str:
        """Return who has not spoken in this round."""
        store = self._of_round()
        absent = [
            f"rank {rank} ({member.node.partition('#')[0]})"
            for rank, member in enumerate(self._world.members)
            if not store.check([str(rank)])
        ]
        return f"{', '.join(absent)} {'has' if len(absent) == 1 else 'have'} not come"

    def _of_round(self) -> Store:
        return PrefixStore(str(self._round), self._store)

    def announce(self, word: str) -> None:
        """Says something to all who look for it, also in a later world. Raises DistError if the store is gone."""
        self._all_worlds.set(word, "")

    def is_announced(self, word: str) -> bool:
        """Whether anybody has said it. Raises DistError if the store is gone."""
        return bool(self._all_worlds.check([word]))


def _has_begun(store: Store) -> bool:
    """Return whether a member that is not new has come to the round of this ``store``, or it has ended."""
    return bool(store.check(["begun"]) or store.check(["end"]))
