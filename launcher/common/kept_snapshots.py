"""How the snapshots of a planned job outlive its part of a node: the node's agent has their memory files as well.

A job's part of a node gives each file on when a worker has made it, so that even one that is killed leaves them. The
next part of the same job on this node begins with them, as workers do that all begin again.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import threading
from collections.abc import Iterator, Mapping

from unicron_elastic.launcher.common.shelf_messages import (
    SHELF_MESSAGES,
    AllGiven,
    FilesGiven,
    JobToWait,
    ShelfMessage,
)
from unicron_elastic.worker.channel import FDS_MAX, Channel, ChannelClosed, close_all

VARIABLE = "UNICRON_SNAPSHOTS_FD"  # of a process that an agent has started
TAKE_TIMEOUT_S = 10.0  # the agent speaks at once
OTHER_FILES = 64  # that an agent of a node may have open beside these
RANKS_MAX, SLOTS_MAX = 4096, 3  # workers of a node, and files of one

Place = tuple[int, int]  # a worker's local rank, and which of its files


class NodeShelf:
    """The child's end."""

    def __init__(self, fd: int) -> None:
        """Raises OSError if ``fd`` is no such socket."""
        self._channel = Channel.from_fd(fd)
        self._channel.settimeout(TAKE_TIMEOUT_S)

    def take(self) -> dict[Place, int]:
        """Returns what an earlier part of the job has left here; the descriptors are the caller's."""
        found: dict[Place, int] = {}
        try:
            while True:
                match self._channel.hear(SHELF_MESSAGES):
                    case FilesGiven() as given:
                        found |= _by_place(given)
                    case AllGiven():
                        return found
        except (ChannelClosed, OSError):  # the agent is gone or stands still: there is nothing, then
            return found

    def keep(self, place: Place, fd: int) -> None:
        """Gives a file to the agent, instead of the one that had this place."""
        try:
            self._channel.send(FilesGiven(places=(place,), fds=(fd,)))
        except (ChannelClosed, OSError):
            pass  # it is gone, and this process ends soon

    def is_to_save(self) -> bool:
        """Returns whether the agent has said that the job is to wait, and its state to be kept."""
        try:
            while select.select([self._channel], [], [], 0.0)[0]:
                said = self._channel.hear(SHELF_MESSAGES)
                close_all(said.fds)
                if isinstance(said, JobToWait):
                    return True
        except (ChannelClosed, OSError):
            pass
        return False

    def close(self) -> None:
        """May come twice."""
        self._channel.close()


def take_shelf() -> NodeShelf | None:
    """Returns the end that this process was started with, if it was; nobody that it starts has it."""
    told = os.environ.pop(VARIABLE, "")
    try:
        return NodeShelf(int(told)) if told else None
    except (OSError, ValueError):
        return None


class KeptSnapshots:
    """The agent's end, for one child after another. Safe from any thread.

    A *submission* is a job's name and a number of its own, so that a job that is submitted again begins anew.
    """

    def __init__(self, files_most: int | None = None) -> None:
        """``files_most``: of all jobs; by default what this process may open leaves room for all else."""
        may_open, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._files_most = may_open - OTHER_FILES if files_most is None else files_most
        self._lock = threading.Lock()
        self._files: dict[tuple[str, int], dict[Place, int]] = {}
        self._channel: Channel | None = None  # to the latest child

    def submissions(self) -> list[tuple[str, int]]:
        """Returns the jobs of which there is something."""
        with self._lock:
            return [submission for submission, files in self._files.items() if files]

    def connect(self, submission: tuple[str, int]) -> socket.socket:
        """Returns the end for a new child, to be closed once it has been started. Raises OSError."""
        for other in self.submissions():
            if other[0] == submission[0] and other != submission:
                self.drop(other)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel = self._channel = Channel(ours)
        threading.Thread(target=self._serve, args=(channel, submission), name="unicron-kept", daemon=True).start()
        return theirs

    def ask_to_save(self) -> None:
        """Tells the child that its job is to wait, before it is stopped for that."""
        with contextlib.suppress(ChannelClosed, OSError):
            if self._channel is not None:
                self._channel.send(JobToWait())

    def drop(self, submission: tuple[str, int]) -> None:
        """Gives the memory back."""
        with self._lock:
            close_all(list(self._files.pop(submission, {}).values()))

    def _serve(self, channel: Channel, submission: tuple[str, int]) -> None:
        """Gives a child what is there, and takes what it gives until it ends."""
        try:
            with self._lock:
                files = self._files.setdefault(submission, {})
                for message in _messages(files):
                    channel.send(message)
            while True:
                given = channel.hear([FilesGiven])
                if isinstance(given, FilesGiven):
                    self._keep(submission, _by_place(given))
        except (ChannelClosed, OSError):
            pass
        finally:
            channel.close()

    def _keep(self, submission: tuple[str, int], given: Mapping[Place, int]) -> None:
        with self._lock:
            files = self._files.get(submission)
            if files is None:  # the job is over
                close_all(list(given.values()))
                return
            for place, fd in given.items():
                if place in files:
                    os.close(files.pop(place))
                if sum(map(len, self._files.values())) < self._files_most:
                    files[place] = fd
                else:
                    os.close(fd)


def _messages(files: Mapping[Place, int]) -> Iterator[ShelfMessage]:
    """Yields what a child is told of the files, of which a message carries few, and that this is all."""
    places = list(files)
    for first in range(0, len(places), FDS_MAX):
        some = places[first : first + FDS_MAX]
        yield FilesGiven(places=tuple(some), fds=tuple(files[place] for place in some))
    yield AllGiven()


def _by_place(given: FilesGiven) -> dict[Place, int]:
    """Returns the files of a message by their places; what is in none is closed."""
    told = zip(given.places, given.fds, strict=False)
    found = {place: fd for place, fd in told if 0 <= place[0] < RANKS_MAX and 0 <= place[1] < SLOTS_MAX}
    close_all([fd for fd in given.fds if fd not in found.values()])
    return found
