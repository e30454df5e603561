"""The snapshots of a job's nodes, agent to agent: each tells the others what it has, and copies a neighbour's.

All goes through the store of the present round; the snapshots themselves go from agent to agent. Everybody on the
network may read that store. So what stands there opens a server only together with the cluster's secret, if there is a
cluster: see ``key_of``.
"""

from __future__ import annotations

import hmac
import json
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Protocol

from unicron_elastic.state.layout import flatten
from unicron_elastic.state.pull.distance import Address
from unicron_elastic.state.pull.server import Held, NotAtRest, StateServer
from unicron_elastic.state.snapshot.file import SnapshotFile
from unicron_elastic.state.snapshot.header import Header
from unicron_elastic.state.snapshot.offers import Remote, pull_into

REMOTES_MAX = 4096  # snapshots that one node tells of: a few for each of its workers, and copies
LOOK_S = 0.5  # between two looks for a newer snapshot of the neighbour
OTHERS_TIMEOUT_S = 15.0  # so long the others are waited for, whose workers ask at about the same time
_HELD, _FRESH = "unicron/snapshots/held", "unicron/snapshots/fresh"
_GOES_ON = b'"goes on"'  # of a node whose workers have the state, and ask for none


Heard = Callable[[list[Remote], bool, str], None]
Done = Callable[[set[int]], None]


class TorchStoreLike(Protocol):
    """What is used of torch's, by several threads; none of these wait."""

    def set(self, key: str, value: str) -> None: ...

    def check(self, keys: list[str]) -> bool: ...

    def multi_get(self, keys: list[str]) -> list[bytes]: ...


def key_of(salt: bytes, secret: str) -> bytes:
    """The key of the servers that tell of ``salt``; without a ``secret`` of the cluster, who reads that has the key."""
    return hmac.digest(secret.encode(), b"snapshots" + salt, "sha256") if secret else salt


class Servers:
    """One server for each file that another node may want, from the first time that it is told of."""

    def __init__(self) -> None:
        self._salt = secrets.token_bytes(32)
        self._secret = ""
        self._servers: dict[SnapshotFile, StateServer] = {}

    def use(self, secret: str) -> None:
        """The cluster's secret, "" if there is none or no cluster; servers that know another one end."""
        if secret != self._secret:
            self.close()
            self._secret = secret

    def told(self, file: SnapshotFile, header: Header, host: str) -> dict[str, Any]:
        """What others are told of a file. Raises OSError if nobody can listen on ``host``."""
        if file not in self._servers:
            key = key_of(self._salt, self._secret)
            self._servers[file] = StateServer(_Provider(file), key, host, kind="snapshot")
        return {"header": asdict(header), "address": self._servers[file].address, "key": self._salt.hex()}

    def drop(self, file: SnapshotFile) -> None:
        """Drop the snapshot: it is not there any more."""
        if (server := self._servers.pop(file, None)) is not None:
            server.close()

    def close(self) -> None:
        """Ends all."""
        for file in list(self._servers):
            self.drop(file)


class _Provider:
    """Gives a whole file as one tensor of bytes; whoever gets it looks at the checksum."""

    def __init__(self, file: SnapshotFile) -> None:
        self._file = file

    def hold(self) -> Held:
        """Raises NotAtRest if nothing whole is in it."""
        header = self._file.header()
        if header is None:
            raise NotAtRest("the snapshot is being replaced")
        layout, tensors = flatten(self._file.block(header.total_bytes))
        return Held(header.step, layout, tensors)

    def release(self, held: Held) -> None:
        """The file stays as it is or is replaced: nobody waits."""


class SnapshotExchange:
    """In one round of ``size`` agents, as number ``rank``. Calls back from its own threads."""

    def __init__(self, store: TorchStoreLike, rank: int, size: int, secret: str = "") -> None:
        """``secret``: of the cluster, if there is one."""
        self._secret = secret
        self._store = store
        self._rank = rank
        self._size = size
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Begins nothing new."""
        self._stopped.set()

    # -- after a restart ----------------------------------------------------------------------------------------------

    def tell_and_hear(self, held: list[dict[str, Any]], then: Heard) -> None:
        """Tells what this agent has; ``then`` gets what the others have, whether workers of one of them train already,
        and a sentence if some did not tell.
        """
        threading.Thread(target=self._tell_and_hear, args=(held, then), name="unicron-shelf", daemon=True).start()

    def tell_going_on(self) -> None:
        """Tells that the workers of this agent train on in this round, with the state. Waits for the store."""
        self._store.set(f"{_HELD}/{self._rank}", _GOES_ON.decode())

    def _tell_and_hear(self, held: list[dict[str, Any]], then: Heard) -> None:
        found: list[Remote] = []
        does_one_go_on = False
        try:
            self._store.set(f"{_HELD}/{self._rank}", json.dumps(held))
            late = self._wait_for_others()
            for number in range(self._size):
                if number not in (self._rank, *late):
                    told = self._store.multi_get([f"{_HELD}/{number}"])[0]
                    does_one_go_on |= told == _GOES_ON
                    found += parse_remotes(told, self._secret)
        except Exception as error:  # the store is lost, and the round with it
            then(found, does_one_go_on, f"What snapshots other nodes have is not known: {error}")
            return
        then(found, does_one_go_on, f"Nodes {late} did not tell what snapshots they have." if late else "")

    def _wait_for_others(self) -> list[int]:
        """Those who told nothing in time."""
        until = time.monotonic() + OTHERS_TIMEOUT_S
        late = [number for number in range(self._size) if number != self._rank]
        while late and time.monotonic() < until and not self._stopped.is_set():
            late = [number for number in late if not self._store.check([f"{_HELD}/{number}"])]
            if late:
                self._stopped.wait(0.02)
        return late

    # -- while the job runs -------------------------------------------------------------------------------------------

    def offer(self, fresh: list[dict[str, Any]]) -> None:
        """Tells which snapshots the node before is to copy. Waits for the store: not in the agent's loop."""
        self._store.set(f"{_FRESH}/{self._rank}", json.dumps(fresh))

    def copy_neighbour(self, has: Callable[[Header], bool], take: Callable[[Remote], None], done: Done) -> None:
        """Copies what the next node offers and this one has not; ``done`` is told of which ranks that was."""
        threading.Thread(target=self._copy, args=(has, take, done), name="unicron-shelf", daemon=True).start()

    def _copy(self, has: Callable[[Header], bool], take: Callable[[Remote], None], done: Done) -> None:
        key = f"{_FRESH}/{(self._rank + 1) % self._size}"
        while not self._stopped.wait(LOOK_S):
            try:
                told = self._store.multi_get([key])[0] if self._store.check([key]) else b"[]"
            except Exception:
                return  # the store is lost, and the round with it
            offered = parse_remotes(told, self._secret)
            fresh = [remote for remote in offered if not has(remote.header)]
            for remote in fresh:
                if not self._stopped.is_set():
                    take(remote)
            if fresh and not self._stopped.is_set():
                done({remote.header.rank for remote in offered})


def parse_remotes(text: bytes, secret: str = "") -> list[Remote]:
    """The snapshots that another agent told of, without what is malformed: everybody may write to the store."""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        return []
    listed = told[:REMOTES_MAX] if isinstance(told, list) else []
    return [remote for each in listed if (remote := _remote(each, secret)) is not None]


def _remote(told: Any, secret: str) -> Remote | None:
    try:
        header, address, key = told["header"], told["address"], told["key"]
        if not isinstance(address, dict) or not isinstance(key, str):
            return None
        known = key_of(bytes.fromhex(key), secret).hex()
        return Remote(Header.from_message(header), Address.parse(address).to_dict(), known)
    except (KeyError, TypeError, ValueError):
        return None


def copy_of(remote: Remote, file: SnapshotFile) -> str:
    """Copies a snapshot into a file; a sentence if that failed, and the file is empty then."""
    try:
        pull_into(file, remote.header, remote.address, remote.key)
    except (OSError, ValueError) as error:
        file.clear()
        return f"A snapshot of rank {remote.header.rank} could not be copied from its node: {error}."
    if not file.is_whole():
        file.clear()
        return f"The snapshot of rank {remote.header.rank} was overtaken while it was copied: make it less often."
    return ""
