"""Copies tensors from a GPU to host memory on a stream of its own, through pinned memory."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

BLOCK_BYTES = 32 * 1024 * 1024


class GpuCopier:
    """Two blocks of pinned memory in turn: while one is filled, the other one is emptied.

    ``ready`` is made on the stream of the training when the state is complete, and waited for here.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._blocks = [torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]

    def begin(self, ready: torch.cuda.Event) -> None:
        """What was queued before ``ready`` is done before anything is copied."""
        self._stream.wait_event(ready)

    def copy(self, address: int, tensor: Tensor) -> None:
        """Copies a contiguous tensor to host memory at an address."""
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        pending: list[tuple[torch.cuda.Event, Tensor, int, int]] = []
        for number, at in enumerate(range(0, flat.numel(), BLOCK_BYTES)):
            size = min(BLOCK_BYTES, flat.numel() - at)
            if len(pending) == len(self._blocks):
                _empty(*pending.pop(0))
            block = self._blocks[number % len(self._blocks)]
            with torch.cuda.stream(self._stream):
                block[:size].copy_(flat[at : at + size], non_blocking=True)
                done = torch.cuda.Event()
                done.record(self._stream)
            pending.append((done, block, address + at, size))
        for each in pending:
            _empty(*each)


def _empty(done: torch.cuda.Event, block: Tensor, address: int, size: int) -> None:
    done.synchronize()
    ctypes.memmove(address, block.data_ptr(), size)
