"""A TCP connection between processes of a test that can be cut, and can fall silent."""

from __future__ import annotations

import selectors
import socket
import threading

DEADLINE_S = 20.0


class Cable:
    """A TCP proxy to one port that can be cut, and can fall silent."""

    def __init__(self, target_port: int) -> None:
        self._target = ("127.0.0.1", target_port)
        self._selector = selectors.DefaultSelector()
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._orders, self._order = socket.socketpair()
        self._done = threading.Event()
        self._listener: socket.socket | None = None
        self._is_silent = False
        self.port = 0
        self._selector.register(self._orders, selectors.EVENT_READ)
        self._listen()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Closes all connections and refuses new ones."""
        self._tell(b"c")

    def silence(self) -> None:
        """Connections stay, and nothing passes."""
        self._tell(b"s")

    def mend(self) -> None:
        """As new."""
        self._tell(b"m")

    def end(self) -> None:
        """Ends the thread."""
        self._tell(b"e")
        self._thread.join(DEADLINE_S)
        self._selector.close()
        self._orders.close()
        self._order.close()

    def _tell(self, order: bytes) -> None:
        self._done.clear()
        self._order.send(order)
        assert self._done.wait(DEADLINE_S)

    def _listen(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        self._selector.register(self._listener, selectors.EVENT_READ)

    def _run(self) -> None:
        while True:
            for key, _events in self._selector.select():
                if key.fileobj is self._orders:
                    order = self._orders.recv(1)
                    self._obey(order)
                    self._done.set()
                    if order == b"e":
                        return
                    break
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj in self._pairs:
                    self._pass(key.fileobj)

    def _obey(self, order: bytes) -> None:
        if order in (b"c", b"e"):
            for each in list(self._pairs):
                self._drop(each)
            if self._listener is not None:
                self._selector.unregister(self._listener)
                self._listener.close()
                self._listener = None
        elif order == b"s" and not self._is_silent:
            self._is_silent = True
            for each in self._pairs:
                self._selector.unregister(each)
        elif order == b"m":
            if self._listener is None:
                self._listen()
            if self._is_silent:
                for each in self._pairs:
                    self._selector.register(each, selectors.EVENT_READ)
            self._is_silent = False

    def _accept(self) -> None:
        assert self._listener is not None
        near, _address = self._listener.accept()
        try:
            far = socket.create_connection(self._target, timeout=DEADLINE_S)
        except OSError:
            near.close()
            return
        for each in (near, far):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._pairs[near], self._pairs[far] = far, near
        if not self._is_silent:
            self._selector.register(near, selectors.EVENT_READ)
            self._selector.register(far, selectors.EVENT_READ)

    def _pass(self, one: socket.socket) -> None:
        try:
            data = one.recv(65536)
            self._pairs[one].sendall(data)
        except OSError:
            data = b""
        if not data:
            self._drop(one)

    def _drop(self, one: socket.socket) -> None:
        other = self._pairs.pop(one, None)
        if other is None:
            return
        self._pairs.pop(other)
        for each in (one, other):
            if not self._is_silent:
                self._selector.unregister(each)
            each.close()
