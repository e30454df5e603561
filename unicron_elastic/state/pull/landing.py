"""Where a chunk arrives: in its place in the tensors, or in a block beside them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from unicron_elastic.state.pull.chunks import ByteRun, Segment
from unicron_elastic.state.pull.memory import HostBlock, TensorMemory


class Landing:
    """The place of one chunk from one source.

    ``is_aside``: it is to arrive in a block, because another source's may come first. Whoever writes takes ``lock`` for
    each write and the memory anew from ``views``, as the place may be moved in between.
    """

    def __init__(self, memory: TensorMemory, chunk: int, *, is_aside: bool) -> None:
        self.lock = threading.Lock()
        self.chunk = chunk
        self.segments: list[Segment] = memory.chunks.segments(chunk)
        self.runs: list[ByteRun] = memory.chunks.runs(chunk, self.segments)
        self.is_moved = False
        self._memory = memory
        self._block: HostBlock | None = None
        in_place = None if is_aside else memory.views(self.runs, self.segments)
        self.views: Sequence[memoryview] = self._in_block() if in_place is None else in_place

    @property
    def is_aside(self) -> bool:
        """Whether the chunk has to be copied to its place."""
        return self._block is not None

    def bytes(self) -> int:
        """The bytes that are sent."""
        return sum(run.bytes for run in self.runs)

    def move_aside(self) -> None:
        """Stop writing to the tensors from now on; what comes is worth nothing."""
        with self.lock:
            self.is_moved = True
            self.views = self._in_block()

    def settle(self) -> None:
        """Copies a chunk that arrived in a block to the tensors."""
        if self._block is not None:
            self._memory.scatter(self.segments, self._block.view, self._block.tensor)

    def _in_block(self) -> list[memoryview]:
        """The memory in a block of its own."""
        if self._block is None:
            self._block = self._memory.block()
        return self._block.views(self.runs)
