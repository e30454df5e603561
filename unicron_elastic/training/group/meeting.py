"""Where the members of a new world say where they are and hear the others, before they connect; and how they connect.

All of it can be broken off: if another member is lost meanwhile, a newer world comes, and to wait for the lost one
would be in vain.
"""

from __future__ import annotations

import contextlib
import math
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import DistStoreError, PrefixStore, Store, TCPStore

from unicron_elastic.base.store_link import break_when_silent
from unicron_elastic.base.world import World
from unicron_elastic.training.group.superseded import Superseded, given_up_when
from unicron_elastic.training.step.collective import Patience

LOOK_MIN_S, LOOK_MAX_S = 0.0005, 0.05  # between two looks, a tenth of the time that has passed
STORE_TIMEOUT_S = 30.0
PROBE_S = 1.0  # so long a host has to answer a connection

_ALL, _LEFT = "all", "left"  # how a round has ended

_hooks: dict[Any, Any] = {}  # torch's hook for exceptions, of the last group, and the one that it calls


def connect_store(address: str, is_superseded: Callable[[], bool] = lambda: False) -> Store:
    """The store at "host:port". Raises Superseded, or DistError if nobody answers there."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    _wait_for_server(host, int(port), is_superseded)
    store = TCPStore(
        host,
        int(port),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=STORE_TIMEOUT_S),
    )
    break_when_silent(int(port))
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
    """The members of one world, as ``rank`` of it. ``is_superseded`` tells that a newer one has come.

    ``is_left`` tells that it ends what members do who have met: they do not connect any more. None: any newer one does.
    """

    def __init__(
        self,
        store: Store,
        world: World,
        rank: int,
        is_superseded: Callable[[], bool],
        is_left: Callable[[], bool] | None = None,
    ) -> None:
        self._all_worlds = PrefixStore("unicron/worlds", store)
        self._store = PrefixStore(f"unicron/world/{world.number}", store)
        self._world = world
        self._rank = rank
        self.is_superseded = is_superseded
        self._is_left = is_left or is_superseded
        self._round = 0
        self.patience: Patience | None = None  # with others, where it has no fixed limit
        self._group_store: Store | None = None

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
            while not _wait(lambda: store.check(["begun"]) or store.check(["end"]), self.is_superseded, patience_s):
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
            if not _wait(lambda: store.check(["end"]), self.is_superseded, limit_s, self.patience):
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

    def connect(
        self, backend: str, timeout_s: float, device: Any, *, rank: int | None = None, size: int | None = None
    ) -> None:
        """Makes the default process group of this world. Raises Superseded, or DistError.

        ``timeout_s`` is that of its collectives. ``rank`` and ``size`` are those of the group if not all members are
        in it.
        """
        store: Store = PrefixStore("group", self._store)
        if "nccl" not in backend:  # which reads its store in ways of its own
            # Kept here: torch keeps what it has of it in C++ only, and groups that are made later would find it empty.
            store = self._group_store = _Interruptible(store, self._is_left)
        options = {"device_id": device} if device is not None and device.type == "cuda" else {}
        with given_up_when(self._is_left, patience=self.patience), _one_hook():
            dist.init_process_group(
                backend,
                store=store,
                rank=self._rank if rank is None else rank,
                world_size=self._world.size if size is None else size,
                timeout=timedelta(seconds=timeout_s),
                **options,
            )


@contextlib.contextmanager
def _one_hook() -> Iterator[None]:
    """torch wraps the hook for exceptions with each group: a process would have a layer, and a name, of each world."""
    before = sys.excepthook = _hooks.pop(sys.excepthook, sys.excepthook)
    yield
    if sys.excepthook is not before:
        _hooks.clear()
        _hooks[sys.excepthook] = before


class _Interruptible(Store):  # type: ignore[misc]
    """A store whose waiting ends when a newer world comes: gloo waits in it for peers that may have died."""

    def __init__(self, store: Store, is_superseded: Callable[[], bool]) -> None:
        super().__init__()
        self._store = store
        self._is_superseded = is_superseded

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        _wait(lambda: self._store.check([key]), self._is_superseded)
        return bytes(self._store.get(key))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit_s = STORE_TIMEOUT_S if timeout is None else timeout.total_seconds()
        if not _wait(lambda: self._store.check(list(keys)), self._is_superseded, limit_s):
            raise DistStoreError(f"{', '.join(keys)} did not come within {limit_s:g} s")

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._store.check(list(keys)))

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(key, amount))


def _wait(
    has_come: Callable[[], bool],
    is_superseded: Callable[[], bool],
    limit_s: float = math.inf,
    patience: Patience | None = None,
) -> bool:
    """Looks again and again; false if the time is over, or ``patience`` if there is one. Raises Superseded.

    A TCPStore's own waiting cannot be broken off, and complains when its time is over.
    """
    begin = time.monotonic()
    if patience is not None:
        patience.begin()
    while not has_come():
        if is_superseded():
            raise Superseded
        waited_s = time.monotonic() - begin
        if waited_s > limit_s if patience is None else patience.is_over():
            return False
        time.sleep(min(max(waited_s / 10, LOOK_MIN_S), LOOK_MAX_S))
    return True
