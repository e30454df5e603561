"""Serves the state of this process to replicas that join."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from unicron_elastic.base.seldom import Seldom
from unicron_elastic.state.digest import PIECE_BYTES, Checksum
from unicron_elastic.state.layout import Layout, check_tensors
from unicron_elastic.state.pull.memory import Chunks, HostBlock, TensorMemory, allow_readers
from unicron_elastic.state.pull.transfer import Address
from unicron_elastic.state.pull.wire import FRAME_BYTES_MAX, Gone, PullWireError, Stream, greet_client, number

# What a state server does on one connection once the state is held: it answers for chunks, in one of three ways.
#
# ``stream``: the bytes come over the connection, and their checksum behind them. ``memory``: the other side is told
# where they are, and reads this process's memory. ``shared``: they are copied to memory that both sides have mapped.


LANES_MAX = 4
# From Linux's include/uapi/linux/fcntl.h: the other side may rely on the size, and so on reading without SIGBUS.
F_ADD_SEALS, F_GET_SEALS = 1033, 1034
SEALS = 0x2 | 0x4  # F_SEAL_SHRINK, F_SEAL_GROW


class Serving:
    """One connection and the state that is held for it."""

    def __init__(self, stream: Stream, step: int, layout: Layout, tensors: Sequence[torch.Tensor]) -> None:
        self._stream = stream
        self._step = step
        self._layout = layout
        self._memory = TensorMemory(tensors, Chunks([spec.bytes for spec in layout.specs]))
        self._blocks: dict[int, HostBlock] = {}
        self._shared: memoryview | None = None
        self._mode = "stream"
        self._probe = bytearray(secrets.token_bytes(16))

    def run(self) -> None:
        """Answers until the connection ends. Raises PullWireError, Gone."""
        layout = self._layout
        self._stream.send_frame({"step": self._step, "digest": layout.digest, "bytes": layout.total_bytes})
        while True:
            told = self._stream.receive_frame(FRAME_BYTES_MAX, is_idle=True)
            match told.get("do"):
                case "layout":
                    self._stream.send_frame({"layout": layout.to_json()})
                case "memory":
                    self._offer_memory()
                case "shared":
                    self._offer_shared()
                case "get":
                    self._send_chunk(number(told, "chunk", self._memory.chunks.count - 1), told)
                case other:
                    raise PullWireError(f"{str(other)[:40]!r} was asked for, which a state server does not do")

    def _offer_memory(self) -> None:
        """Tells where the tensors are, and where a random text is, by which the other side sees whether it can read."""
        self._need_host()
        allow_readers()
        self._mode = "memory"
        probe = torch.frombuffer(self._probe, dtype=torch.uint8)
        told = {"addresses": self._memory.addresses(), "probe": self._probe.hex(), "probe_at": probe.data_ptr()}
        self._stream.send_frame(told)

    def _offer_shared(self) -> None:
        """Sends the file descriptor of memory with a place for every lane."""
        self._need_host()
        size = LANES_MAX * self._memory.chunks.chunk_bytes
        fd = os.memfd_create("unicron-state", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, F_ADD_SEALS, SEALS)
            self._shared = memoryview(mmap.mmap(fd, size))
            self._stream.send_frame({"bytes": size})
            self._stream.wait_to_send()
            socket.send_fds(self._stream.socket, [b"\0"], [fd])
        finally:
            os.close(fd)
        self._mode = "shared"

    def _need_host(self) -> None:
        """Raises PullWireError for a connection that may come from another host."""
        if self._stream.socket.family != socket.AF_UNIX:
            raise PullWireError("memory of this host was asked for from another one")

    def _send_chunk(self, chunk: int, told: dict[str, Any]) -> None:
        """Sends one chunk in the way that was asked for."""
        slot = number(told, "slot", LANES_MAX - 1)
        memory, chunks = self._memory, self._memory.chunks
        segments = chunks.segments(chunk)
        runs = chunks.runs(chunk, segments)
        at = 0
        views = memory.views(runs, segments)
        if self._mode == "shared":
            views = self._copied(slot, chunk, runs, segments, views)
        elif views is None:
            block = self._block(slot)
            memory.gather(segments, block.view[: chunks.bytes_of(chunk)], block.tensor)
            views = block.views(runs)
            at = block.tensor.data_ptr()
        if self._mode == "stream":
            self._send(views)
            return
        checksum = Checksum()
        for view in views:
            checksum.add(view)
        self._stream.send_frame({"sum": checksum.digest().hex(), "at": at})

    def _copied(self, slot: int, chunk: int, runs: Any, segments: Any, views: list[memoryview] | None) -> Any:
        """The chunk's bytes in the shared memory of a lane."""
        assert self._shared is not None
        start = slot * self._memory.chunks.chunk_bytes
        room = self._shared[start : start + self._memory.chunks.bytes_of(chunk)]
        if views is None:
            self._memory.gather(segments, room)
        else:
            for run, view in zip(runs, views, strict=True):
                room[run.at : run.at + run.bytes] = view
        return [room[run.at : run.at + run.bytes] for run in runs]

    def _block(self, slot: int) -> HostBlock:
        """Host memory of a lane."""
        if slot not in self._blocks:
            self._blocks[slot] = self._memory.block()
        return self._blocks[slot]

    def _send(self, views: Sequence[memoryview]) -> None:
        """Sends bytes and their checksum, which brings them to the cache just before they are sent."""
        checksum = Checksum()
        for view in views:
            for start in range(0, len(view), PIECE_BYTES):
                part = view[start : start + PIECE_BYTES]
                checksum.add(part)
                self._stream.send(part)
        self._stream.send(checksum.digest())


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
