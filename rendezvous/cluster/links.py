"""The connections of one agent: the port it listens on, links to or from others, and probes. One thread owns them.

A link beats in both directions, so that there always is something that the other kernel has to acknowledge: TCP then
breaks the link by itself once the other host is silent (``heartbeat_wire.GONE_AFTER_S``). No process has to answer in
time for that, so a busy one is not taken for a dead one.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from unicron_elastic.base.seal import Seal
from unicron_elastic.base.seldom import Seldom
from unicron_elastic.membership.coordination import Answer
from unicron_elastic.rendezvous.cluster.heartbeat_wire import (
    BEAT,
    LINE_BYTES_MAX,
    Hello,
    Lines,
    Nonces,
    WireError,
    challenge,
    listen,
    read,
    read_sealed,
    read_welcome,
    seal_of,
    sealed_line,
    watched,
    welcome,
)

PROBE_S = 0.2  # so long a host may take to answer, or three times as long as it took before
PROBE_S_MAX = 2.0
_PROBE_TRIES = 3  # at once: a single packet may get lost
_READ_BYTES = 65536
_WAITING = (errno.EINPROGRESS, errno.EWOULDBLOCK)
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_NONE_YET = Nonces("", "")
_Where = tuple[socket.AddressFamily, socket.SocketKind, int, Any]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLimits:
    """`LinkLimits` bound what the links of one agent take."""

    beat_s: float = 0.1
    beats_per_s: float = 1000  # of all links of one coordinator together
    greeting_s: float = 2.0  # so long a connection may take until both sides have proven who they are
    greetings: int = 256  # connections that have not proven anything yet
    out_bytes: int = 1024 * 1024  # that a link may wait to send


@dataclass(eq=False)
class _Link:
    """One connection."""

    sock: socket.socket
    comes_in: bool
    since: float
    node_id: str = ""
    job: str = ""
    nonces: Nonces = _NONE_YET
    seal: Seal | None = None  # once both sides have proven who they are
    is_connected: bool = True
    rtt_s: float = 0.0
    lines: Lines = field(default_factory=Lines)
    out: bytearray = field(default_factory=bytearray)

    @property
    def is_open(self) -> bool:
        """Whether both sides have proven who they are."""
        return self.seal is not None


@dataclass(eq=False)
class _Probe:
    node_id: str
    ends_at: float
    socks: list[socket.socket]


class Links:
    """All methods but ``wake`` belong to the thread that calls ``poll``."""

    def __init__(
        self,
        host: str,
        hello: Hello,
        *,
        on_opened: Callable[[str], None],
        on_lost: Callable[[str], None],
        on_probed: Callable[[str, Answer], None],
        on_message: Callable[[str, str, Mapping[str, Any]], None],
        limits: LinkLimits = LinkLimits(),
    ) -> None:
        """Listens on ``host``, "" for all addresses. Raises OSError.

        ``on_message`` gets who says it, of which job, and what.
        """
        self._hello = hello
        self._limits = limits
        self._on_opened, self._on_lost, self._on_probed, self._on_message = on_opened, on_lost, on_probed, on_message
        self._listener = listen(host)
        self._selector = selectors.DefaultSelector()
        self.port: int = self._listener.getsockname()[1]
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._woken, selectors.EVENT_READ, self._was_woken)
        self._links: set[_Link] = set()
        self._strangers: set[_Link] = set()  # of those that came in: who have not proven anything yet
        self._of_nodes: dict[str, _Link] = {}  # and the latest of each node that has
        self._probes: set[_Probe] = set()
        self._rtt_s: dict[str, float] = {}
        self._beat_at = 0.0
        self._beat_s = limits.beat_s  # as the coordinator wants it
        self.secret = ""  # of the cluster; "": not known yet, and nobody is let in
        self.leads = False
        self._closed = Seldom()  # of connections that are closed for what came over them: strangers may try for ever
        self._is_listening = True
        self._is_closed = False
        self._closing = threading.Lock()
        _all_links.add(self)

    def wake(self) -> None:
        """Makes ``poll`` return soon. From any thread, without effect after ``close``."""
        with self._closing, contextlib.suppress(OSError):
            if not self._is_closed:  # else the descriptor may be another one's by now
                os.write(self._wake, b"\0")

    def poll(self, timeout_s: float) -> None:
        """Does what there is to do, for about ``timeout_s`` seconds at most."""
        looked_at = time.monotonic()
        until = [looked_at + timeout_s, self._beat_at, *(probe.ends_at for probe in self._probes)]
        for key, _ in self._selector.select(max(0.0, min(until) - looked_at)):
            key.data()
        now = time.monotonic()
        if now >= self._beat_at:
            self._beat(now)
        # By the time of the look: on a loaded machine an answer may have come, in time, since.
        for probe in [probe for probe in self._probes if looked_at >= probe.ends_at]:
            self._end_probe(probe, Answer.SILENT)

    def connect(self, node_id: str, address: str) -> None:
        """Opens the link to the coordinator, unless one is about to open; a former one goes without a word."""
        former = [link for link in self._links if not link.comes_in]
        if any(link.node_id == node_id and link.is_connected and not link.is_open for link in former):
            return  # limits.greeting_s bounds it
        for link in former:
            self._close(link)
        try:
            sock, failure = _begin_connection(_find(address))
        except OSError as error:
            logger.debug("%s: %s", address, error)
            self._on_lost(node_id)
            return
        if failure:
            sock.close()
            self._on_lost(node_id)
            return
        link = _Link(sock, comes_in=False, since=time.monotonic(), node_id=node_id, is_connected=False)
        self._links.add(link)
        self._selector.register(sock, selectors.EVENT_WRITE | selectors.EVENT_READ, lambda: self._ready(link))

    def probe(self, node_id: str, address: str) -> None:
        """Asks whether somebody listens at ``address``. Who could not be asked counts as one who answers."""
        try:
            where = _find(address)  # which may take seconds
        except OSError as error:
            logger.debug("%s: %s", address, error)
            self._on_probed(node_id, Answer.ANSWERS)
            return
        wait_s = min(max(PROBE_S, 3 * self._rtt_s.get(node_id, 0.0)), PROBE_S_MAX)
        probe = _Probe(node_id, time.monotonic() + wait_s, [])
        self._probes.add(probe)
        for _ in range(_PROBE_TRIES):
            try:
                sock, failure = _begin_connection(where)
            except OSError as error:
                logger.debug("%s: %s", address, error)
                if not probe.socks:
                    self._end_probe(probe, Answer.ANSWERS)
                return
            probe.socks.append(sock)
            self._selector.register(sock, selectors.EVENT_WRITE, lambda: self._probe_ready(probe))
            if failure == errno.ECONNREFUSED:
                self._end_probe(probe, Answer.REFUSED)
                return

    def tell_coordinator(self, told: Mapping[str, Any]) -> bool:
        """Whether there is a link to say it on."""
        up = [link for link in self._links if link.is_open and not link.comes_in]
        for link in up:
            self._tell(link, told)
        return bool(up)

    def tell_nodes(self, job: str, told: Mapping[str, Any], but: str = "") -> None:
        """Tells all nodes of a job, but one."""
        for link in [link for link in self._links if link.is_open and link.comes_in]:
            if link.job == job and link.node_id != but:
                self._tell(link, told)

    def drop(self) -> None:
        """Ends all links: this agent leads no longer, or the leader is another one."""
        for link in list(self._links):
            self._close(link)

    def close(self) -> None:
        """Ends everything. May come twice."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
        _all_links.discard(self)
        self.drop()
        for probe in list(self._probes):
            self._forget_probe(probe)
        self._selector.close()
        self._listener.close()
        os.close(self._woken)
        os.close(self._wake)

    def close_in_child(self) -> None:
        """After a fork: a copy would hold connections open when this agent has long ended.

        The selector's own list is shared with the parent, so nothing is unregistered.
        """
        self._is_closed = True
        self._closing = threading.Lock()
        for each in [link.sock for link in self._links] + [sock for probe in self._probes for sock in probe.socks]:
            each.close()
        self._selector.close()
        self._listener.close()
        os.close(self._woken)
        os.close(self._wake)

    # -- links -------------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _NO_ROOM:  # it would be ready again at once, and for ever
                self._selector.unregister(self._listener)
                self._is_listening = False
            return
        sock.setblocking(False)
        if not (self.leads and self.secret):
            sock.close()  # that it was accepted is the answer to a probe
            return
        if len(self._strangers) >= self._limits.greetings:
            self._close(min(self._strangers, key=lambda link: link.since))  # strangers keep no agent out by silence
        watched(sock)
        link = _Link(sock, comes_in=True, since=time.monotonic())
        self._links.add(link)
        self._strangers.add(link)
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._ready(link))
        said, nonce = challenge()
        link.nonces = Nonces(nonce, "")
        self._send(link, said)

    def _ready(self, link: _Link) -> None:
        if link not in self._links:
            return  # closed by what came before it
        if not link.is_connected:
            if link.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self._lose(link)
                return
            link.is_connected, link.rtt_s = True, time.monotonic() - link.since
            watched(link.sock)
            self._selector.modify(link.sock, selectors.EVENT_READ, lambda: self._ready(link))
        self._flush(link)
        try:
            data = link.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose(link)
            return
        try:
            for text in link.lines.take(data):
                self._said(link, text)
        except WireError as error:
            if link in self._links:
                self._tell_closed(error)
                self._lose(link)

    def _tell_closed(self, why: WireError) -> None:
        if line := self._closed.line(f"A heartbeat connection is closed: {why}."):
            logger.warning("%s", line)

    def _said(self, link: _Link, text: bytes) -> None:
        if link.seal is not None:
            self._on_message(link.node_id, link.job, read_sealed(text, link.seal))
            return
        told = read(text)
        if link.comes_in:
            self._greeted(link, told)
        elif "nonce" in told:
            said, link.nonces = self._hello.line(self.secret, told)
            self._send(link, said)
        else:
            self._beat_s = read_welcome(told, self.secret, link.nonces)
            self._open(link)

    def _greeted(self, link: _Link, told: Mapping[str, Any]) -> None:
        hello, link.nonces = Hello.parse(told, self.secret, link.nonces.coordinator)
        link.node_id, link.job, link.rtt_s = hello.node_id, hello.job, time.monotonic() - link.since
        if (old := self._of_nodes.get(link.node_id)) is not None:
            self._close(old)
        self._strangers.discard(link)
        self._of_nodes[link.node_id] = link
        self._send(link, welcome(self.secret, link.nonces, self._interval_s()))
        self._open(link)

    def _open(self, link: _Link) -> None:
        link.seal = seal_of(self.secret, link.nonces, is_coordinator=link.comes_in)
        self._rtt_s[link.node_id] = link.rtt_s
        self._on_opened(link.node_id)

    def _tell(self, link: _Link, told: Mapping[str, Any]) -> None:
        """Says something that has effects, if there is room: what is sealed has to be sent, as seals are numbered."""
        if link.seal is not None and len(link.out) <= self._limits.out_bytes - LINE_BYTES_MAX:
            self._send(link, sealed_line(told, link.seal))

    def _send(self, link: _Link, data: bytes) -> None:
        if len(link.out) + len(data) > self._limits.out_bytes:
            return  # the other process does not read; its lease will tell
        link.out += data
        self._flush(link)

    def _flush(self, link: _Link) -> None:
        """Sends what goes; a broken connection is noticed when it is read."""
        if link.is_connected and link.out:
            with contextlib.suppress(OSError):
                del link.out[: link.sock.send(link.out)]

    def _beat(self, now: float) -> None:
        if not self._is_listening:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            self._is_listening = True
        for link in list(self._links):
            if link.is_open and not link.out:
                link.out += BEAT
            self._flush(link)
            if not link.is_open and now - link.since > self._limits.greeting_s:
                self._lose(link)
        self._beat_at = now + (self._interval_s() if self.leads else self._beat_s)

    def _interval_s(self) -> float:
        return max(self._limits.beat_s, len(self._links) / self._limits.beats_per_s)

    def _lose(self, link: _Link) -> None:
        if link not in self._links:
            return
        told = link.is_open or not link.comes_in
        self._close(link)
        if told:
            self._on_lost(link.node_id)

    def _close(self, link: _Link) -> None:
        if link not in self._links:
            return
        self._links.remove(link)
        self._strangers.discard(link)
        if self._of_nodes.get(link.node_id) is link:
            del self._of_nodes[link.node_id]
        self._selector.unregister(link.sock)
        link.sock.close()

    # -- probes ------------------------------------------------------------------------------------------------------

    def _probe_ready(self, probe: _Probe) -> None:
        if probe not in self._probes:
            return
        for sock in probe.socks:
            failure = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if failure == errno.ECONNREFUSED:
                self._end_probe(probe, Answer.REFUSED)
                return
            if failure == 0 and _is_connected(sock):
                self._end_probe(probe, Answer.ANSWERS)
                return
            if failure:
                self._selector.unregister(sock)
                probe.socks.remove(sock)
                sock.close()
                return  # called again for the others

    def _end_probe(self, probe: _Probe, answer: Answer) -> None:
        self._forget_probe(probe)
        self._on_probed(probe.node_id, answer)

    def _forget_probe(self, probe: _Probe) -> None:
        self._probes.discard(probe)
        for sock in probe.socks:
            self._selector.unregister(sock)
            sock.close()

    def _was_woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 4096)


def _find(address: str) -> _Where:
    """What HOST:PORT stands for. Raises OSError."""
    host, _, port = address.rpartition(":")
    try:
        if not 0 < int(port) < 65536:
            raise ValueError("no port")
        family, kind, proto, _, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
    except ValueError as error:
        raise OSError(errno.EADDRNOTAVAIL, str(error)) from None
    return family, kind, proto, where


def _begin_connection(where: _Where) -> tuple[socket.socket, int]:
    """A connection that is being made, and why it cannot be; 0: not known yet. Raises OSError if there is no room."""
    sock = socket.socket(*where[:3])
    sock.setblocking(False)
    failure = sock.connect_ex(where[3])
    return sock, 0 if failure in _WAITING else failure


def _is_connected(sock: socket.socket) -> bool:
    try:
        sock.getpeername()
    except OSError:
        return False
    return True


def _close_all_in_child() -> None:
    for each in list(_all_links):
        each.close_in_child()
    _all_links.clear()


_all_links: weakref.WeakSet[Links] = weakref.WeakSet()
os.register_at_fork(after_in_child=_close_all_in_child)
