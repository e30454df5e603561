"""Messages between two processes of one host: JSON objects and file descriptors over a Unix socket pair.

SOCK_SEQPACKET keeps message boundaries and tells when the peer is gone. A body too large for one packet travels in
an anonymous memory file, so there is one way to send a message of any size. Nothing is ever unpickled.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
from collections.abc import Sequence
from typing import Any

from unicron_elastic.worker.message import Kind, Message, Odd, heard

INLINE_BYTES_MAX = 32 * 1024  # well under the default socket buffer (net.core.wmem_default, 208 KiB)
BODY_BYTES_MAX = 16 * 1024 * 1024
FDS_MAX = 16
_INLINE, _IN_FILE = b"i", b"f"


class ChannelClosed(Exception):
    """The process at the other end closed its socket or died."""


class Channel:
    """One end of a socket pair that carries messages."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Two connected ends; neither is inherited across exec unless made so."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), cls(theirs)

    @classmethod
    def from_fd(cls, fd: int) -> Channel:
        """Takes over the inherited descriptor ``fd``. Raises OSError if it is no such socket."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, fileno=fd)
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) != socket.SOCK_SEQPACKET:
            sock.detach()
            raise OSError(f"file descriptor {fd} is not a SOCK_SEQPACKET socket")
        sock.set_inheritable(False)
        return cls(sock)

    def fileno(self) -> int:
        """The socket's descriptor, -1 once closed."""
        return self._sock.fileno()

    def settimeout(self, timeout_s: float | None) -> None:
        """Bounds every later send and receive; None waits for ever."""
        self._sock.settimeout(timeout_s)

    def detach(self) -> None:
        """Forgets the descriptor without closing it; ``fileno`` is -1 from now on."""
        self._sock.detach()

    def close(self) -> None:
        """Closes this end; the peer then receives ChannelClosed."""
        self._sock.close()

    def send(self, said: Message) -> None:
        """Sends a message, with copies of its descriptors.

        Raises ChannelClosed if the peer is gone, TimeoutError if it does not read in time, and ValueError for a body
        of more than BODY_BYTES_MAX or more than FDS_MAX descriptors.
        """
        fds = said.fds
        if len(fds) > FDS_MAX:
            raise ValueError(f"a message with {len(fds)} descriptors exceeds the limit of {FDS_MAX}")
        body = json.dumps(said.message()).encode()
        if len(body) <= INLINE_BYTES_MAX:
            self._send_packet(_INLINE + body, fds)
            return
        file = os.memfd_create("unicron-message", os.MFD_CLOEXEC)
        try:
            _write_all(file, body)
            self._send_packet(_IN_FILE, [file, *fds])
        finally:
            os.close(file)

    def receive(self) -> tuple[dict[str, Any], list[int]]:
        """The next message as it was sent and its descriptors, which the caller then owns (they are not inheritable).

        Raises ChannelClosed at the end, TimeoutError or BlockingIOError when nothing is there in time, and
        ValueError for what is not a message (the message is dropped, the channel stays usable).
        """
        packet, fds = self._receive_packet()
        try:
            if packet[:1] == _IN_FILE and fds:
                body = _read_all(fds[0])
                os.close(fds.pop(0))
            else:
                body = packet[1:]
            message = json.loads(body)
            if not isinstance(message, dict):
                raise ValueError(f"a message must be an object, got {type(message).__name__}")
        except (ValueError, OSError, RecursionError) as error:
            close_all(fds)
            raise ValueError(f"not a message: {error}") from None
        return message, fds

    def hear(self, kinds: Sequence[type[Kind]]) -> Kind | Odd:
        """Returns the next message, which is `Odd` if it is none of these ``kinds``.

        Its descriptors are the caller's, and are not inheritable. Raises as ``receive``, but for ValueError.
        """
        try:
            body, fds = self.receive()
        except ValueError as error:
            return Odd(str(error))
        said = heard(body, kinds, fds)
        if not said.fds:
            close_all(fds)
        return said

    def _send_packet(self, packet: bytes, fds: Sequence[int]) -> None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._sock.sendmsg([packet], ancillary, socket.MSG_NOSIGNAL)
        except (BrokenPipeError, ConnectionResetError, ConnectionRefusedError) as error:
            raise ChannelClosed(str(error)) from None

    def _receive_packet(self) -> tuple[bytes, list[int]]:
        space = socket.CMSG_SPACE((FDS_MAX + 1) * array.array("i").itemsize)  # and the file of a large body
        try:
            try:
                received = self._sock.recvmsg(INLINE_BYTES_MAX + 1, space, socket.MSG_CMSG_CLOEXEC)
            except ConnectionResetError:
                # The peer closed its end before it had read all that was sent to it. Linux says so first, once, and
                # keeps what the peer has said: the exception that it ended with, say.
                received = self._sock.recvmsg(INLINE_BYTES_MAX + 1, space, socket.MSG_CMSG_CLOEXEC)
        except (ConnectionResetError, BrokenPipeError) as error:
            raise ChannelClosed(str(error)) from None
        packet, ancillary, flags, _ = received
        fds: list[int] = []
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
                fds.extend(numbers)
        if not packet:
            close_all(fds)
            raise ChannelClosed("the other end was closed")
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            close_all(fds)
            raise ValueError("not a message: it does not fit")
        return packet, fds


def close_all(fds: Sequence[int]) -> None:
    """Closes descriptors, whatever state they are in."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def _write_all(fd: int, body: bytes) -> None:
    if len(body) > BODY_BYTES_MAX:
        raise ValueError(f"a message of {len(body)} bytes exceeds the limit of {BODY_BYTES_MAX}")
    view = memoryview(body)
    while view:
        view = view[os.write(fd, view) :]


def _read_all(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    if size > BODY_BYTES_MAX:
        raise ValueError(f"a message of {size} bytes exceeds the limit of {BODY_BYTES_MAX}")
    return os.pread(fd, size, 0)
