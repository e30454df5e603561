"""What a state server does on one connection once the state is held: it answers for chunks, in one of three ways.

``stream``: the bytes come over the connection, and their checksum behind them. ``memory``: the other side is told
where they are, and reads this process's memory. ``shared``: they are copied to memory that both sides have mapped.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import socket
from collections.abc import Sequence
from typing import Any

import torch

from unicron_elastic.state.checksum import PIECE_BYTES, Checksum
from unicron_elastic.state.layout import Layout
from unicron_elastic.state.pull.chunks import Chunks
from unicron_elastic.state.pull.memory import HostBlock, TensorMemory
from unicron_elastic.state.pull.read_memory import allow_readers
from unicron_elastic.state.pull.wire import FRAME_BYTES_MAX, PullWireError, Stream, number

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
