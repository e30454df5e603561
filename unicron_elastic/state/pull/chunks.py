"""How a state is cut into chunks: all tensors one after the other, each at a multiple of 64 bytes.

So a chunk starts in a tensor at a multiple of 64 too, and the words that checksums are made of are aligned on both
sides. The bytes between two tensors are not sent, except in a chunk of many small tensors, which travels as one
block.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

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
