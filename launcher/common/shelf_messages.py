"""What the agent of a node and a job's part there say to one another about snapshots: see `worker.message`."""

from __future__ import annotations

from dataclasses import dataclass

from unicron_elastic.worker.message import Descriptors, Message


class ShelfMessage(Message):
    """`ShelfMessage` is anything that one of them says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesGiven(ShelfMessage):
    """`FilesGiven` are memory files of snapshots; ``places``: of each a worker's local rank, and which of its files."""

    places: tuple[tuple[int, int], ...]
    fds: Descriptors = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AllGiven(ShelfMessage):
    """`AllGiven` says that an earlier part of the job has left no more files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobToWait(ShelfMessage):
    """`JobToWait` says that the job is about to be stopped, to wait for nodes."""


SHELF_MESSAGES: tuple[type[ShelfMessage], ...] = (FilesGiven, AllGiven, JobToWait)
