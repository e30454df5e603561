"""A relay between a client and a state server over TCP, which delays, changes and cuts what the server sends."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

DEADLINE_S = 30.0
PIECE_BYTES = 64 * 1024


class Relay:
    """Listens in front of a server.

    ``bytes_per_s``: the rate of what the server sends. ``flip_at``: the places in it of bytes that are changed.
    ``stop_at``: after this many bytes ``stopped`` is set, and nothing passes until ``go_on``.
    """

    def __init__(
        self, address: dict[str, Any], *, bytes_per_s: float = 0, flip_at: tuple[int, ...] = (), stop_at: int = 0
    ) -> None:
        self.stopped = threading.Event()
        self.go_on = threading.Event()
        self.passed = 0
        self._bytes_per_s = bytes_per_s
        self._flip_at = flip_at
        self._stop_at = stop_at
        self._server = tuple(address["tcp"])
        self._listener = socket.create_server(("127.0.0.1", 0))
        # Another boot id makes it another host, of which the state comes over TCP.
        port = self._listener.getsockname()[1]
        self.address = {**address, "tcp": ["127.0.0.1", port], "boot_id": f"relay-{port}"}
        self._start(self._accept)

    def close(self) -> None:
        """Takes no more connections."""
        self.go_on.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._server)
            self._start(self._pass, client, server, False)
            self._start(self._pass, server, client, True)

    def _pass(self, source: socket.socket, target: socket.socket, is_from_server: bool) -> None:
        try:
            while data := source.recv(PIECE_BYTES):
                target.sendall(self._changed(data) if is_from_server else data)
        except OSError:
            pass
        finally:
            for end in (source, target):
                try:
                    end.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

    def _changed(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for place in self._flip_at:
            if self.passed <= place < self.passed + len(data):
                changed[place - self.passed] ^= 0x10
        self.passed += len(data)
        if self._stop_at and self.passed >= self._stop_at:
            self.stopped.set()
            assert self.go_on.wait(DEADLINE_S)
        if self._bytes_per_s:
            time.sleep(len(data) / self._bytes_per_s)
        return bytes(changed)

    @staticmethod
    def _start(call: Any, *args: Any) -> None:
        threading.Thread(target=call, args=args, daemon=True).start()
