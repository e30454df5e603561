"""Stores to test on, with what can befall them: in memory, and a real etcd behind a cable that can be cut."""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from cable import Cable

from unicron_elastic.rendezvous.store.address import StoreAddress
from unicron_elastic.rendezvous.store.etcd import EtcdStore
from unicron_elastic.rendezvous.store.interface import Change, Changes, Store, WatchItem
from unicron_elastic.rendezvous.store.library import grpc, messages
from unicron_elastic.rendezvous.store.server import EmbeddedEtcd
from unicron_elastic.testing.memory_store import MemoryServer, MemoryStore

DEADLINE_S = 20.0
BLIND_AFTER_S = 0.4
NAMED_BINARY = os.environ.get("UNICRON_TEST_ETCD")  # another etcd to run the tests against
BINARY = Path(NAMED_BINARY) if NAMED_BINARY else None


class Told:
    """What a watch delivered."""

    def __init__(self) -> None:
        self.items: list[WatchItem] = []
        self._new = threading.Condition()

    def __call__(self, item: WatchItem) -> None:
        with self._new:
            self.items.append(item)
            self._new.notify_all()

    def wait(self, condition: Callable[[], object]) -> None:
        """Waits until ``condition()`` of what was told; fails the test at the deadline."""
        with self._new:
            assert self._new.wait_for(lambda: bool(condition()), DEADLINE_S), f"only {self.items} came"

    def wait_for(self, kind: type[WatchItem], count: int = 1) -> WatchItem:
        """The ``count``-th item of a kind."""
        self.wait(lambda: len(self.of(kind)) >= count)
        return self.of(kind)[count - 1]

    def of(self, kind: type[WatchItem]) -> list[WatchItem]:
        """All items of a kind."""
        return [item for item in self.items if isinstance(item, kind)]

    @property
    def changes(self) -> list[Change]:
        """All changes, in the order in which they were told."""
        return [change for item in self.items if isinstance(item, Changes) for change in item.changes]

    @property
    def keys(self) -> list[str]:
        """The keys of all changes."""
        return [change.key for change in self.changes]

    @property
    def state(self) -> dict[str, bytes]:
        """What somebody knows who began with nothing and followed all changes."""
        known: dict[str, bytes] = {}
        for change in self.changes:
            if change.entry is None:
                known.pop(change.key, None)
            else:
                known[change.key] = change.entry.value
        return known


class MemoryLab:
    """Stores in memory, whose time is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._server = MemoryServer(lambda: self.now)
        self._first: MemoryStore | None = None
        self.store = self._first = self.new_store()

    def new_store(self, namespace: str = "/unicron/test") -> MemoryStore:
        """Another client."""
        return MemoryStore(self._server, namespace)

    def pass_time(self, seconds: float) -> None:
        """Lets leases run out."""
        self.now += seconds
        self._server.advance()

    def stop(self) -> None:
        """The server stands still."""
        self._server.stop()

    def resume(self) -> None:
        """And goes on."""
        self._server.resume()

    def cut(self) -> None:
        """``store`` reaches the server no more; others do."""
        assert self._first is not None
        self._first.cut()

    def mend(self) -> None:
        """``store`` reaches it again."""
        assert self._first is not None
        self._first.mend()

    def compact(self, revision: int) -> None:
        """Forgets history."""
        self._server.compact(revision)

    def lose_data(self) -> None:
        """An empty server in the place of the old one."""
        self._server.lose_data()

    def end(self) -> None:
        """Nothing to do."""


class EtcdLab:
    """Stores on a real etcd. ``store`` reaches it over a cable, other stores directly."""

    def __init__(self, server: EmbeddedEtcd) -> None:
        self.server = server
        self._mark = uuid.uuid4().hex
        self._cable = Cable(server.port)
        self._stores: list[Store] = []
        self.store = self._open(self._cable.port, "/unicron/test")

    def new_store(self, namespace: str = "/unicron/test") -> EtcdStore:
        """Another client."""
        return self._open(self.server.port, namespace)

    def pass_time(self, seconds: float) -> None:
        """The server's time passes by itself; a test waits for what comes of it."""

    def stop(self) -> None:
        """The server stands still."""
        hold(self.server)

    def resume(self) -> None:
        """And goes on."""
        os.kill(self.server.pid, signal.SIGCONT)

    def cut(self) -> None:
        """``store`` reaches the server no more; others do."""
        self._cable.cut()

    def mend(self) -> None:
        """``store`` reaches it again."""
        self._cable.mend()

    def compact(self, revision: int) -> None:
        """Forgets history."""
        compact(self.server.port, revision)

    def lose_data(self) -> None:
        """An empty server in the place of the old one."""
        self.server.stop(timeout_s=0.0)
        self.server.start()

    def end(self) -> None:
        """Closes everything."""
        self.resume()
        for store in self._stores:
            store.close()
        self._cable.end()

    def _open(self, port: int, namespace: str) -> EtcdStore:
        address = StoreAddress.parse(f"http://127.0.0.1:{port}")
        store = EtcdStore(address, f"{namespace}-{self._mark}", timeout_s=5.0, blind_after_s=BLIND_AFTER_S)
        self._stores.append(store)
        return store


def compact(port: int, revision: int) -> None:
    """Has the etcd on a port forget its history up to a revision."""
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=(("grpc.enable_http_proxy", 0),)) as channel:
        messages.KVStub(channel).Compact(
            messages.CompactionRequest(revision=revision, physical=True), timeout=DEADLINE_S
        )


def wait_until(condition: Callable[[], object]) -> None:
    """Waits for what nobody tells of; fails the test at the deadline."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "deadline passed"
        time.sleep(0.01)


def hold(server: EmbeddedEtcd) -> None:
    """Stop the server; return when all its threads stand still, as any of them may answer until then."""
    os.kill(server.pid, signal.SIGSTOP)
    threads = Path(f"/proc/{server.pid}/task")
    wait_until(lambda: all(stat.read_text().rpartition(") ")[2][0] == "T" for stat in threads.glob("*/stat")))
