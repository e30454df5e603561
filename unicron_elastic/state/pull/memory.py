"""The memory of tensors by chunks: where it can be used in place, and a block of host memory for the rest."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Sequence

import torch

from unicron_elastic.state.pull.chunks import Chunks, Run, Segment


def view_of(address: int, size: int) -> memoryview:
    """Writable bytes at an address of this process, which whoever calls keeps alive."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


class Block:
    """Host memory for one chunk, which GPUs copy to and from at full rate if ``is_pinned``."""

    def __init__(self, size: int, *, is_pinned: bool) -> None:
        self.tensor = torch.zeros(size, dtype=torch.uint8, pin_memory=is_pinned)
        self.view = view_of(self.tensor.data_ptr(), size)

    def views(self, runs: Sequence[Run]) -> list[memoryview]:
        """The memory of these parts."""
        return [self.view[run.at : run.at + run.bytes] for run in runs]


class TensorMemory:
    """Contiguous tensors as a row of chunks."""

    def __init__(self, tensors: Sequence[torch.Tensor], chunks: Chunks) -> None:
        self.chunks = chunks
        self._tensors = [tensor.detach() for tensor in tensors]
        self.has_gpu = any(tensor.is_cuda for tensor in tensors)
        self._views = [None if t.device.type != "cpu" else view_of(t.data_ptr(), _bytes(t)) for t in self._tensors]

    def addresses(self) -> list[int]:
        """Where each tensor begins in this process; 0 for one that is not in host memory."""
        return [0 if view is None else t.data_ptr() for t, view in zip(self._tensors, self._views, strict=True)]

    def block(self) -> Block:
        """Room for any one chunk."""
        return Block(min(self.chunks.chunk_bytes, self.chunks.total_bytes), is_pinned=self.has_gpu)

    def views(self, runs: Sequence[Run], segments: Sequence[Segment]) -> list[memoryview] | None:
        """The memory of a chunk in place, or None if it has to go through a block."""
        if len(runs) != len(segments):
            return None
        views = [self._views[segment.tensor] for segment in segments]
        if any(view is None for view in views):
            return None
        return [v[s.start : s.start + s.bytes] for v, s in zip(views, segments, strict=True) if v is not None]

    def gather(self, segments: Sequence[Segment], block: memoryview, holder: torch.Tensor | None = None) -> None:
        """Copies a chunk from the tensors to a block; ``holder``: the block as a tensor, if there is one."""
        if any(before.at + before.bytes != after.at for before, after in itertools.pairwise(segments)):
            ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(block)), 0, len(block))
        for segment in segments:
            view = self._views[segment.tensor]
            part = slice(segment.at, segment.at + segment.bytes)
            if view is not None:
                block[part] = view[segment.start : segment.start + segment.bytes]
            else:
                target = torch.frombuffer(block, dtype=torch.uint8) if holder is None else holder
                target[part].copy_(self._on_device(segment))

    def scatter(self, segments: Sequence[Segment], block: memoryview, holder: torch.Tensor | None = None) -> None:
        """Copies a chunk from a block to the tensors."""
        for segment in segments:
            view = self._views[segment.tensor]
            part = slice(segment.at, segment.at + segment.bytes)
            if view is not None:
                view[segment.start : segment.start + segment.bytes] = block[part]
            else:
                source = torch.frombuffer(block, dtype=torch.uint8) if holder is None else holder
                self._on_device(segment).copy_(source[part])

    def _on_device(self, segment: Segment) -> torch.Tensor:
        """The bytes of a segment as a tensor on its device."""
        tensor = self._tensors[segment.tensor]
        start = tensor.storage_offset() * tensor.element_size() + segment.start
        empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return empty.set_(tensor.untyped_storage(), start, (segment.bytes,))


def _bytes(tensor: torch.Tensor) -> int:
    return int(tensor.nbytes)


# Where a chunk arrives: in its place in the tensors, or in a block beside them.


class Landing:
    """The place of one chunk from one source.

    ``is_aside``: it is to arrive in a block, because another source's may come first. Whoever writes takes ``lock`` for
    each write and the memory anew from ``views``, as the place may be moved in between.
    """

    def __init__(self, memory: TensorMemory, chunk: int, *, is_aside: bool) -> None:
        self.lock = threading.Lock()
        self.chunk = chunk
        self.segments: list[Segment] = memory.chunks.segments(chunk)
        self.runs: list[Run] = memory.chunks.runs(chunk, self.segments)
        self.is_moved = False
        self._memory = memory
        self._block: Block | None = None
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
        """From now on nothing is written to the tensors; what comes is worth nothing."""
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
