"""Serves the state of this process to replicas that join."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from unicron_elastic.base.seldom import Seldom
from unicron_elastic.state.layout import Layout, check_tensors
from unicron_elastic.state.pull.distance import Address
from unicron_elastic.state.pull.serving import Serving
from unicron_elastic.state.pull.wire import FRAME_BYTES_MAX, Gone, PullWireError, Stream, greet_client

CONNECTIONS_MAX = 64
GREETING_S = 5.0
PATIENCE_S = 30.0  # for a client that does not read what it asked for

logger = logging.getLogger(__name__)


class NotAtRest(RuntimeError):
    """The state did not come to rest in time; the text says why, without a full stop."""


class Unsendable(NotAtRest):
    """The state is at rest, and cannot be sent."""


@dataclass(frozen=True)
class Held:
    """A state that does not change until it is released: live tensors, contiguous, in the order of the layout."""

    step: int
    layout: Layout
    tensors: list[torch.Tensor]


class Provider(Protocol):
    """Whose state is served. Called from threads of the server, also from several at the same time."""

    def hold(self) -> Held:
        """Blocks until the state is at rest, and keeps it so until ``release``. Raises NotAtRest."""

    def release(self, held: Held) -> None:
        """Ends one hold."""


def own_address(rack: str = "", kind: str = "replica", tcp: tuple[str, int] = ("", 0), unix: str = "") -> Address:
    """Where this process is."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Address(socket.gethostname(), boot_id, os.getpid(), tcp, unix, rack, kind)


class StateServer:
    """Serves in daemon threads, from the moment it is made until ``close``.

    ``host`` is the address that it listens on, and ``advertised`` what others are told instead of it. ``key`` is what
    clients have to know. ``address`` is what ``pull`` takes, of values that JSON has.
    Raises ValueError for an empty key, OSError if it cannot listen.
    """

    def __init__(
        self,
        provider: Provider,
        key: bytes,
        host: str = "127.0.0.1",
        *,
        advertised: str = "",
        rack: str = "",
        kind: str = "replica",
    ) -> None:
        if not key:
            raise ValueError("a state server needs a key of 1 byte at least, that clients know too")
        self._provider = provider
        self._key = key
        self._lock = threading.Lock()
        self._streams: dict[Stream, bool] = {}  # whether each has proven who it is; the oldest first
        self._closed = Seldom()  # of those that have proven nothing: strangers may try for ever
        self._is_closed = False
        name = f"unicron-state-{secrets.token_hex(8)}"
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._tcp = socket.create_server((host, 0), family=family, backlog=CONNECTIONS_MAX)
        self._unix = socket.socket(socket.AF_UNIX)
        self._unix.bind(f"\0{name}")
        self._unix.listen(CONNECTIONS_MAX)
        port = self._tcp.getsockname()[1]
        self.address = own_address(rack, kind, (advertised or host, port), name).to_dict()
        for listener in (self._tcp, self._unix):
            _start(self._accept, listener)

    def close(self) -> None:
        """Ends all connections, and with them all holds."""
        with self._lock:
            self._is_closed = True
            streams = list(self._streams)
        for listener in (self._tcp, self._unix):
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            listener.close()
        for stream in streams:
            stream.close()

    def _accept(self, listener: socket.socket) -> None:
        """Takes connections until the server is closed."""
        while not self._is_closed:
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if self._is_closed or listener.fileno() < 0:
                    return
                self._tell(f"The state server cannot take a connection: {error}.")
                threading.Event().wait(0.1)  # no more file descriptors, for one; do not spin
                continue
            self._admit(Stream(connection, GREETING_S))

    def _admit(self, stream: Stream) -> None:
        """Starts a thread for a connection, if there are not too many."""
        with self._lock:
            is_full = len(self._streams) >= CONNECTIONS_MAX or self._is_closed
            silent = next((each for each, is_known in self._streams.items() if not is_known), None)
            if is_full and silent is not None and not self._is_closed:  # strangers keep no replica out by silence
                del self._streams[silent]
                silent.close()
                is_full = False
            if not is_full:
                self._streams[stream] = False
        if is_full:
            self._tell(f"The state server has {CONNECTIONS_MAX} connections and takes no more.")
            stream.close()
        else:
            _start(self._serve, stream)

    def _serve(self, stream: Stream) -> None:
        """Serves one connection to its end."""
        try:
            greet_client(stream, self._key)
            stream.patience_s = PATIENCE_S
            with self._lock:
                if stream in self._streams:
                    self._streams[stream] = True
            self._answer(stream)
        except PullWireError as error:
            self._tell(f"A connection to the state server was closed: {error}.")
        except Gone as gone:
            logger.debug("A connection to the state server: %s.", gone)
        except Exception:
            logger.exception("A connection to the state server was closed.")
        finally:
            with self._lock:
                self._streams.pop(stream, None)
            stream.close()

    def _tell(self, sentence: str) -> None:
        if line := self._closed.line(sentence):
            logger.warning("%s", line)

    def _answer(self, stream: Stream) -> None:
        """Holds the state when it is asked for, and until the connection ends."""
        told = stream.receive_frame(FRAME_BYTES_MAX, is_idle=True)
        if told.get("do") != "hold":
            raise PullWireError("something else was asked for before the state was held")
        try:
            held = self._provider.hold()
        except NotAtRest as reason:
            stream.send_frame({"refused": f"{reason}"[:500], "lasts": isinstance(reason, Unsendable)})
            return
        try:
            check_held(held)
            Serving(stream, held.step, held.layout, held.tensors).run()
        finally:
            self._provider.release(held)


def check_held(held: Held) -> None:
    """Raises ValueError if what a provider gave cannot be served."""
    check_tensors(held.layout, held.tensors)
    for position, tensor in enumerate(held.tensors):
        if not tensor.is_contiguous():
            raise ValueError(f"tensor {position} of the state is not contiguous; flatten() makes it so")


def _start(call: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=call, args=args, name="unicron-state", daemon=True).start()
