"""Digests of tensors at about the rate at which their memory is read, by which replicas tell that they differ.

A tensor's memory, as it is in one piece, is taken as words of 64 bits, the last one filled up with zeros. Of each block
of words, a matrix, the sums of the rows and of the columns are made, with wrap-around; each of these is multiplied by
an odd number of its own, and all are added, as are the words of what is smaller than a block. These are whole numbers:
the result is the same in any order, with any number of threads, on any device, in any version of torch. A word that
changes or moves changes it. It is no protection against somebody who means to forge one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from unicron_elastic.state.layout import flatten

ROWS, COLUMNS = 63, 520  # one odd, so that what changes in a whole column shows; columns in whole lines of a cache
BLOCK_BYTES = 8 * ROWS * COLUMNS  # fewer elements than those from which torch would sum with several threads
SMALL_BYTES = 64 * 1024  # below this, torch's calls cost more than the work: such tensors are taken together
BATCH_BYTES = 8 * 2**20
CHUNK_BLOCKS = {"cpu": 1}  # in the cache of a processor; other devices want more at once
CHUNK_BLOCKS_ELSEWHERE = 128
_NUMBER_FACTOR = 0x9E3779B97F4A7C15 - 2**64


def digests(tensors: Sequence[Tensor]) -> list[int]:
    """The digest of each tensor, in 64 bits: of its numbers and their order alone, not of its shape or type.

    One synchronisation with each device that is not the host, and no more memory there than some chunks take.
    """
    places: dict[torch.device, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.device, []).append(place)
    found = [0] * len(tensors)
    with torch.no_grad():
        sums = {device: _of_one_device([tensors[place] for place in each]) for device, each in places.items()}
    for device, each in places.items():
        for place, digest in zip(each, sums[device].tolist(), strict=True):
            found[place] = digest % 2**64
    return found


def digest_of(state: Any) -> int:
    """Return that of nested values and tensors, in 64 bits; of a DTensor that of this rank's part.

    Raises TypeError for what cannot be sent.
    """
    layout, tensors = flatten(state, takes_parts=True)
    text = f"{layout.to_json()} {digests(tensors) if tensors else ''}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _of_one_device(tensors: Sequence[Tensor]) -> Tensor:
    """The digests, (tensors,) int64, on their device."""
    sums = [
        _of_large(_memory(tensors[batch[0]]))
        if tensors[batch[0]].nbytes > SMALL_BYTES
        else _of_small([_memory(tensors[place]) for place in batch])
        for batch in _batches(tensors)
    ]
    order = torch.tensor([place for batch in _batches(tensors) for place in batch], device=sums[0].device)
    together = torch.cat(sums)
    return torch.empty_like(together).scatter_(0, order, together)


def _batches(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """The places of small tensors that are taken together, and of each large one alone."""
    batch: list[int] = []
    batch_bytes = 0
    for place, tensor in enumerate(tensors):
        if tensor.nbytes > SMALL_BYTES:
            yield [place]
            continue
        batch.append(place)
        batch_bytes += tensor.nbytes
        if batch_bytes > BATCH_BYTES:
            yield batch
            batch, batch_bytes = [], 0
    if batch:
        yield batch


def _memory(tensor: Tensor) -> Tensor:
    """Its bytes, 1-D: its own memory if that is in one piece."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.resolve_neg().contiguous()
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)  # torch leaves any stride to a single number


def _of_small(memories: Sequence[Tensor]) -> Tensor:
    """The digests of tensors that are smaller than a block, (tensors,)."""
    zeros = memories[0].new_zeros(8)
    parts = [part for memory in memories for part in (memory, zeros[: -memory.numel() % 8])]
    words = torch.cat(parts).view(torch.int64)
    factors, ends = _of_lengths(tuple(-(-memory.numel() // 8) for memory in memories), words.device)
    sums = torch.cat([words.new_zeros(1), _spread(words).mul_(factors).cumsum(0)])
    return sums[ends].diff(prepend=words.new_zeros(1))


@lru_cache(maxsize=64)  # the batches of a state are the same each time
def _of_lengths(lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """The factors of tensors that stand one behind the other, and where each of them ends, counted in words."""
    ends = torch.tensor(lengths, dtype=torch.int64).cumsum(0).to(device)
    return torch.cat([_factors(device)[:length] for length in lengths]), ends


def _of_large(memory: Tensor) -> Tensor:
    """The digest of one tensor, (1,)."""
    blocks = memory.numel() // BLOCK_BYTES
    chunk = CHUNK_BLOCKS.get(memory.device.type, CHUNK_BLOCKS_ELSEWHERE)
    bounds = [*range(0, blocks, chunk), blocks]
    sums = [_of_blocks(memory[begin * BLOCK_BYTES : end * BLOCK_BYTES]) for begin, end in pairwise(bounds)]
    if blocks * BLOCK_BYTES < memory.numel():
        sums.append(_of_small([memory[blocks * BLOCK_BYTES :]]))
    together = torch.cat(sums)
    numbers = torch.arange(1, 2 * together.numel(), 2, device=memory.device)
    return (together * numbers * _NUMBER_FACTOR).sum().reshape(1)


def _of_blocks(memory: Tensor) -> Tensor:
    """The sums of blocks, (blocks,)."""
    memory = memory if memory.storage_offset() % 8 == 0 else memory.clone()
    words = memory.view(torch.int64).view(-1, ROWS, COLUMNS)
    sums = torch.cat([words.sum(1), words.sum(2)], dim=1)
    return _spread(sums).mul_(_factors(memory.device)[: ROWS + COLUMNS]).sum(1)


def _spread(words: Tensor) -> Tensor:
    """New words, with the upper half of each added to its lower one: a product keeps nothing of what is above it."""
    return (words >> 32).add_(words)


@lru_cache(maxsize=16)
def _factors(device: torch.device) -> Tensor:
    """Odd numbers, (ROWS * COLUMNS,), the same everywhere."""
    drawn = bytearray(hashlib.shake_256(b"unicron: digests of tensors").digest(BLOCK_BYTES))
    return (torch.frombuffer(drawn, dtype=torch.int64) | 1).to(device)
