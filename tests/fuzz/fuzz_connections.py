"""What listens, with real sockets: of a stranger, and of somebody who has proven who they are and then says anything.

Seals would keep what was changed from the readers behind them, so each message is changed before it is sealed.
"""

from __future__ import annotations

import contextlib
import io
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from fuzz_parsers import SECRET, Parser

from unicron_elastic.launcher.node.output_receiver import END, HEADER, OutputReceiver, key_for_output
from unicron_elastic.launcher.node.output_sender import _greet
from unicron_elastic.rendezvous.cluster.heartbeat_wire import Hello, line, read, seal_of
from unicron_elastic.rendezvous.cluster.links import Links
from unicron_elastic.state.layout import flatten
from unicron_elastic.state.pull.server import Held, StateServer
from unicron_elastic.state.pull.wire import Gone, PullWireError, Stream, greet_server
from unicron_elastic.worker.channel import Channel

__all__ = ["connections"]

DEADLINE_S = 10.0
KEY = b"key"
FAULT = {"fault": {"job": "job", "round": 1, "reason": "rank 3 was killed."}}


class Refused(ValueError):
    """The connection was closed, as it should be."""


class _Coordinator:
    """One that leads, with a good agent on a link of its own."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.lost: list[str] = []
        self.boss, self.one = (self._links(name) for name in ("boss", "one"))
        self.boss.leads = True
        self.one.connect("boss/1", f"127.0.0.1:{self.boss.port}")
        self._until(lambda: sum(link.is_open for link in (*self.boss._links, *self.one._links)) == 2)

    def _links(self, name: str) -> Links:
        links = Links(
            "127.0.0.1",
            Hello(f"{name}/1", name, "job"),
            on_opened=lambda _node: None,
            on_lost=self.lost.append,
            on_probed=lambda _node, _answer: None,
            on_message=lambda *told: self.heard.append(told),
        )
        links.secret = SECRET
        return links

    def close(self) -> None:
        self.one.close()
        self.boss.close()

    def stranger(self, data: bytes) -> None:
        """Says it without a proof."""
        with self._peer() as peer:
            self._say(peer, data)

    def peer(self, data: bytes) -> None:
        """Says it, line by line, after the greeting and with seals."""
        with self._peer() as peer:
            said, nonces = Hello("odd/1", "odd", "job").line(SECRET, read(peer.recv(4096).strip()))
            peer.sendall(said)
            self._until(lambda: any(link.node_id == "odd/1" and link.is_open for link in self.boss._links))
            seal = seal_of(SECRET, nonces, is_coordinator=False)
            lines = (text for text in data.split(b"\n") if text)
            self._say(peer, b"".join(seal.of(text).hex().encode() + b" " + text + b"\n" for text in lines))

    @contextlib.contextmanager
    def _peer(self) -> Iterator[socket.socket]:
        before = len(self.boss._links)
        with socket.create_connection(("127.0.0.1", self.boss.port), DEADLINE_S) as peer:
            self._until(lambda: len(self.boss._links) > before)
            yield peer
        self._until(lambda: len(self.boss._links) == before)
        self.heard.clear()
        self.one.tell_coordinator({"still": "here"})
        self._until(lambda: self.heard)
        assert self.heard == [("one/1", "job", {"still": "here"})], self.heard
        assert "one/1" not in self.lost

    def _say(self, peer: socket.socket, data: bytes) -> None:
        with contextlib.suppress(OSError):
            peer.setblocking(False)
            sent = 0
            while sent < len(data):
                with contextlib.suppress(BlockingIOError):
                    sent += peer.send(data[sent:])
                self.boss.poll(0.0)
            peer.shutdown(socket.SHUT_WR)

    def _until(self, condition: Any) -> None:
        end = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < end, "the coordinator does not get there"
            self.boss.poll(0.001)
            self.one.poll(0.0)


class _Terminal:
    """Who shows the output of other hosts."""

    def __init__(self) -> None:
        self.shown = io.BytesIO()
        self._receiver = OutputReceiver(SECRET, self.shown, io.BytesIO(), host="127.0.0.1", beat_s=5.0)
        self.close = self._receiver.close

    def peer(self, data: bytes) -> None:
        """Sends frames with seals; what makes no whole frame goes as it is."""
        self._send(data)
        self.shown.seek(0)
        self.shown.truncate()
        self._send(HEADER.pack(1, 6) + b"still\n" + HEADER.pack(END, 0))
        assert self.shown.getvalue() == b"still\n"

    def _send(self, data: bytes) -> None:
        with socket.create_connection(("127.0.0.1", self._receiver.port), DEADLINE_S) as sock:
            _, seal = _greet(sock, key_for_output(SECRET), "n1", time.monotonic() + DEADLINE_S)
            with contextlib.suppress(OSError):
                while data:
                    length = HEADER.unpack_from(data)[1] if len(data) >= HEADER.size else 0
                    frame, data = data[: HEADER.size + length], data[HEADER.size + length :]
                    sock.sendall(frame + seal.of(frame))
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(65536):
                    pass
        assert self._receiver.drain(DEADLINE_S)


class _State:
    """A process that serves its state."""

    def __init__(self) -> None:
        self._layout, self._tensors = flatten({"w": torch.arange(6.0)})
        self._server = StateServer(self, KEY)
        self.close = self._server.close
        self._changed = threading.Condition()
        self._holds = 0

    def hold(self) -> Held:
        with self._changed:
            self._holds += 1
        return Held(3, self._layout, self._tensors)

    def release(self, _held: Held) -> None:
        with self._changed:
            self._holds -= 1
            self._changed.notify_all()

    def peer(self, data: bytes) -> None:
        """Sends a frame for each line, sealed, and reads whatever comes until the end."""
        with self._stream() as stream:
            for text in data.split(b"\n"):
                assert stream.seal is not None
                stream.send(len(text).to_bytes(4, "big") + text + stream.seal.of(text))
            stream.end(DEADLINE_S)
        with self._stream() as stream:
            stream.send_frame({"do": "hold"})
            assert stream.receive_frame()["step"] == 3
            stream.end(DEADLINE_S)
        with self._changed:
            assert self._changed.wait_for(lambda: not self._holds, DEADLINE_S), "a hold has not ended"

    @contextlib.contextmanager
    def _stream(self) -> Iterator[Stream]:
        host, port = self._server.address["tcp"]
        stream = Stream(socket.create_connection((host, port), DEADLINE_S), DEADLINE_S)
        try:
            greet_server(stream, KEY)
            yield stream
        except (Gone, PullWireError) as error:
            raise Refused(str(error)) from None
        finally:
            stream.close()


class _Pair:
    """A worker's end of its control channel, and the agent's."""

    def __init__(self) -> None:
        self._theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours = Channel(ours)
        self._ours.settimeout(0)

    def close(self) -> None:
        self._theirs.close()
        self._ours.close()

    def packet(self, data: bytes) -> None:
        """One packet, which the script may write itself."""
        self._theirs.send(data[:60_000] or b"i")
        try:
            self._ours.receive()
        finally:
            self._theirs.send(b'i{"still": "here"}')
            assert self._ours.receive() == ({"still": "here"}, [])


@contextlib.contextmanager
def connections() -> Iterator[dict[str, Parser]]:
    """By name, each with something that listens behind it."""
    coordinator, terminal, state, pair = _Coordinator(), _Terminal(), _State(), _Pair()
    told = line(FAULT)
    hello, _ = Hello("odd/1", "odd", "job").line(SECRET, {"nonce": "c"})
    output = HEADER.pack(1, 4) + b"one\n" + HEADER.pack(2, 3) + b"two" + HEADER.pack(END, 0)
    asked = b'{"do": "hold"}\n{"do": "layout"}\n{"do": "get", "chunk": 0, "slot": 0}'
    made = [
        Parser("connection-stranger", "rendezvous/cluster/links.py", coordinator.stranger, (hello, told), ()),
        Parser("connection-heartbeats", "rendezvous/cluster/links.py", coordinator.peer, (told + told,), ()),
        Parser("connection-output", "launcher/node/output_receiver.py", terminal.peer, (output,), ()),
        Parser("connection-state", "unicron_elastic/state/pull/server.py", state.peer, (asked,), (Refused,)),
        Parser("channel", "unicron_elastic/worker/channel.py", pair.packet, (b'i{"hello": 1}', b"f"), (ValueError,)),
    ]
    try:
        yield {each.name: each for each in made}
    finally:
        for each in (coordinator, terminal, state, pair):
            each.close()
