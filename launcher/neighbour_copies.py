"""Copies of a neighbouring node's snapshots: two of each of its ranks, and for a while those of neighbours before."""

from __future__ import annotations

import threading
from collections.abc import Collection

from unicron_elastic.state.snapshot_choice import outdated, victim
from unicron_elastic.state.snapshot_exchange import copy_of
from unicron_elastic.state.snapshot_file import SnapshotFile
from unicron_elastic.state.snapshot_header import Header
from unicron_elastic.state.snapshot_offers import Remote

__all__ = ["NeighbourCopies"]


class NeighbourCopies:
    """Safe from any thread. Whoever gets files from ``outdated`` owns them from then on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[int, list[SnapshotFile]] = {}  # by rank
        self._busy: set[SnapshotFile] = set()  # they are being written

    def files(self) -> list[SnapshotFile]:
        """All of them, whole or not."""
        with self._lock:
            return [file for files in self._files.values() for file in files]

    def has(self, header: Header) -> bool:
        """Whether this snapshot was copied."""
        with self._lock:
            return any(file.header() == header for file in self._files.get(header.rank, []))

    def take(self, remote: Remote) -> str:
        """Copies it; a sentence if that failed. The copy before stays until this one is whole."""
        try:
            file = self._begin(remote.header.rank)
        except OSError as error:
            return f"There is no memory for a neighbour's snapshots: {error}."
        try:
            return copy_of(remote, file)
        except OSError as error:
            return f"There is no memory for a neighbour's snapshots: {error}."
        finally:
            with self._lock:
                self._busy.discard(file)

    def _begin(self, rank: int) -> SnapshotFile:
        """The file that is written next. Raises OSError."""
        with self._lock:
            files = self._files.setdefault(rank, [])
            free = [file for file in files if file not in self._busy]
            if len(files) > 1 and free:
                file = free[victim([file.header() for file in free])]
            else:
                file = SnapshotFile.create()
                files.append(file)
            self._busy.add(file)
            return file

    def outdated(self, ranks: Collection[int]) -> list[SnapshotFile]:
        """Takes out those that nobody will want, now that the neighbour has these ranks."""
        with self._lock:
            whole = {
                rank: {header: file for file in files if file not in self._busy and (header := file.header())}
                for rank, files in self._files.items()
            }
            gone = []
            for header in outdated({rank: tuple(found) for rank, found in whole.items()}, ranks):
                file = whole[header.rank][header]
                self._files[header.rank].remove(file)
                gone.append(file)
            self._files = {rank: files for rank, files in self._files.items() if files}
            return gone
