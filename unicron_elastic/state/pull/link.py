"""A connection to one source of state, over which several lanes ask for chunks at the same time."""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

from unicron_elastic.state.checksum import PIECE_BYTES, SUM_BYTES, Checksum
from unicron_elastic.state.layout import Layout
from unicron_elastic.state.pull.distance import Address, Distance, is_local
from unicron_elastic.state.pull.landing import Landing
from unicron_elastic.state.pull.offer import Offer
from unicron_elastic.state.pull.read_memory import read_memory
from unicron_elastic.state.pull.serving import F_GET_SEALS, LANES_MAX, SEALS
from unicron_elastic.state.pull.wire import LAYOUT_BYTES_MAX, Gone, PullWireError, Stream, greet_server, number, text

CONNECT_S = 2.0
STALL_S = 10.0  # without a byte, after which a source counts as lost
_ADDRESS_MAX = 2**64 - 1
ReadMemory = Callable[[int, Sequence[tuple[int, memoryview]]], None]


class Refused(PullWireError):
    """The source has a state that cannot be sent, now and soon; the text says why."""


class SourceLink:
    """One source. ``way`` says how its chunks come: "memory", "shared memory" or "TCP"."""

    lanes = 2  # one receives while the other one checks what it received

    def __init__(
        self,
        address: Address,
        distance: Distance,
        *,
        stall_s: float = STALL_S,
        read_memory: ReadMemory = read_memory,
    ) -> None:
        self._stall_s = stall_s
        self._read_memory = read_memory
        self.address = address
        self.distance = distance
        self.way = "TCP"
        self._stream: Stream | None = None
        self._pid = 0
        self._addresses: list[int] = []
        self._shared: memoryview | None = None
        self._asking = threading.Lock()
        self._turn = threading.Condition()
        self._asked = self._answered = 0
        self._end: OSError | PullWireError | None = None  # what the first lane saw; the others see what that led to

    @property
    def stream(self) -> Stream:
        """The connection. Raises Gone before it is there."""
        if self._stream is None:
            raise Gone("it is not connected")
        return self._stream

    def open(self, key: bytes, timeout_s: float) -> Offer:
        """Connects and has the state held, for which the source may take ``timeout_s``.

        Raises Gone, PullWireError, and Refused for a state that cannot be sent.
        """
        self._stream = self._connect(min(CONNECT_S, timeout_s))
        greet_server(self.stream, key)
        self.stream.patience_s = timeout_s
        self.stream.send_frame({"do": "hold"})
        told = self.stream.receive_frame()
        self.stream.patience_s = self._stall_s
        if "refused" in told:
            raise (Refused if told.get("lasts") is True else PullWireError)(text(told, "refused", 500))
        return Offer(number(told, "step", 2**62), text(told, "digest", 64), number(told, "bytes", 2**62))

    def layout(self, offer: Offer) -> Layout:
        """The layout of the state. Raises Gone, PullWireError."""
        self.stream.send_frame({"do": "layout"})
        told = self.stream.receive_frame(LAYOUT_BYTES_MAX)
        try:
            layout = Layout.parse(text(told, "layout", LAYOUT_BYTES_MAX))
        except ValueError as error:
            raise PullWireError(str(error)) from error
        if layout.digest != offer.digest:
            raise PullWireError("the layout is not the one of its digest")
        return layout

    def prepare(self, layout: Layout) -> None:
        """Chooses the fastest way in which chunks can come. Raises Gone, PullWireError."""
        if self.stream.socket.family == socket.AF_UNIX and not self._can_read(len(layout.specs)):
            self._map_shared()

    def fetch(self, landing: Landing, slot: int) -> bool:
        """Receives one chunk; False if its checksum is wrong. Raises Gone, PullWireError, OSError."""
        with self._asking:
            ticket = self._asked
            self._asked += 1
            self.stream.send_frame({"do": "get", "chunk": landing.chunk, "slot": slot})
        with self._turn:
            self._turn.wait_for(lambda: self._answered == ticket)
        try:
            if self.way == "TCP":
                return self._receive(landing)
            told = self.stream.receive_frame()
        except (OSError, PullWireError) as error:
            self._end = self._end or error
            self.close()  # the other lanes would take the rest of this answer for theirs
            raise self._end from None
        finally:
            with self._turn:
                self._answered += 1
                self._turn.notify_all()
        wanted = text(told, "sum", 2 * SUM_BYTES)
        if self.way == "memory":
            return self._read(landing, number(told, "at", _ADDRESS_MAX), wanted)
        return self._copy(landing, slot, wanted)

    def close(self) -> None:
        """Ends the connection, and with it the hold."""
        if self._stream is not None:
            self._stream.close()

    def end(self, timeout_s: float) -> None:
        """Ends the connection; when it returns the source has ended the hold, if it does so within ``timeout_s``."""
        if self._stream is not None:
            self._stream.end(timeout_s)

    def _connect(self, timeout_s: float) -> Stream:
        """A connection within the host if there can be one, else over TCP. Raises Gone."""
        if is_local(self.distance):
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(f"\0{self.address.unix}")
                return Stream(connection, self._stall_s)
            except OSError:  # of another network namespace, for one
                connection.close()
        try:
            return Stream(socket.create_connection(self.address.tcp, timeout=timeout_s), self._stall_s)
        except OSError as error:
            raise Gone(f"it cannot be reached: {error.strerror or error}") from error

    def _can_read(self, tensors: int) -> bool:
        """Asks where the tensors are, and whether this process may read there."""
        self.stream.send_frame({"do": "memory"})
        told = self.stream.receive_frame(LAYOUT_BYTES_MAX)
        addresses, probe = told.get("addresses"), text(told, "probe", 64)
        if not isinstance(addresses, list) or len(addresses) != tensors:
            raise PullWireError("the addresses of tensors are not as many as the layout has")
        if not all(type(a) is int and 0 <= a <= _ADDRESS_MAX for a in addresses):
            raise PullWireError("an address of a tensor is no address")
        credentials = self.stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self._pid, _, _ = struct.unpack("3i", credentials)  # the kernel says so, not the other side
        seen = bytearray(len(probe) // 2)
        try:
            self._read_memory(self._pid, [(number(told, "probe_at", _ADDRESS_MAX), memoryview(seen))])
        except OSError:  # another user's, another pid namespace, seccomp, Yama
            return False
        if seen.hex() != probe:
            return False
        self._addresses = addresses
        self.way = "memory"
        return True

    def _map_shared(self) -> None:
        """Maps memory that the source fills. Raises Gone, PullWireError."""
        self.stream.send_frame({"do": "shared"})
        size = number(self.stream.receive_frame(), "bytes", 2**40)
        self.stream.wait(select.POLLIN, time.monotonic() + self._stall_s)
        _, fds, _, _ = socket.recv_fds(self.stream.socket, 1, 1)
        if len(fds) != 1:
            raise PullWireError("shared memory came without its file descriptor")
        try:
            # Without the seals the other side could take the memory away under us, which is a SIGBUS.
            is_fixed = fcntl.fcntl(fds[0], F_GET_SEALS) & SEALS == SEALS
            if not is_fixed or os.fstat(fds[0]).st_size != size or size % LANES_MAX:
                raise PullWireError("shared memory is of another size than was said, or may change it")
            self._shared = memoryview(mmap.mmap(fds[0], size))
        except OSError as error:
            raise PullWireError(f"shared memory cannot be mapped: {error.strerror}") from error
        finally:
            os.close(fds[0])
        self.way = "shared memory"

    def _receive(self, landing: Landing) -> bool:
        """Receives the bytes of a chunk to where they belong."""
        checksum = Checksum()
        for index, run in enumerate(landing.runs):
            for start in range(0, run.bytes, PIECE_BYTES):
                self._receive_part(landing, index, start, min(start + PIECE_BYTES, run.bytes))
                if not landing.is_moved:
                    checksum.add(landing.views[index][start : start + PIECE_BYTES])
        wanted = bytearray(SUM_BYTES)
        self.stream.receive_into(memoryview(wanted))
        return landing.is_moved or checksum.digest() == wanted

    def _receive_part(self, landing: Landing, index: int, start: int, end: int) -> None:
        """Receives a part of a run. The landing may be moved while we wait, and never while we write."""
        until = time.monotonic() + self._stall_s
        while start < end:
            with landing.lock:
                got = self.stream.try_receive(landing.views[index][start:end])
            start += got
            if got:
                until = time.monotonic() + self._stall_s
            else:
                self.stream.wait(select.POLLIN, until)

    def _read(self, landing: Landing, block_at: int, wanted: str) -> bool:
        """Reads a chunk from the source's memory, in pieces that are checked while they are in the cache."""
        checksum = Checksum()
        for index, run in enumerate(landing.runs):
            if block_at:
                address = block_at + run.at
            else:
                segment = landing.segments[index]
                address = self._addresses[segment.tensor] + segment.start
            for start in range(0, run.bytes, PIECE_BYTES):
                with landing.lock:
                    part = landing.views[index][start : start + PIECE_BYTES]
                    self._read_memory(self._pid, [(address + start, part)])
                checksum.add(part)
        return landing.is_moved or checksum.digest().hex() == wanted

    def _copy(self, landing: Landing, slot: int, wanted: str) -> bool:
        """Copies a chunk from shared memory, which is checked where it arrives."""
        assert self._shared is not None
        base = slot * (len(self._shared) // LANES_MAX)
        checksum = Checksum()
        for index, run in enumerate(landing.runs):
            at = base + run.at
            with landing.lock:
                landing.views[index][:] = self._shared[at : at + run.bytes]
            checksum.add(landing.views[index])
        return landing.is_moved or checksum.digest().hex() == wanted
