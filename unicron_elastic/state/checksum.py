"""Checksums of memory at the rate at which it is read.

A piece of memory is taken as a matrix of 64-bit words, and the wrapping sums of its columns go into a CRC-32. A
change that is confined to one word changes one sum; what stands elsewhere, be it a byte, a sector or a page,
changes several, as a row is as long as no power of two. So these are seen, but for one in 2**32; what moved by
whole rows would not be, and no fault does that. It is no protection against somebody who means to forge one.
"""

from __future__ import annotations

import ctypes
import zlib

import torch

SUM_BYTES = 16
_ROW_WORDS = 520  # whole lines of a processor's cache
_ROW_BYTES = 8 * _ROW_WORDS
# A piece is moved and then summed while it is in the cache; four at a time take a fifth longer. It has fewer than the
# 32,768 elements from which torch would sum with threads of its own: a pool of them for each thread that calls would
# take the cores from the training.
PIECE_BYTES = 63 * _ROW_BYTES
_SMALL_BYTES = 4 * _ROW_BYTES  # below this, torch's calls cost more than the CRC of the bytes


class Checksum:
    """The checksum of pieces of memory in their order. Pieces are to be cut alike by both sides."""

    def __init__(self) -> None:
        self._columns = self._rest = self._bytes = 0

    def add(self, view: memoryview) -> None:
        """Adds writable memory, of bytes, cut into pieces of ``PIECE_BYTES``."""
        with torch.inference_mode():  # a third less time for each of torch's calls
            for start in range(0, len(view), PIECE_BYTES):
                self._add_piece(view[start : start + PIECE_BYTES])

    def _add_piece(self, piece: memoryview) -> None:
        """Adds at most ``PIECE_BYTES``."""
        self._bytes += len(piece)
        whole = 0 if len(piece) < _SMALL_BYTES else len(piece) // _ROW_BYTES * _ROW_BYTES
        if whole:
            words = torch.frombuffer(piece[:whole], dtype=torch.int64).view(-1, _ROW_WORDS)
            sums = words.sum(0)
            self._columns = zlib.crc32(ctypes.string_at(sums.data_ptr(), _ROW_BYTES), self._columns)
        self._rest = zlib.crc32(piece[whole:], self._rest)

    def digest(self) -> bytes:
        """The checksum of all that was added, in ``SUM_BYTES`` bytes."""
        return self._columns.to_bytes(4, "big") + self._rest.to_bytes(4, "big") + self._bytes.to_bytes(8, "big")
