"""Copies of a neighbouring node's snapshots: two of each of its ranks, and for a while those of neighbours before."""

from __future__ import annotations

import threading
from collections.abc import Collection

from unicron_elastic.state.snapshot.exchange import copy_of
from unicron_elastic.state.snapshot.file import SnapshotFile
from unicron_elastic.state.snapshot.header import Header
from unicron_elastic.state.snapshot.newest_common import outdated, victim
from unicron_elastic.state.snapshot.offers import Remote


class NeighbourCopies:
    """Safe from any thread. Whoever gets files from ``outdated`` owns them from then on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[int, list[SnapshotFile]] = {}  # by rank
        self._busy: set[SnapshotFile] = set()  # they are being written

    def files(self) -> list[SnapshotFile]:
        """Without those that are being written: their header may be there before the rest."""
        with self._lock:
            return [file for files in self._files.values() for file in files if file not in self._busy]

    def has(self, header: Header) -> bool:
        """Whether this snapshot was copied."""
        with self._lock:
            files = self._files.get(header.rank, [])
            return any(file.header() == header for file in files if file not in self._busy)

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
            if len(free) > 1:
                file = free[victim([file.header() for file in free])]
            else:
                file = SnapshotFile.create()
                files.append(file)
            self._busy.add(file)
            return file

    def outdated(self, ranks: Collection[int]) -> list[SnapshotFile]:
        """Takes out those that nobody will want, now that the neighbour has these ranks."""
        with self._lock:
            free = {rank: [(file, file.header()) for file in files] for rank, files in self._free().items()}
            whole = {rank: [header for _, header in found if header is not None] for rank, found in free.items()}
            old = outdated(whole, ranks)
            gone = [
                file
                for rank, found in free.items()
                for file, header in found
                if header in old or (header is None and rank not in ranks)  # the latter: its source was lost on the way
            ]
            self._files = {rank: [file for file in files if file not in gone] for rank, files in self._files.items()}
            return gone

    def _free(self) -> dict[int, list[SnapshotFile]]:
        return {rank: [file for file in files if file not in self._busy] for rank, files in self._files.items()}
