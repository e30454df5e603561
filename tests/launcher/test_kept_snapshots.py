"""What a node's agent keeps of a job's snapshots, from one part of the job to the next: real files, real sockets."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable

from unicron_elastic.launcher.common.kept_snapshots import KeptSnapshots, NodeShelf
from unicron_elastic.launcher.common.shelf_messages import FilesGiven, JobToWait
from unicron_elastic.worker.channel import Channel

DEADLINE_S = 20.0
JOB = ("job", 7)


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def child(kept: KeptSnapshots, submission: tuple[str, int] = JOB) -> NodeShelf:
    with kept.connect(submission) as sock:
        return NodeShelf(os.dup(sock.fileno()))


def file_of(text: str) -> int:
    fd = os.memfd_create(text)
    os.write(fd, text.encode())
    return fd


def texts(shelf: NodeShelf) -> dict[tuple[int, int], str]:
    taken = shelf.take()
    found = {place: os.pread(fd, 100, 0).decode() for place, fd in taken.items()}
    for fd in taken.values():
        os.close(fd)
    return found


def give(shelf: NodeShelf, place: tuple[int, int], text: str) -> None:
    fd = file_of(text)
    shelf.keep(place, fd)
    os.close(fd)


def open_files(name: str) -> int:
    """Returns how many descriptors of this process are of the memory file."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += name in os.readlink(f"/proc/self/fd/{fd}")
    return found


def test_the_next_part_of_a_job_has_the_files_of_the_one_before_and_another_job_has_not() -> None:
    kept = KeptSnapshots()
    first = child(kept)
    assert texts(first) == {}
    for rank in range(40):  # more than one message carries
        give(first, (rank, 0), f"of {rank}")
    give(first, (3, 0), "anew")
    until(lambda: kept.submissions() == [JOB])
    first.close()  # as when it is killed
    assert texts(child(kept, ("other", 7))) == {}
    wanted = {(rank, 0): f"of {rank}" for rank in range(40)} | {(3, 0): "anew"}
    until(lambda: texts(child(kept)) == wanted)
    assert texts(child(kept, ("job", 8))) == {}, "it is another job of that name"
    assert texts(child(kept)) == {}


def test_what_is_given_up_and_what_is_no_file_of_a_worker_leaves_no_descriptor() -> None:
    kept = KeptSnapshots()
    with kept.connect(JOB) as sock:
        channel = Channel(sock)
        fd = file_of("given-up")
        for packet in (
            b'i{"is": "FilesGiven", "places": 7}',
            b'i{"is": "FilesGiven", "places": [["a", 1]]}',
            b"i{}",
            b"i[",
        ):
            socket.send_fds(channel._sock, [packet], [fd, fd, fd])
        for places in (((0, 9), (-1, 0), (4096, 0)), ((0, 0), (0, 0))):
            channel.send(FilesGiven(places=places, fds=(fd, fd, fd)))
        channel.send(FilesGiven(places=((1, 0),), fds=(fd,)))
        os.close(fd)
        until(lambda: kept.submissions() and open_files("given-up") == 2)
        kept.drop(JOB)
        assert kept.submissions() == []
    until(lambda: open_files("given-up") == 0)  # one may come yet, and is given up then


def test_a_child_hears_that_its_job_is_to_wait() -> None:
    kept = KeptSnapshots()
    shelf = child(kept)
    assert texts(shelf) == {}
    assert not shelf.is_to_save()
    kept.ask_to_save()
    assert shelf.is_to_save()
    shelf.close()
    kept.ask_to_save()  # it is gone by then


def test_what_the_child_cannot_read_is_left_out() -> None:
    kept = KeptSnapshots()
    with kept.connect(JOB) as sock:
        shelf = NodeShelf(os.dup(sock.fileno()))
    assert texts(shelf) == {}
    assert kept._channel is not None
    for packet in (b"i[", b'i{"is": "JobToWait2"}'):
        kept._channel._sock.send(packet)
    assert not shelf.is_to_save()
    kept._channel._sock.send(b"i[")
    kept._channel.send(JobToWait())
    assert shelf.is_to_save()
    shelf.close()


def test_an_agent_keeps_no_more_files_than_leave_it_room() -> None:
    kept = KeptSnapshots(files_most=2)
    first = child(kept)
    for rank in range(4):
        give(first, (rank, 0), "bounded")
    give(first, (1, 0), "bounded anew")
    until(lambda: texts(child(kept)) == {(0, 0): "bounded", (1, 0): "bounded anew"})
    assert open_files("bounded") == 2
