"""An HTTP server that its process does not feel: a few requests at a time, and none for longer than some seconds.

It has threads of its own. A connection that has asked for nothing yet makes room for a newer one, so that nobody takes
the server from others by silence; what is slow is cut off, however slow it is.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from unicron_elastic.base.seldom import Seldom

LOOPBACK = "127.0.0.1"
PAUSE_S = 0.1  # for what a request needs that could not be taken
LOOK_S = 0.5  # between two looks at who is late, while there is somebody
_THREADS_PER_REQUEST = 4  # of those that are read, those that are answered, and those that were cut off just now

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Connection:
    """How long one may last, in monotonic seconds, and whether it has asked for something."""

    ends_at: float
    has_asked: bool = False
    is_cut_off: bool = False


class BoundedServer(ThreadingHTTPServer):
    """From its making to ``end``, with a thread in ``serve``."""

    request_queue_size = 64
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True  # of a process that has just ended; another one that listens is noticed all the same

    def __init__(
        self, address: str, port: int, handler: type[BaseHTTPRequestHandler], *, requests_most: int, request_s: float
    ) -> None:
        """At most ``requests_most`` are read at a time, and as many answered, each for ``request_s`` seconds.

        Port 0 is one of the system's choice. Raises OSError if it cannot be listened on.
        """
        self._requests_most = requests_most
        self._request_s = request_s
        self._connections: dict[socket.socket, _Connection] = {}  # the oldest first
        self._changed = threading.Condition()
        self._is_over = False
        self._errors = Seldom()
        try:
            family, _, _, _, where = socket.getaddrinfo(
                address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
            )[0]
        except UnicodeError as error:  # as for an empty part between two dots
            raise OSError(f"{address!a} is no name of a host") from error
        self.address_family = family
        super().__init__((str(where[0]), int(where[1])), handler)

    def server_bind(self) -> None:
        """Without the base class's look-up of a host name, which may take long."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def serve(self) -> None:
        """Until ``end``, which needs no look at a clock: a socket that is shut down can be read."""
        while not self._is_over:
            self.timeout = LOOK_S if self._connections else None
            try:
                self.handle_request()
            except (OSError, ValueError):  # it was closed in this moment
                if not self._is_over:
                    raise
            self._cut_off_late()

    def end(self) -> None:
        """Ends ``serve``."""
        self._is_over = True
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it was closed before
        self.server_close()

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            if not self._is_over:
                time.sleep(PAUSE_S)  # without a descriptor for it, who waits would be seen again at once
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ARG002 - the base class's signature
        """Whether there is room, if need be that of the one who has been silent for the longest time."""
        most = _THREADS_PER_REQUEST * self._requests_most
        with self._changed:
            silent = [each for each, about in self._connections.items() if not (about.has_asked or about.is_cut_off)]
            if len(silent) >= self._requests_most:
                self._cut_off(silent[0])
            if not self._changed.wait_for(lambda: len(self._connections) < most, PAUSE_S):
                return False
            self._connections[request] = _Connection(time.monotonic() + self._request_s)
        return True

    def has_asked(self, request: socket.socket) -> bool:
        """Called by the handler once it has read a request: False if too many others are being answered.

        What takes no time to answer may be answered all the same.
        """
        with self._changed:
            if (about := self._connections.get(request)) is None or about.is_cut_off:
                return False
            answered = sum(each.has_asked for each in self._connections.values())
            about.has_asked = True
        return answered < self._requests_most

    def log_error(self, sentence: str) -> None:
        """Logs the exception that is being handled, unless there was one a moment ago: everybody may ask for ever."""
        if line := self._errors.line(sentence):
            logger.warning("%s", line, exc_info=True)

    def process_request(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request(request, client_address)
        except BaseException:  # there is no thread for it
            self._let_go(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._let_go(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - the base class's signature
        logger.debug("A request was broken off", exc_info=True)

    def _let_go(self, request: socket.socket) -> None:
        with self._changed:
            self._connections.pop(request, None)
            self._changed.notify_all()

    def _cut_off_late(self) -> None:
        """Limit the whole request: who sends a byte now and then is never too late for a single read."""
        now = time.monotonic()
        with self._changed:
            for request in [each for each, about in self._connections.items() if about.ends_at < now]:
                self._cut_off(request)

    def _cut_off(self, request: socket.socket) -> None:
        self._connections[request].is_cut_off = True
        try:
            request.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it was closed in this moment
