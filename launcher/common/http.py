"""An HTTP server that its process does not feel: a few requests at a time, and none for longer than some seconds.

It has threads of its own. What it has no room for is turned away, and what is slow is cut off, however slow it is.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LOOPBACK = "127.0.0.1"
PAUSE_S = 0.1  # after a request that could not be taken
LOOK_S = 0.5  # between two looks at who is late, while there is somebody

logger = logging.getLogger(__name__)


class BoundedServer(ThreadingHTTPServer):
    """From its making to ``end``, with a thread in ``serve``."""

    request_queue_size = 64
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True  # of a process that has just ended; another one that listens is noticed all the same

    def __init__(
        self, address: str, port: int, handler: type[BaseHTTPRequestHandler], *, requests_most: int, request_s: float
    ) -> None:
        """At most ``requests_most`` at a time, each for ``request_s`` seconds. Port 0 is one of the system's choice.

        Raises OSError if it cannot be listened on.
        """
        self._free = threading.BoundedSemaphore(requests_most)
        self._request_s = request_s
        self._ends_at: dict[socket.socket, float] = {}  # monotonic seconds, of the requests that are being answered
        self._lock = threading.Lock()
        self._is_over = False
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
            self.timeout = LOOK_S if self._ends_at else None
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
        return self._free.acquire(blocking=False)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._ends_at[request] = time.monotonic() + self._request_s
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
        with self._lock:
            self._ends_at.pop(request, None)
        self._free.release()

    def _cut_off_late(self) -> None:
        """Limit the whole request: who sends a byte now and then is never too late for a single read."""
        now = time.monotonic()
        with self._lock:
            late = [request for request, ends_at in self._ends_at.items() if ends_at < now]
        for request in late:
            try:
                request.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it was closed in this moment
