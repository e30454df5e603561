"""What goes over a connection for state: frames of JSON with their length, and the proof of who is there.

Both sides prove that they know the key, by an HMAC over what both threw in at random, before anything else is said.
From then on each frame has a seal behind it (``unicron_elastic.base.seal``), as a frame has effects: a state is held,
memory is made. The bytes of tensors have a checksum and no seal. A frame is bounded by what may come at that
point. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import select
import socket
import time
from collections.abc import Mapping
from typing import Any

from unicron_elastic.base.seal import SEAL_BYTES, Seal
from unicron_elastic.base.text import one_line

FRAME_BYTES_MAX = 16 * 1024
LAYOUT_BYTES_MAX = 65 * 1024 * 1024
VERSION = 2
_NONCE_CHARACTERS = 64
_KEEPALIVE = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 4}


class PullWireError(ValueError):
    """The other side says what no peer says; the text says what, without a full stop."""


class Gone(ConnectionError):
    """The connection has ended; the text says how, without a full stop."""


class Stream:
    """A connected socket. ``patience_s``: how long one read or write may bring nothing."""

    def __init__(self, connection: socket.socket, patience_s: float) -> None:
        self.socket = connection
        self.patience_s = patience_s
        self.seal: Seal | None = None  # of the frames, once both sides have proven who they are
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():  # a host that lost its power ends the connection, and so its hold
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def close(self) -> None:
        """Ends the connection, also for other threads that use it.

        The file descriptor lives as long as this object: closed under another thread, its number could come to mean
        another file.
        """
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has ended already

    def end(self, timeout_s: float) -> None:
        """Says that nothing more comes, and waits for the other side to end the connection, up to ``timeout_s``."""
        until = time.monotonic() + timeout_s
        try:
            self.socket.shutdown(socket.SHUT_WR)
            rest = memoryview(bytearray(4096))
            while True:
                self.try_receive(rest)
                self.wait(select.POLLIN, until)
        except OSError:
            pass
        self.close()

    def __del__(self) -> None:
        self.socket.close()

    def wait(self, event: int, until: float | None) -> None:
        """Waits until the socket is ready; ``until``: monotonic seconds, None for ever. Raises Gone."""
        poll = select.poll()
        try:
            poll.register(self.socket, event)
        except (OSError, ValueError) as error:
            raise Gone("it was closed") from error
        left_ms = None if until is None else max(0.0, until - time.monotonic()) * 1000
        if not poll.poll(left_ms):
            raise Gone(f"it was silent for {self.patience_s:g} s")

    def wait_to_send(self) -> None:
        """Waits until something can be sent. Raises Gone."""
        self.wait(select.POLLOUT, time.monotonic() + self.patience_s)

    def receive_into(self, view: memoryview) -> None:
        """Fills ``view``. Raises Gone."""
        done = 0
        while done < len(view):
            done += self.receive_some(view[done:])

    def receive_some(self, view: memoryview) -> int:
        """Receives 1 byte at least. Raises Gone."""
        until = time.monotonic() + self.patience_s
        while True:
            got = self.try_receive(view)
            if got:
                return got
            self.wait(select.POLLIN, until)

    def try_receive(self, view: memoryview) -> int:
        """Receives what is there, 0 bytes if nothing is. Raises Gone."""
        try:
            got = self.socket.recv_into(view)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise Gone(error.strerror or str(error)) from error
        if not got:
            raise Gone("it has ended")
        return got

    def send(self, data: memoryview | bytes) -> None:
        """Sends all of ``data``. Raises Gone."""
        view = memoryview(data)
        while view:
            try:
                view = view[self.socket.send(view) :]
            except (BlockingIOError, InterruptedError):
                self.wait(select.POLLOUT, time.monotonic() + self.patience_s)
            except OSError as error:
                raise Gone(error.strerror or str(error)) from error

    def send_frame(self, told: Mapping[str, Any]) -> None:
        """Sends one JSON object. Raises Gone."""
        text = json.dumps(told, separators=(",", ":")).encode()
        self.send(len(text).to_bytes(4, "big") + text + (b"" if self.seal is None else self.seal.of(text)))

    def receive_frame(self, bytes_max: int = FRAME_BYTES_MAX, *, is_idle: bool = False) -> dict[str, Any]:
        """Receives one JSON object; ``is_idle``: it may be long in coming. Raises Gone, PullWireError."""
        if is_idle:
            self.wait(select.POLLIN, None)
        head = bytearray(4)
        self.receive_into(memoryview(head))
        size = int.from_bytes(head, "big")
        if size > bytes_max:
            raise PullWireError(f"a frame of {size} bytes where at most {bytes_max} may come")
        body = bytearray(size + (SEAL_BYTES if self.seal is not None else 0))
        self.receive_into(memoryview(body))
        if self.seal is not None and not self.seal.fits(body[:size], body[size:]):
            raise PullWireError("a frame that the other side has not sent at this point")
        return read(bytes(body[:size]))


def read(body: bytes) -> dict[str, Any]:
    """The JSON object in a frame. Raises PullWireError."""
    try:
        told = json.loads(body)
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict):
        raise PullWireError("a frame that is no JSON object")
    return told


def greet_client(stream: Stream, key: bytes) -> None:
    """Lets in a client that knows the key, and proves that we know it. Raises PullWireError, Gone."""
    own = secrets.token_hex(16)
    stream.send_frame({"version": VERSION, "nonce": own})
    told = stream.receive_frame(1024)
    nonce = text(told, "nonce", _NONCE_CHARACTERS)
    if not _is_same(_proof(key, "client", own, nonce), text(told, "proof", _NONCE_CHARACTERS)):
        stream.send_frame({"refused": "the key of the state server is another one"})
        raise PullWireError("the other side does not know the key")
    stream.send_frame({"proof": _proof(key, "server", nonce, own)})
    stream.seal = Seal(key, own, nonce, is_server=True)


def greet_server(stream: Stream, key: bytes) -> None:
    """Proves that we know the key to a server that knows it too. Raises PullWireError, Gone."""
    told = stream.receive_frame(1024)
    if told.get("version") != VERSION:
        raise PullWireError(f"a state server of another version than {VERSION}")
    own = secrets.token_hex(16)
    nonce = text(told, "nonce", _NONCE_CHARACTERS)
    stream.send_frame({"nonce": own, "proof": _proof(key, "client", nonce, own)})
    told = stream.receive_frame(1024)
    if "refused" in told:
        raise PullWireError(one_line(text(told, "refused", 500)))  # of somebody who has proven nothing
    if not _is_same(_proof(key, "server", own, nonce), text(told, "proof", _NONCE_CHARACTERS)):
        raise PullWireError("the state server does not know the key")
    stream.seal = Seal(key, nonce, own, is_server=False)


def text(told: Mapping[str, Any], name: str, characters_max: int) -> str:
    """A text of a frame. Raises PullWireError."""
    value = told.get(name)
    if not isinstance(value, str) or len(value) > characters_max:
        raise PullWireError(f"{name} is no text of at most {characters_max} characters")
    return value


def number(told: Mapping[str, Any], name: str, largest: int) -> int:
    """A number of a frame, from 0 to ``largest``. Raises PullWireError."""
    value = told.get(name)
    if type(value) is not int or not 0 <= value <= largest:
        raise PullWireError(f"{name} is no number from 0 to {largest}")
    return value


def _proof(key: bytes, *said: str) -> str:
    # As JSON, so that no two lists of texts make the same one.
    return hmac.new(key, json.dumps(said).encode(), hashlib.sha256).hexdigest()


def _is_same(expected: str, proof: str) -> bool:
    # As bytes, because of texts compare_digest takes ASCII alone.
    return hmac.compare_digest(expected.encode(), proof.encode(errors="surrogatepass"))
