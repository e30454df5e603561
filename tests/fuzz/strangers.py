"""What somebody who knows nothing does to a port: silence, halves, floods, nonsense, and all of it at once."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import time
from collections.abc import Callable

from fuzz_mutations import mutated

from unicron_elastic.rendezvous.cluster.heartbeat_wire import Hello

_HELLO, _ = Hello("odd/1", "odd", "job").line("a guess", {"nonce": "c" * 32})
_FRAME = b'{"nonce": "00", "proof": "00"}'
SEEDS = (
    _HELLO,
    len(_FRAME).to_bytes(4, "big") + _FRAME,
    b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: evil.example\r\nAccept: application/openmetrics-text\r\n\r\n",
    b'POST /sign-in HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 15\r\n\r\n{"password": 1}',
    b"\xff\xff\xff\xff" + bytes(64),
    b"\x80\x04cos\nsystem\n(S'touch x'\ntR.",
    b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n",
)
HELD_MOST = 400  # connections of one stranger: this process holds both ends


class Stranger:
    """Whoever can open a connection to ``port``. Each act is of a moment; what it holds open it may leave so."""

    def __init__(self, port: int, chance: random.Random) -> None:
        self._port, self._chance = port, chance
        self._held: list[socket.socket] = []
        self._acts: tuple[Callable[[], None], ...] = (
            self._say, self._say, self._say_half, self._hold, self._reset, self._drip, self._flood, self._let_go,
        )  # fmt: skip

    def act(self) -> None:
        """Does one thing. What the other side refuses is its right."""
        with contextlib.suppress(OSError):
            self._chance.choice(self._acts)()

    def close(self) -> None:
        """Lets go of all."""
        for each in self._held:
            each.close()
        self._held.clear()

    def _connected(self) -> socket.socket:
        found = socket.create_connection(("127.0.0.1", self._port), 2.0)
        found.settimeout(0.2)
        return found

    def _data(self) -> bytes:
        return mutated(self._chance.choice(SEEDS), SEEDS, self._chance)

    def _say(self) -> None:
        with self._connected() as sock:
            sock.sendall(self._data())
            sock.recv(4096)

    def _say_half(self) -> None:
        sock = self._connected()
        self._keep(sock)
        data = self._data()
        sock.sendall(data[: self._chance.randint(0, len(data))])
        if self._chance.random() < 0.5:
            sock.shutdown(socket.SHUT_WR)

    def _hold(self) -> None:
        for _ in range(self._chance.choice((1, 8, 64))):
            self._keep(self._connected())

    def _reset(self) -> None:
        with self._connected() as sock:
            sock.sendall(self._data()[:100])
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _drip(self) -> None:
        for sock in self._chance.sample(self._held, min(8, len(self._held))):
            with contextlib.suppress(OSError):
                sock.sendall(self._data()[:1])

    def _flood(self) -> None:
        for _ in range(50):
            with contextlib.suppress(OSError), self._connected() as sock:
                sock.sendall(self._data()[:200])

    def _let_go(self) -> None:
        while self._held and self._chance.random() < 0.95:
            self._held.pop().close()

    def _keep(self, sock: socket.socket) -> None:
        self._held.append(sock)
        while len(self._held) > HELD_MOST:
            self._held.pop(0).close()


def until(condition: Callable[[], bool], deadline_s: float) -> bool:
    """Whether it came true in time."""
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
