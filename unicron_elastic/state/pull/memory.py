"""The memory of tensors by chunks: where it can be used in place, and a block of host memory for the rest."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence

import torch

from unicron_elastic.state.pull.chunks import ByteRun, Chunks, Segment, view_of


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
