"""The snapshots of a job's nodes, agent to agent: each tells the others what it has, and copies a neighbour's.

All goes through the store of the present round; the snapshots themselves go from agent to agent.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Protocol

from unicron_elastic.state.layout import flatten
from unicron_elastic.state.server import Held, NotAtRest, StateServer
from unicron_elastic.state.snapshot_file import SnapshotFile
from unicron_elastic.state.snapshot_header import Header
from unicron_elastic.state.snapshot_offers import Remote, pull_into

__all__ = ["Exchange", "Servers"]

LOOK_S = 0.5  # between two looks for a newer snapshot of the neighbour
OTHERS_TIMEOUT_S = 15.0  # so long the others are waited for, whose workers ask at about the same time
_HELD, _FRESH = "unicron/snapshots/held", "unicron/snapshots/fresh"


class Store(Protocol):
    """What is used of torch's, by several threads; none of these wait."""

    def set(self, key: str, value: str) -> None: ...

    def check(self, keys: list[str]) -> bool: ...

    def multi_get(self, keys: list[str]) -> list[bytes]: ...


class Servers:
    """One server for each file that another node may want, from the first time that it is told of."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._servers: dict[SnapshotFile, StateServer] = {}

    def told(self, file: SnapshotFile, header: Header, host: str) -> dict[str, Any]:
        """What others are told of a file. Raises OSError if nobody can listen on ``host``."""
        if file not in self._servers:
            self._servers[file] = StateServer(_Provider(file), self._key, host, kind="snapshot")
        return {"header": asdict(header), "address": self._servers[file].address, "key": self._key.hex()}

    def drop(self, file: SnapshotFile) -> None:
        """It is not there any more."""
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


class Exchange:
    """In one round of ``size`` agents, as number ``rank``. Calls back from its own threads."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Begins nothing new."""
        self._stopped.set()

    # -- after a restart ----------------------------------------------------------------------------------------------

    def tell_and_hear(self, held: list[dict[str, Any]], then: Callable[[list[Remote], str], None]) -> None:
        """Tells what this agent has; ``then`` gets what the others have, and a sentence if some did not tell."""
        threading.Thread(target=self._tell_and_hear, args=(held, then), name="unicron-shelf", daemon=True).start()

    def _tell_and_hear(self, held: list[dict[str, Any]], then: Callable[[list[Remote], str], None]) -> None:
        found: list[Remote] = []
        try:
            self._store.set(f"{_HELD}/{self._rank}", json.dumps(held))
            late = self._wait_for_others()
            for number in range(self._size):
                if number not in (self._rank, *late):
                    text = self._store.multi_get([f"{_HELD}/{number}"])[0]
                    found += [remote for each in json.loads(text) if (remote := parse_remote(each)) is not None]
        except Exception as error:  # the store is lost, and the round with it
            then(found, f"What snapshots other nodes have is not known: {error}")
            return
        then(found, f"Nodes {late} did not tell what snapshots they have." if late else "")

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

    def copy_neighbour(self, has: Callable[[Header], bool], take: Callable[[Remote], str]) -> None:
        """Copies what the next node offers and this one has not; ``take`` returns what is to be said of it."""
        threading.Thread(target=self._copy, args=(has, take), name="unicron-shelf", daemon=True).start()

    def _copy(self, has: Callable[[Header], bool], take: Callable[[Remote], str]) -> None:
        key = f"{_FRESH}/{(self._rank + 1) % self._size}"
        while not self._stopped.wait(LOOK_S):
            try:
                told = json.loads(self._store.multi_get([key])[0]) if self._store.check([key]) else []
            except Exception:
                return  # the store is lost, and the round with it
            for each in told:
                remote = parse_remote(each)
                if remote is not None and not has(remote.header) and not self._stopped.is_set():
                    take(remote)


def parse_remote(told: Any) -> Remote | None:
    """What another agent told of a snapshot; None if it is malformed."""
    try:
        return Remote(Header.from_message(told["header"]), _mapping(told["address"]), str(told["key"]))
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


def _mapping(told: Any) -> Mapping[str, Any]:
    if not isinstance(told, dict):
        raise ValueError("an address is an object")
    return told
