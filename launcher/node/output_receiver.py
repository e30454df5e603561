"""The output of a job's parts on other hosts, shown here byte for byte as it comes.

Agents connect, and both sides prove that they know the cluster's secret, as on a heartbeat connection. What follows
are frames: a number for the stream (0: the end), the length, and whole lines, or what stood still in the middle of one;
and after each a seal, as after each count that goes back. A frame is written in one piece, so no line of one host lands
in another's.

Who sends may be ahead by ``WINDOW_BYTES`` of what has been written, and is told how much that is. That bounds memory,
and holds up the senders when the terminal is slow, as it would hold up a process here. It leaves the socket empty, and
so the kernel can tell a host that is slow from one that is gone. The number is told again at each beat. So a terminal
stopped with Ctrl-S is waited for, and a stopped process is not.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import logging
import os
import queue
import select
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import BinaryIO

from unicron_elastic.base.seal import SEAL_BYTES, Seal
from unicron_elastic.rendezvous.cluster.heartbeat_wire import (
    LINE_BYTES_MAX,
    Hello,
    WireError,
    challenge,
    listen,
    read,
    seal_of,
    welcome,
)

END = 0  # instead of a stream: nothing comes after it
STREAMS = (1, 2)  # standard output and standard error
FRAME_BYTES_MAX = 64 * 1024
WINDOW_BYTES = 4 * FRAME_BYTES_MAX  # that one sender may be ahead
HEADER = struct.Struct("!BI")  # the stream, and how many bytes follow
COUNT = struct.Struct("!Q")  # bytes of this connection that have been written
GONE_AFTER_S = 10.0  # without the kernel of the other host saying that it got what was sent

_BEAT_S = 1.0
GREETING_S = 5.0  # so long a connection may take until both sides have proven who they are
GREETINGS_MAX = 64  # connections that have not proven anything yet
_PEERS_MAX = 1024  # in all, so that memory has a bound as well
_CLOSE_S = 1.0  # for the writing thread, which the terminal may hold up
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

logger = logging.getLogger(__name__)


class Sink:
    """A binary file whose end of reading (``| head``) raises nothing: what comes after that is dropped.

    Written to past the file's buffer, whose lock would bring down the interpreter's exit while a thread waits in it for
    a terminal that was stopped.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._fd = _own_descriptor(file)  # None: a file without one, such as BytesIO
        self._is_lost = False

    def write(self, data: bytes) -> None:
        """Writes all of it, however long the reader takes."""
        if self._is_lost:
            return
        try:
            if self._fd is None:
                self._file.write(data)
                self._file.flush()
            else:
                _write_all(self._fd, data)
        except (OSError, ValueError):  # ValueError: the file was closed
            self._is_lost = True

    def close(self) -> None:
        """Leaves the file itself open. May come twice."""
        self._is_lost = True
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


@dataclass(eq=False)
class _Peer:
    """One connection."""

    sock: socket.socket
    since: float
    nonce: str
    host: str = ""
    seal: Seal | None = None  # once both sides have proven who they are
    has_ended: bool = False
    taken: int = 0  # bytes of output
    written: int = 0
    data: bytearray = field(default_factory=bytearray)  # what makes no whole frame yet
    out: bytearray = field(default_factory=bytearray)

    @property
    def is_open(self) -> bool:
        """Whether both sides have proven who they are."""
        return self.seal is not None


class OutputReceiver:
    """Listens in a thread of its own, and writes in another, until ``close``. All methods are for any thread."""

    def __init__(
        self,
        secret: str,
        stdout: BinaryIO,
        stderr: BinaryIO,
        *,
        host: str = "",
        listen: Callable[[str], socket.socket] = listen,
        beat_s: float = _BEAT_S,
        greeting_s: float = GREETING_S,
        greetings_max: int = GREETINGS_MAX,
    ) -> None:
        """Listens on ``host``, "" for all addresses. ``beat_s``: how often senders are told that somebody is here.

        Raises OSError, and WireError (a ValueError) if ``secret`` is empty.
        """
        self._key = key_for_output(secret)
        self._beat_s = beat_s
        self._greeting_s, self._greetings_max = greeting_s, greetings_max
        self._listener = listen(host)
        self.port: int = self._listener.getsockname()[1]
        self._sinks = dict(zip(STREAMS, (Sink(stdout), Sink(stderr)), strict=True))
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._woken, selectors.EVENT_READ, self._was_woken)
        self._to_write: queue.SimpleQueue[tuple[_Peer, int, bytes] | None] = queue.SimpleQueue()
        self._written: deque[tuple[_Peer, int]] = deque()
        self._peers: set[_Peer] = set()
        self._ended: set[str] = set()  # hosts
        self._waits_to_be_written = 0  # bytes, of connections that are gone as well
        self._beat_at = 0.0
        self._is_listening = True
        self._is_closing = False
        self._changed = threading.Condition()  # holds the state that drain() looks at
        self._reading = threading.Thread(target=self._read, name="unicron-output-receiver", daemon=True)
        self._writing = threading.Thread(target=self._write, name="unicron-output-writer", daemon=True)
        self._reading.start()
        self._writing.start()

    def address_for(self, host: str) -> str:
        """HOST:PORT for who finds this host under this name or address."""
        is_ipv6 = ":" in host and not host.startswith("[")
        return f"[{host}]:{self.port}" if is_ipv6 else f"{host}:{self.port}"

    def drain(self, timeout_s: float, hosts: Collection[str] = ()) -> bool:
        """Waits until all connections have ended and all they brought is written; whether it came to that in time.

        Who has not connected yet is waited for if named in ``hosts``, and who lost the connection likewise.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self._is_drained(hosts), timeout_s)

    def close(self) -> None:
        """Ends all connections; senders then write where they are. May come twice."""
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
            os.write(self._wake, b"\0")
        self._reading.join()
        self._to_write.put(None)
        self._writing.join(_CLOSE_S)
        if self._writing.is_alive():
            return  # the terminal was stopped: leave it the descriptors
        for sink in self._sinks.values():
            sink.close()
        os.close(self._woken)
        os.close(self._wake)

    def _is_drained(self, hosts: Collection[str]) -> bool:
        if self._is_closing:
            return True
        return not self._peers and not self._waits_to_be_written and self._ended.issuperset(hosts)

    # -- the thread that writes ----------------------------------------------------------------------------------------

    def _write(self) -> None:
        while (found := self._to_write.get()) is not None:
            peer, stream, data = found
            self._sinks[stream].write(data)
            self._written.append((peer, len(data)))
            with contextlib.suppress(BlockingIOError):  # it has much to read already
                os.write(self._wake, b"\0")

    # -- the thread that reads -----------------------------------------------------------------------------------------

    def _read(self) -> None:
        while not self._is_closing:
            for key, _ in self._selector.select(max(0.0, self._beat_at - time.monotonic())):
                key.data()
            self._take_written()
            if (now := time.monotonic()) >= self._beat_at:
                self._beat(now)
            with self._changed:
                self._changed.notify_all()
        for peer in list(self._peers):
            self._close(peer)
        self._selector.close()
        self._listener.close()
        with self._changed:
            self._changed.notify_all()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _NO_ROOM:  # it would be ready again at once, and for ever
                self._selector.unregister(self._listener)
                self._is_listening = False
            return
        silent = [peer for peer in self._peers if not peer.is_open]
        if len(self._peers) - len(silent) >= _PEERS_MAX:
            sock.close()
            return
        if len(silent) >= self._greetings_max:
            self._close(min(silent, key=lambda peer: peer.since))  # strangers keep no node out by silence
        sock.setblocking(False)
        said, nonce = challenge()
        peer = _Peer(sock, time.monotonic(), nonce)
        with self._changed:
            self._peers.add(peer)
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._ready(peer))
        try:
            watched(sock, GONE_AFTER_S)
        except OSError:  # it has gone already
            self._close(peer)
            return
        self._send(peer, said)

    def _ready(self, peer: _Peer) -> None:
        if peer not in self._peers:
            return  # closed by what came before it
        try:
            data = peer.sock.recv(FRAME_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close(peer)
            return
        peer.data += data
        try:
            if (seal := peer.seal or self._greet(peer)) is not None:
                self._take_frames(peer, seal)
        except WireError as error:
            logger.debug("A connection for output is closed: %s.", error)
            self._close(peer)

    def _greet(self, peer: _Peer) -> Seal | None:
        """The seal of the connection, once it has said who it is."""
        text, newline, rest = peer.data.partition(b"\n")
        if len(text) > LINE_BYTES_MAX:
            raise WireError(f"a line of more than {LINE_BYTES_MAX} bytes")
        if not newline:
            return None
        hello, nonces = Hello.parse(read(bytes(text)), self._key, peer.nonce)
        peer.host, peer.data = hello.host, rest
        peer.seal = seal_of(self._key, nonces, is_coordinator=True)
        self._send(peer, welcome(self._key, nonces, self._beat_s))
        return peer.seal

    def _take_frames(self, peer: _Peer, seal: Seal) -> None:
        at = 0
        while len(peer.data) - at >= HEADER.size:
            stream, length = HEADER.unpack_from(peer.data, at)
            _check_frame(peer, stream, length)
            end = at + HEADER.size + length
            if len(peer.data) < end + SEAL_BYTES:
                break
            frame = bytes(memoryview(peer.data)[at : end + SEAL_BYTES])
            if not seal.fits(frame[:-SEAL_BYTES], frame[-SEAL_BYTES:]):
                raise WireError("a frame that the other side has not sent at this point")
            if stream == END:
                peer.has_ended = True
            else:
                self._hand_over(peer, stream, frame[HEADER.size : -SEAL_BYTES])
            at = end + SEAL_BYTES
        del peer.data[:at]
        self._end_if_complete(peer)

    def _hand_over(self, peer: _Peer, stream: int, data: bytes) -> None:
        peer.taken += len(data)
        with self._changed:
            self._waits_to_be_written += len(data)
        self._to_write.put((peer, stream, data))

    def _take_written(self) -> None:
        peers = set()
        while self._written:
            peer, count = self._written.popleft()
            peer.written += count
            with self._changed:
                self._waits_to_be_written -= count
            peers.add(peer)
        for peer in peers & self._peers:
            self._tell_count(peer)
            self._end_if_complete(peer)

    def _end_if_complete(self, peer: _Peer) -> None:
        """The other side waits for this end, and for the count before it."""
        if not peer.has_ended or peer.written < peer.taken:
            return
        with self._changed:
            self._ended.add(peer.host)
        self._close(peer)

    def _tell_count(self, peer: _Peer) -> None:
        if not peer.out and peer.seal is not None:  # else it does not read, and a later beat tells it
            count = COUNT.pack(peer.written)
            self._send(peer, count + peer.seal.of(count))

    def _send(self, peer: _Peer, data: bytes) -> None:
        """Sends what goes; a broken connection is noticed when it is read."""
        peer.out += data
        with contextlib.suppress(OSError):
            del peer.out[: peer.sock.send(peer.out)]

    def _beat(self, now: float) -> None:
        if not self._is_listening:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            self._is_listening = True
        for peer in list(self._peers):
            if not peer.is_open and now - peer.since > self._greeting_s:
                self._close(peer)
            elif peer.out:
                self._send(peer, b"")
            elif peer.is_open:
                self._tell_count(peer)
        self._beat_at = now + self._beat_s

    def _close(self, peer: _Peer) -> None:
        if peer not in self._peers:
            return
        self._selector.unregister(peer.sock)
        peer.sock.close()
        with self._changed:
            self._peers.remove(peer)

    def _was_woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 65536)


def key_for_output(secret: str) -> str:
    """What is proven here, so that no proof of a heartbeat connection is one. Raises WireError for no secret."""
    if not secret:
        raise WireError("the cluster's secret is not known")
    return hmac.new(secret.encode(), b"output", hashlib.sha256).hexdigest()


def watched(connection: socket.socket, gone_after_s: float) -> None:
    """Lets the kernel end the connection when the other host is gone, whether or not there is something to send."""
    pause_s = max(1, int(gone_after_s / 4))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(gone_after_s * 1000))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _check_frame(peer: _Peer, stream: int, length: int) -> None:
    if peer.has_ended:
        raise WireError("output after its end")
    if stream not in (END, *STREAMS) or (stream == END and length):
        raise WireError(f"a frame of {length} bytes for stream {stream}")
    if length > FRAME_BYTES_MAX or peer.taken + length - peer.written > WINDOW_BYTES:
        raise WireError(f"a frame of {length} bytes that nobody has room for")


def _own_descriptor(file: BinaryIO) -> int | None:
    """A descriptor of our own, because ``file`` may be closed and its number used again before we are done."""
    try:
        file.flush()  # what was written before comes before
        return os.dup(file.fileno())
    except (OSError, ValueError, AttributeError):
        return None


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:  # somebody else made the descriptor so
            waiting = select.poll()
            waiting.register(fd, select.POLLOUT)
            waiting.poll()
