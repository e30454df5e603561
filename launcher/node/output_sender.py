"""What a child of an agent writes, sent to where somebody looks at it, or written here while nobody can be reached.

``output_receiver`` says what goes over the connection. What is sent is kept until the other side has written it; when
the connection breaks, that is written here, and so nothing is lost. Some of it may then have been shown there as well.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import select
import socket
import struct
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

from unicron_elastic.base.seal import SEAL_BYTES, Seal
from unicron_elastic.launcher.node.output_receiver import (
    COUNT,
    END,
    FRAME_BYTES_MAX,
    HEADER,
    STREAMS,
    WINDOW_BYTES,
    Sink,
    key_for_output,
    watched,
)
from unicron_elastic.rendezvous.cluster.heartbeat_wire import (
    LINE_BYTES_MAX,
    Hello,
    WireError,
    read,
    read_welcome,
    seal_of,
)

STALL_S = 10.0  # so long the child may be held up by who does not even beat
RETRY_S = 3.0
RETRY_FOR_S = 600.0

_STILL_S = 0.05  # after which what is no whole line is shown
_HELD_S = 0.2  # even if it goes on, as a progress bar does
_INT = struct.Struct("i")


@dataclass(eq=False)
class _Stream:
    """One of the child's pipes."""

    number: int
    fd: int
    is_open: bool = True
    held: bytearray = field(default_factory=bytearray)  # the beginning of a line
    began_at: float = 0.0  # of what is held
    touched_at: float = 0.0
    left: int | None = None  # bytes to be read yet, once the child has ended


@dataclass(eq=False)
class _Link:
    """A connection on which both sides have proven who they are."""

    sock: socket.socket
    address: str
    seal: Seal
    data: bytearray  # what makes no whole count yet
    heard_at: float
    waits_since: float = 0.0  # for an answer
    has_ended: bool = False
    out: bytearray = field(default_factory=bytearray)
    unwritten: deque[tuple[int, bytes]] = field(default_factory=deque)  # sent or to be sent; the stream and what
    unwritten_bytes: int = 0
    written: int = 0

    def add(self, stream: int, data: bytes) -> None:
        if not self.unwritten:
            self.waits_since = time.monotonic()
        self.unwritten.append((stream, data))
        self.unwritten_bytes += len(data)
        self._add_frame(HEADER.pack(stream, len(data)) + data)

    def add_end(self) -> None:
        self.waits_since = time.monotonic()
        self.has_ended = True
        self._add_frame(HEADER.pack(END, 0))

    def _add_frame(self, frame: bytes) -> None:
        self.out += frame
        self.out += self.seal.of(frame)

    def send(self) -> None:
        """Sends what goes. Raises OSError."""
        with contextlib.suppress(BlockingIOError):
            while self.out:
                del self.out[: self.sock.send(self.out)]

    def hear(self) -> bool:
        """Takes what was said; False at its end. Raises OSError and WireError."""
        try:
            data = self.sock.recv(4096)
        except BlockingIOError:
            return True
        self.heard_at = time.monotonic()
        self.data += data
        while len(self.data) >= COUNT.size + SEAL_BYTES:
            count = bytes(self.data[: COUNT.size])
            if not self.seal.fits(count, self.data[COUNT.size : COUNT.size + SEAL_BYTES]):
                raise WireError("a count that the other side has not sent at this point")
            self._count(COUNT.unpack(count)[0])
            del self.data[: COUNT.size + SEAL_BYTES]
        return bool(data)

    def silent_at(self, stall_s: float) -> float:
        """When to stop waiting for an answer, if none comes before."""
        waits = self.unwritten or self.has_ended
        return max(self.heard_at, self.waits_since) + stall_s if waits else math.inf

    def _count(self, written: int) -> None:
        if not self.written <= written <= self.written + self.unwritten_bytes:
            raise WireError("it says that it has written what nobody sent")
        while self.unwritten and self.written + len(self.unwritten[0][1]) <= written:
            _, data = self.unwritten.popleft()
            self.written += len(data)
            self.unwritten_bytes -= len(data)


class OutputSender:
    """Reads and sends in a thread of its own, until both pipes have ended or ``finish``. Methods are for any thread."""

    def __init__(
        self,
        address: str,
        secret: str,
        host: str,
        stdout_fd: int,
        stderr_fd: int,
        *,
        say: Callable[[str], None],
        stall_s: float = STALL_S,
        retry_s: float = RETRY_S,
        retry_for_s: float = RETRY_FOR_S,
        stdout: BinaryIO | None = None,
        stderr: BinaryIO | None = None,
    ) -> None:
        """``address``: HOST:PORT of an OutputReceiver, "" for none; ``host``: the name of this host.

        The descriptors are the reading ends of the child's pipes; they are duplicated, so the caller closes its own.
        ``say`` hears, from the thread, why the output is not sent: once for each address. It then goes to ``stdout``
        and ``stderr``, by default this process's own. Raises OSError if there is no room for more descriptors.
        """
        self._address, self._secret, self._host, self._say = address, secret, host, say
        self._stall_s, self._retry_s, self._retry_for_s = stall_s, retry_s, retry_for_s
        fds = (stdout_fd, stderr_fd)
        self._streams = [_Stream(number, os.dup(fd)) for number, fd in zip(STREAMS, fds, strict=True)]
        files = (stdout or sys.stdout.buffer, stderr or sys.stderr.buffer)
        self._sinks = dict(zip(STREAMS, map(Sink, files), strict=True))
        self._woken, self._wake_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._link: _Link | None = None
        self._next: _Link | None = None  # to the address that was set last, while the former one is still needed
        self._leave_by = math.inf
        self._attempt: _Attempt | None = None
        now = time.monotonic()
        self._patience_until = now + stall_s  # so long nothing is read before the first attempt has an outcome
        self._retry_at, self._retry_until = now, now + retry_for_s
        self._finish_at = math.inf
        self._has_said = False
        self._wanted: str | None = None  # an address that was set and is not looked at yet
        self._lock = threading.RLock()  # a signal's handler may call while its thread calls
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="unicron-output-sender", daemon=True)
        self._thread.start()

    def set_address(self, address: str) -> None:
        """Sends to this address from now on, "" for none; what the former one has got already, it shows."""
        with self._lock:
            self._wanted = address
        self._wake()

    def finish(self, grace_s: float) -> None:
        """The child has ended: what else has its pipes may write for ``grace_s`` more. Does not wait."""
        self._finish_at = min(self._finish_at, time.monotonic() + grace_s)
        self._wake()

    def join(self, timeout_s: float) -> bool:
        """Whether all has been read and written, here or there, within ``timeout_s`` seconds."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _wake(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):
            if not self._is_over:  # else the descriptor may be another one's by now
                os.write(self._wake_fd, b"\0")

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._is_needed():
            self._turn()
        with self._lock:
            self._is_over = True
        self._forget_attempts()
        for stream in self._streams:
            self._close(stream)
        for sink in self._sinks.values():
            sink.close()
        os.close(self._woken)
        os.close(self._wake_fd)

    def _is_needed(self) -> bool:
        return self._link is not None or any(stream.is_open for stream in self._streams)

    def _turn(self) -> None:
        now = time.monotonic()
        self._take_address(now)
        self._connect(now)
        self._settle(now)
        reading = [stream for stream in self._streams if stream.is_open and self._has_room(stream, now)]
        for stream in self._streams:
            if stream not in reading:  # that nothing came is not the child's doing
                stream.began_at = stream.touched_at = now
        ready = self._wait(reading, now)
        looked_at = time.monotonic()
        for stream in reading:
            if stream.fd in ready:
                self._read(stream)
        self._show_still(reading, time.monotonic())
        self._finish(time.monotonic())
        self._speak(ready, looked_at)

    def _wait(self, reading: list[_Stream], now: float) -> set[int]:
        """The descriptors on which something has happened."""
        waiting = select.poll()
        waiting.register(self._woken, select.POLLIN)
        for stream in reading:
            waiting.register(stream.fd, select.POLLIN)
        if self._link is not None:
            waiting.register(self._link.sock, select.POLLIN | (select.POLLOUT if self._link.out else 0))
        until = min(self._deadlines(reading, now))
        ready = {fd for fd, _ in waiting.poll(None if until == math.inf else max(0, math.ceil((until - now) * 1000)))}
        if self._woken in ready:
            os.read(self._woken, 4096)
        return ready

    def _deadlines(self, reading: list[_Stream], now: float) -> Iterator[float]:
        yield math.inf
        yield from (_show_at(stream) for stream in reading if stream.held)
        if any(stream.is_open and stream.left is None for stream in self._streams):
            yield self._finish_at
        if self._link is not None:
            yield self._link.silent_at(self._stall_s)
            yield self._leave_by
        if self._is_holding(now):
            yield self._patience_until
        if self._attempt is None and self._wants_connection() and self._retry_at <= self._retry_until:
            yield self._retry_at

    # -- the child's output --------------------------------------------------------------------------------------------

    def _has_room(self, stream: _Stream, now: float) -> bool:
        if self._link is None:
            return not self._is_holding(now)
        if self._is_leaving():
            return False
        ahead = self._link.unwritten_bytes + sum(len(each.held) for each in self._streams)
        return ahead + FRAME_BYTES_MAX - len(stream.held) <= WINDOW_BYTES

    def _is_holding(self, now: float) -> bool:
        return self._link is None and self._attempt is not None and now < self._patience_until

    def _read(self, stream: _Stream) -> None:
        size = FRAME_BYTES_MAX - len(stream.held)
        try:
            data = os.read(stream.fd, size if stream.left is None else min(size, stream.left))
        except BlockingIOError:
            return
        except OSError:  # a terminal's way to end
            data = b""
        stream.touched_at = time.monotonic()
        if not stream.held:
            stream.began_at = stream.touched_at
        stream.held += data
        is_full = len(stream.held) == FRAME_BYTES_MAX
        self._show(stream, stream.held.rfind(b"\n") + 1 or (FRAME_BYTES_MAX if is_full else 0))
        if stream.left is not None:
            stream.left -= len(data)
        if not data or stream.left == 0:
            self._end(stream)

    def _show_still(self, reading: list[_Stream], now: float) -> None:
        for stream in reading:
            if stream.held and now >= _show_at(stream):
                self._show(stream, len(stream.held))

    def _show(self, stream: _Stream, count: int) -> None:
        """The first bytes of what is held."""
        if count:
            self._put(stream.number, bytes(memoryview(stream.held)[:count]))
            del stream.held[:count]
            stream.began_at = stream.touched_at

    def _put(self, number: int, data: bytes) -> None:
        if self._link is None:
            if not self._address:
                self._tell("nobody has asked for it")
            self._sinks[number].write(data)
        else:
            self._link.add(number, data)

    def _finish(self, now: float) -> None:
        """Read what is in a pipe from then on, and nothing that comes after."""
        if now < self._finish_at:
            return
        for stream in self._streams:
            if stream.is_open and stream.left is None:
                stream.left = _waiting_bytes(stream.fd)
                if not stream.left:
                    self._end(stream)

    def _end(self, stream: _Stream) -> None:
        self._show(stream, len(stream.held))
        self._close(stream)

    @staticmethod
    def _close(stream: _Stream) -> None:
        if stream.is_open:
            stream.is_open = False
            os.close(stream.fd)

    # -- the connection ------------------------------------------------------------------------------------------------

    def _speak(self, ready: set[int], looked_at: float) -> None:
        """Sends and hears, and ends the connection if all is said or nobody was there at ``looked_at``."""
        link = self._link
        if link is None:
            return
        if not link.has_ended and not any(stream.is_open for stream in self._streams):
            link.add_end()
        try:
            link.send()
            if link.sock.fileno() in ready and not link.hear():
                self._lose(link, "the connection has ended")
                return
        except (OSError, WireError) as error:
            self._lose(link, _reason(error))
            return
        # By the time of the look: if this process was stopped since, there may be an answer.
        if looked_at >= link.silent_at(self._stall_s):
            self._lose(link, f"nobody has answered there for {self._stall_s:g} s")
        elif looked_at >= self._leave_by:
            self._lose(link, "what it was sent was not shown")

    def _lose(self, link: _Link, reason: str) -> None:
        """What is not known to be written goes to the next one, or stays here."""
        link.sock.close()
        self._link, self._next = self._next, None
        self._leave_by = math.inf
        now = time.monotonic()
        self._retry_at, self._retry_until = now + self._retry_s, now + self._retry_for_s
        if link.unwritten or not link.has_ended:
            self._tell(reason)
        for number, data in link.unwritten:
            self._put(number, data)

    def _take_address(self, now: float) -> None:
        with self._lock:
            wanted, self._wanted = self._wanted, None
        if wanted is None:
            return
        self._forget_attempts()
        self._address, self._has_said = wanted, False
        self._retry_at, self._retry_until = now, now + self._retry_for_s

    def _forget_attempts(self) -> None:
        if self._attempt is not None:
            self._attempt.forget()
        if self._next is not None:
            self._next.sock.close()
        self._attempt = self._next = None

    def _wants_connection(self) -> bool:
        if not self._address or self._next is not None or not any(stream.is_open for stream in self._streams):
            return False
        return self._link is None or self._link.address != self._address

    def _connect(self, now: float) -> None:
        """Begins an attempt if one is due, and takes up what came of it."""
        if self._attempt is None:
            if self._wants_connection() and self._retry_at <= min(now, self._retry_until):
                self._attempt = _Attempt(self._address, self._secret, self._host, self._stall_s, self._wake)
            return
        link, failure = self._attempt.outcome()
        if link is None and not failure:
            if 0.0 < self._patience_until <= now:
                self._patience_until = 0.0
                self._tell("no connection has come about yet")
            return
        self._attempt, self._next = None, link
        if failure:
            self._patience_until = 0.0
            self._retry_at = now + self._retry_s
            if self._link is None:
                self._tell(failure)

    def _is_leaving(self) -> bool:
        return self._link is not None and (self._next is not None or not self._address)

    def _settle(self, now: float) -> None:
        """Goes over to the next connection, as soon as what the former one got is written."""
        self._leave_by = min(self._leave_by, now + self._stall_s) if self._is_leaving() else math.inf
        if self._link is not None and self._is_leaving() and not self._link.unwritten:
            _part(self._link)
            self._link = None
        if self._link is None:
            self._link, self._next = self._next, None
            self._leave_by = math.inf

    def _tell(self, reason: str) -> None:
        if self._has_said or self._link is not None:
            return
        self._has_said = True
        where = f"cannot be sent to {self._address}, and " if self._address else ""
        self._say(f"The output {where}is shown here: {reason}.")


class _Attempt:
    """A connection that is being made, in a thread of its own: to find a name may take long."""

    def __init__(self, address: str, secret: str, host: str, timeout_s: float, wake: Callable[[], None]) -> None:
        self._given = (address, secret, host, timeout_s)
        self._wake = wake
        self._lock = threading.Lock()
        self._link: _Link | None = None
        self._failure = ""
        self._is_forgotten = False
        threading.Thread(target=self._run, name="unicron-output-connect", daemon=True).start()

    def outcome(self) -> tuple[_Link | None, str]:
        """The connection, or why there is none; neither as long as that is not known."""
        with self._lock:
            return self._link, self._failure

    def forget(self) -> None:
        """Nobody wants it any longer."""
        with self._lock:
            self._is_forgotten = True
            if self._link is not None:
                self._link.sock.close()

    def _run(self) -> None:
        link, failure = None, ""
        try:
            link = _connected(*self._given)
        except (OSError, ValueError) as error:  # ValueError: of a name that can be none, and WireError
            failure = _reason(error)
        with self._lock:
            if self._is_forgotten and link is not None:
                link.sock.close()
            self._link, self._failure = link, failure
        self._wake()


def _connected(address: str, secret: str, host: str, timeout_s: float) -> _Link:
    """A connection to who knows the secret. Raises OSError and ValueError."""
    key = key_for_output(secret)
    name, _, port = address.rpartition(":")
    if not name or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is no HOST:PORT")
    sock = socket.create_connection((name.strip("[]"), int(port)), timeout_s)
    try:
        watched(sock, timeout_s)
        rest, seal = _greet(sock, key, host, time.monotonic() + timeout_s)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return _Link(sock, address, seal, rest, time.monotonic())


def _greet(sock: socket.socket, key: str, host: str, until: float) -> tuple[bytearray, Seal]:
    """Proves who is here, and has the other side prove it; what it said after that, and the connection's seal."""
    rest = bytearray()
    challenged = read(_line(sock, rest, until))
    said, nonces = Hello("output", host, "").line(key, challenged)
    sock.sendall(said)
    read_welcome(read(_line(sock, rest, until)), key, nonces)
    return rest, seal_of(key, nonces, is_coordinator=False)


def _line(sock: socket.socket, rest: bytearray, until: float) -> bytes:
    """The next line; what came after it is in ``rest``. Raises OSError and WireError."""
    while (end := rest.find(b"\n")) < 0:
        sock.settimeout(max(0.001, until - time.monotonic()))
        data = sock.recv(4096)
        if not data:
            raise WireError("the two do not know the same secret, or somebody else listens there")
        rest += data
        if len(rest) > LINE_BYTES_MAX:
            raise WireError(f"a line of more than {LINE_BYTES_MAX} bytes")
    text = bytes(rest[:end])
    del rest[: end + 1]
    return text


def _part(link: _Link) -> None:
    """Ends a connection on which all was written. What was not read must not turn that into a reset."""
    with contextlib.suppress(OSError):
        if not link.has_ended:
            link.add_end()
            link.send()
        link.sock.shutdown(socket.SHUT_WR)
        link.sock.recv(65536)
    link.sock.close()


def _show_at(stream: _Stream) -> float:
    return min(stream.touched_at + _STILL_S, stream.began_at + _HELD_S)


def _waiting_bytes(fd: int) -> int:
    try:
        return int(_INT.unpack(fcntl.ioctl(fd, termios.FIONREAD, bytes(_INT.size)))[0])
    except OSError:
        return 0


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) and error.strerror else str(error)) or type(error).__name__
