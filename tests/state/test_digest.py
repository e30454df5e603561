"""Digests are the same for the same numbers, however they lie and whoever adds them, and see what changes or moves."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from unicron_elastic.state import digest as module
from unicron_elastic.state.digest import BLOCK_BYTES, SMALL_BYTES, digests
from unicron_elastic.state.exact import bits

SIZES = [1, 3, SMALL_BYTES // 4, SMALL_BYTES // 4 + 1, BLOCK_BYTES // 4, BLOCK_BYTES // 4 + 3, 5 * BLOCK_BYTES // 4 - 1]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def floats(size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size))


def test_they_are_what_they_were() -> None:
    """Replicas may have other versions of this and of torch: they must agree, or say so by a change of this test."""
    words = [torch.arange(size, dtype=torch.int32) for size in (1, 1000, 3 * BLOCK_BYTES // 4 + 5)]
    assert digests(words) == [0, 5634772968586062124, 4745727544775405658]


@pytest.mark.parametrize("size", SIZES)
def test_threads_chunks_and_memory_do_not_matter(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = floats(size)
    (expected,) = digests([tensor])
    shifted = torch.cat([torch.zeros(1), tensor])[1:]
    spread = torch.stack([tensor, tensor], dim=1)[:, 0]
    for threads in (1, 3):
        torch.set_num_threads(threads)
        for chunk in (1, 3, 100):
            monkeypatch.setitem(module.CHUNK_BLOCKS, "cpu", chunk)
            assert digests([shifted, torch.zeros(3), spread, tensor])[::3] == [expected] * 2
            assert digests([shifted, spread]) == [expected] * 2


def test_batches_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [floats(size % 40) for size in range(100)] + [floats(SIZES[-1])]
    expected = [digests([tensor])[0] for tensor in tensors]
    assert digests(tensors) == expected
    monkeypatch.setattr(module, "BATCH_BYTES", 100)
    assert digests(tensors) == expected
    assert digests([]) == []


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.bfloat16, torch.float64, torch.complex64])
def test_all_types(dtype: torch.dtype) -> None:
    one = torch.zeros(5, 3, dtype=dtype)
    other = one.clone()
    other[3, 2] = 1
    assert digests([one, one.t().contiguous().t(), torch.zeros((), dtype=dtype)]) == [0, 0, 0]
    assert digests([other])[0] not in (0, digests([other.flip(0)])[0])


@pytest.mark.parametrize("size", SIZES[1:])
def test_any_change_or_move_is_seen(size: int) -> None:
    dice = random.Random(size)
    tensor = floats(size)
    (before,) = digests([tensor])
    for _ in range(60):
        changed = tensor.clone()
        integers = bits(changed)
        one, other = dice.sample(range(size), 2)
        match dice.randrange(4):
            case 0:
                integers[one] ^= -(2**31) if (bit := dice.randrange(32)) == 31 else 2**bit
            case 1:
                integers[[one, other]] = integers[[other, one]]
            case 2:
                integers[one] ^= -(2**31)  # two signs
                integers[other] ^= -(2**31)
            case 3:
                begin, end = sorted((one, other))
                integers[begin : end + 1] = integers[begin : end + 1].roll(1)
        assert digests([changed])[0] != before


@pytest.mark.parametrize("size", SIZES[2:])
def test_the_signs_of_every_second_number_are_seen(size: int) -> None:
    """As those of the imaginary parts of complex numbers, which are all in the uppermost bits of words."""
    tensor = floats(size)
    changed = tensor.clone()
    changed[1::2] *= -1
    assert digests([changed]) != digests([tensor])


def test_blocks_that_change_places_are_seen() -> None:
    block = BLOCK_BYTES // 4
    tensor = floats(4 * block)
    changed = torch.cat([tensor[block : 2 * block], tensor[:block], tensor[2 * block :]])
    assert digests([changed]) != digests([tensor])
