"""Messages of any size with descriptors, and everything that is not a message."""

from __future__ import annotations

import array
import json
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from unicron_elastic.worker import channel as module
from unicron_elastic.worker.channel import BODY_BYTES_MAX, FDS_MAX, INLINE_BYTES_MAX, Channel, ChannelClosed
from unicron_elastic.worker.message import Descriptors, Message, Odd


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    ends = Channel.pair()
    for end in ends:
        end.settimeout(10.0)
    yield ends
    for end in ends:
        end.close()


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, Channel]]:
    """A bare socket, and the channel at its other end."""
    theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(ours)
    channel.settimeout(10.0)
    yield theirs, channel
    theirs.close()
    channel.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Said(Message):
    """`Said` is a message of these tests."""

    x: Any
    fds: Descriptors = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bare(Message):
    """`Bare` is one that has no descriptors."""

    x: int


def _hear(channel: Channel) -> Any:
    """The content of the next message."""
    said = channel.hear([Said])
    assert isinstance(said, Said)
    assert said.fds == ()
    return said.x


EMPTY = len(json.dumps(Said(x="").message()))


def _open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("message", [{}, {"a": 1, "b": [None, "ü \udc80 \0"]}, {"deep": {"deep": [{}]}}])
def test_round_trip(pair: tuple[Channel, Channel], message: dict[str, object]) -> None:
    pair[0].send(Said(x=message))
    assert pair[1].receive() == ({"is": "Said", "x": message}, [])
    pair[0].send(Said(x=message))
    assert pair[1].hear([Bare, Said]) == Said(x=message)


@pytest.mark.parametrize("size", [INLINE_BYTES_MAX - EMPTY, INLINE_BYTES_MAX - EMPTY + 1, 300_000, 5_000_000])
def test_a_body_of_any_size_arrives_whole(pair: tuple[Channel, Channel], size: int) -> None:
    before = _open_fds()
    pair[0].send(Said(x="y" * size))
    assert _hear(pair[1]) == "y" * size
    assert _open_fds() == before


def test_order_is_kept_between_small_and_large(pair: tuple[Channel, Channel]) -> None:
    sent = [{"n": n, "body": "x" * (n % 2 * 100_000)} for n in range(6)]
    for message in sent:
        pair[0].send(Said(x=message))
    assert [_hear(pair[1]) for _ in sent] == sent


def test_a_body_beyond_the_limit_is_refused_by_the_sender(pair: tuple[Channel, Channel]) -> None:
    before = _open_fds()
    with pytest.raises(ValueError, match="exceeds the limit"):
        pair[0].send(Said(x="y" * BODY_BYTES_MAX))
    assert _open_fds() == before
    pair[0].send(Said(x="usable"))
    assert _hear(pair[1]) == "usable"


@pytest.mark.parametrize("size", [10, 100_000])
def test_descriptors_travel_in_order_and_are_not_inheritable(pair: tuple[Channel, Channel], size: int) -> None:
    read_end, write_end = os.pipe()
    try:
        pair[0].send(Said(x="y" * size, fds=(write_end, read_end)))
        theirs_write, theirs_read = pair[1].hear([Said]).fds
        assert not os.get_inheritable(theirs_write)
        os.write(theirs_write, b"through")
        assert os.read(read_end, 10) == b"through"
        os.write(write_end, b"and back")
        assert os.read(theirs_read, 10) == b"and back"
        os.close(theirs_write)
        os.close(theirs_read)
    finally:
        os.close(read_end)
        os.close(write_end)


@pytest.mark.parametrize(("count", "size"), [(FDS_MAX + 1, 10), (FDS_MAX, 100_000)])
def test_descriptors_are_never_lost_in_silence(pair: tuple[Channel, Channel], count: int, size: int) -> None:
    fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(count)]
    try:
        try:
            pair[0].send(Said(x="y" * size, fds=tuple(fds)))
        except ValueError:
            return  # refusing is as good
        received = pair[1].hear([Said]).fds
        module.close_all(received)
        assert len(received) == count
    finally:
        module.close_all(fds)


@pytest.mark.parametrize(
    "packet",
    [
        b"i",
        b"i{",
        b"i[1]",
        b"i17",
        b"inull",
        b"i\xff\xfe",
        b"f",
        b"\0\0\0\0",
        b"i" + b"[" * 20_000,
        b"i" + b"9" * 20_000,
        b"i{" + b" " * (INLINE_BYTES_MAX + 5) + b"}",
    ],
    ids=lambda packet: repr(packet[:8]),
)
def test_what_is_not_a_message_is_dropped_and_named(raw: tuple[socket.socket, Channel], packet: bytes) -> None:
    theirs, channel = raw
    theirs.send(packet)
    with pytest.raises(ValueError, match="not a message"):
        channel.receive()
    theirs.send(packet)
    said = channel.hear([Said])
    assert isinstance(said, Odd)
    assert said.why.startswith("not a message: ")
    theirs.send(b'i{"is": "Said", "x": "usable"}')
    assert _hear(channel) == "usable"


@pytest.mark.parametrize("body", ['{"is": "Bare", "x": 1}', '{"is": "Said"}', '{"is": "Other"}', "{", '{"fds": [1]}'])
def test_descriptors_that_nobody_takes_are_closed(raw: tuple[socket.socket, Channel], body: str) -> None:
    theirs, channel = raw
    before = _open_fds()
    read_end, write_end = os.pipe()
    socket.send_fds(theirs, [b"i" + body.encode()], [read_end, write_end])
    assert channel.hear([Bare, Said]).fds == ()
    module.close_all([read_end, write_end])
    assert _open_fds() == before


def test_a_file_that_is_none_is_dropped(raw: tuple[socket.socket, Channel]) -> None:
    theirs, channel = raw
    before = _open_fds()
    read_end, write_end = os.pipe()
    huge = os.memfd_create("huge")
    os.ftruncate(huge, BODY_BYTES_MAX + 1)
    for fds in ([read_end], [huge, write_end]):
        theirs.sendmsg([b"f"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
        with pytest.raises(ValueError, match="not a message"):
            channel.receive()
    module.close_all([read_end, write_end, huge])
    assert _open_fds() == before


def test_a_closed_peer_is_told_apart_from_silence() -> None:
    ours, theirs = Channel.pair()
    theirs.send(Said(x="last"))
    theirs.close()
    assert _hear(ours) == "last"  # what was said before the end is still heard
    with pytest.raises(ChannelClosed):
        ours.receive()
    with pytest.raises(ChannelClosed):
        ours.send(Said(x=1))
    with pytest.raises(ChannelClosed):
        ours.send(Said(x="x" * 100_000))
    ours.close()
    assert ours.fileno() == -1


def test_what_a_peer_said_before_it_ended_is_heard_though_it_left_messages_unread() -> None:
    ours, theirs = Channel.pair()
    ours.settimeout(5.0)
    for number in range(2):
        theirs.send(Said(x=number))
    ours.send(Said(x="unread"))
    theirs.close()
    assert [_hear(ours) for _ in range(2)] == [0, 1]
    with pytest.raises(ChannelClosed):
        ours.receive()
    ours.close()


def test_receive_and_send_end_at_the_timeout(pair: tuple[Channel, Channel]) -> None:
    pair[0].settimeout(0.05)
    with pytest.raises(TimeoutError):
        pair[0].receive()

    def send_for_ever() -> None:
        while True:
            pair[0].send(Said(x="y" * 10_000))

    with pytest.raises(TimeoutError):  # a peer that does not read fills the buffer
        send_for_ever()
    pair[0].settimeout(0)
    with pytest.raises(BlockingIOError):
        pair[0].receive()


def test_waiting_for_ever_ends_when_the_message_comes(pair: tuple[Channel, Channel]) -> None:
    pair[1].settimeout(None)
    sender = threading.Thread(target=pair[0].send, args=(Said(x=1),))
    sender.start()
    assert _hear(pair[1]) == 1
    sender.join()


def test_taking_over_a_descriptor() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    os.set_inheritable(theirs.fileno(), True)
    channel = Channel.from_fd(theirs.detach())
    assert not os.get_inheritable(channel.fileno())
    channel.send(Said(x=1))
    assert json.loads(ours.recv(100)[1:]) == {"is": "Said", "x": 1}
    channel.close()
    ours.close()


def test_a_descriptor_of_another_kind_is_refused_and_left_open() -> None:
    stream, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    file = os.open(os.devnull, os.O_RDONLY)
    for fd in (stream.fileno(), file):
        with pytest.raises(OSError, match=r"."):
            Channel.from_fd(fd)
        os.fstat(fd)
    os.close(file)
    stream.close()
    other.close()
