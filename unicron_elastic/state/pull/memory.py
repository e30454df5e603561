"""The memory of tensors by chunks: where it can be used in place, and a block of host memory for the rest."""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Reads the memory of another process of this host, and lets others read that of this one.


# From Linux's include/uapi/linux/prctl.h.
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)
_PARTS_MAX = 1024  # IOV_MAX

_libc = ctypes.CDLL(None, use_errno=True)


class _Part(ctypes.Structure):
    """The kernel's struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("len", ctypes.c_size_t))


def allow_readers() -> None:
    """Lets processes of the same user read this one's memory where Yama allows it to descendants alone."""
    _libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)  # fails without Yama, where there is nothing to allow


def read_memory(pid: int, parts: Sequence[tuple[int, memoryview]]) -> None:
    """Copies memory of process ``pid``, from an address each, into writable views.

    Raises PermissionError if the kernel does not allow it, ProcessLookupError if the process is gone, OSError else.
    """
    for start in range(0, len(parts), _PARTS_MAX):
        _read(pid, parts[start : start + _PARTS_MAX])


def _read(pid: int, parts: Sequence[tuple[int, memoryview]]) -> None:
    """One call to the kernel, which takes up to ``_PARTS_MAX`` parts."""
    count = len(parts)
    local, remote = (_Part * count)(), (_Part * count)()
    wanted = 0
    for index, (address, view) in enumerate(parts):
        local[index] = _Part(ctypes.addressof(ctypes.c_char.from_buffer(view)), len(view))
        remote[index] = _Part(address, len(view))
        wanted += len(view)
    count_of = ctypes.c_ulong(count)
    read = _libc.process_vm_readv
    read.restype = ctypes.c_ssize_t
    done = read(ctypes.c_int(pid), local, count_of, remote, count_of, ctypes.c_ulong(0))
    if done < 0:
        errno = ctypes.get_errno()
        raise OSError(errno, os.strerror(errno))
    if done != wanted:
        raise OSError(f"only {done} of {wanted} bytes of process {pid} could be read")


# How a state is cut into chunks: all tensors one after the other, each at a multiple of 64 bytes.
#
# So a chunk starts in a tensor at a multiple of 64 too, and the words that checksums are made of are aligned on both
# sides. The bytes between two tensors are not sent, except in a chunk of many small tensors, which travels as one
# block.


CHUNK_BYTES = 8 * 1024 * 1024
ALIGNMENT_BYTES = 64
SEGMENTS_MAX = 64  # in a chunk that is sent tensor by tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a tensor in a chunk: ``bytes`` from ``start`` on, which stand at ``at`` in the chunk."""

    tensor: int
    start: int
    at: int
    bytes: int


@dataclass(frozen=True, slots=True)
class ByteRun:
    """Bytes of a chunk that are sent in one piece, from ``at`` on."""

    at: int
    bytes: int


class Chunks:
    """The chunks of tensors with these sizes in bytes; all but the last have ``chunk_bytes``, a multiple of 64."""

    def __init__(self, sizes: Sequence[int], chunk_bytes: int = CHUNK_BYTES) -> None:
        self.chunk_bytes = chunk_bytes
        self._sizes = [size for size in sizes if size]
        self._tensors = [number for number, size in enumerate(sizes) if size]  # one without elements is nowhere
        self._starts: list[int] = []
        end = 0
        for size in self._sizes:
            self._starts.append(-(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
            end = self._starts[-1] + size
        self.total_bytes = end
        self.count = -(-end // chunk_bytes)

    def bytes_of(self, chunk: int) -> int:
        """The length of a chunk, with the bytes between tensors."""
        return min(self.chunk_bytes, self.total_bytes - chunk * self.chunk_bytes)

    def segments(self, chunk: int) -> list[Segment]:
        """The parts of tensors in a chunk, in order."""
        begin = chunk * self.chunk_bytes
        end = begin + self.bytes_of(chunk)
        found = []
        place = max(0, bisect_right(self._starts, begin) - 1)
        while place < len(self._starts) and self._starts[place] < end:
            start = self._starts[place]
            low, high = max(begin, start), min(end, start + self._sizes[place])
            if low < high:
                found.append(Segment(self._tensors[place], low - start, low - begin, high - low))
            place += 1
        return found

    def runs(self, chunk: int, segments: Sequence[Segment]) -> list[ByteRun]:
        """What is sent of a chunk with these segments: each of them, or the whole as one block."""
        if len(segments) > SEGMENTS_MAX:
            return [ByteRun(0, self.bytes_of(chunk))]
        return [ByteRun(segment.at, segment.bytes) for segment in segments]


def view_of(address: int, size: int) -> memoryview:
    """Writable bytes at an address of this process, which whoever calls keeps alive."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


class HostBlock:
    """Host memory for one chunk, which GPUs copy to and from at full rate if ``is_pinned``."""

    def __init__(self, size: int, *, is_pinned: bool) -> None:
        self.tensor = torch.zeros(size, dtype=torch.uint8, pin_memory=is_pinned)
        self.view = view_of(self.tensor.data_ptr(), size)

    def views(self, runs: Sequence[ByteRun]) -> list[memoryview]:
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

    def block(self) -> HostBlock:
        """Room for any one chunk."""
        return HostBlock(min(self.chunks.chunk_bytes, self.chunks.total_bytes), is_pinned=self.has_gpu)

    def views(self, runs: Sequence[ByteRun], segments: Sequence[Segment]) -> list[memoryview] | None:
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
