"""What stands at the beginning of a snapshot in memory: of which step and rank it is, and where its parts are.

It is written last. A snapshot whose writer died before has a header that is none, and so is not there.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass
from typing import Any

HEADER_BYTES = 4096  # of every file, before the layout
REACHED_AT = HEADER_BYTES - 8  # what the job has come to since, as one number
MAGIC = b"unisnap1"
_FIXED = len(MAGIC) + 8  # and the length and the CRC-32 of the text, 4 bytes each
BYTES_MAX = 2**50
_SUM_DIGITS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Of a snapshot. ``lineage`` tells apart states of one step that were reached in two different ways.

    ``rank`` was its rank of ``world_size``. ``is_replicated``: every rank has the same state, but, where
    ``has_own_parts``, for what is of that rank alone, as its random numbers. The layout is JSON of ``layout_bytes``
    behind the header, and the tensors are ``data_bytes`` from ``data_at`` on. ``layout_sum`` and ``data_sum`` are
    checksums in hexadecimal digits. ``is_for_peer``: a neighbouring node is to copy it.
    """

    step: int
    lineage: int
    rank: int
    world_size: int
    is_replicated: bool
    has_own_parts: bool
    is_for_peer: bool
    layout_bytes: int
    layout_sum: str
    data_at: int
    data_bytes: int
    data_sum: str

    @property
    def key(self) -> tuple[int, int]:
        """Step and lineage: the snapshots of all ranks that have the same are one state of the job."""
        return self.step, self.lineage

    @property
    def total_bytes(self) -> int:
        """Return the bytes of the file that are in use."""
        return self.data_at + self.data_bytes

    def pack(self) -> bytes:
        """The first bytes of the file, fewer than HEADER_BYTES."""
        text = json.dumps(asdict(self), separators=(",", ":")).encode()
        return MAGIC + len(text).to_bytes(4, "little") + zlib.crc32(text).to_bytes(4, "little") + text

    @classmethod
    def parse(cls, page: bytes) -> Header:
        """The header in the first HEADER_BYTES of a file, which need not be trusted. Raises ValueError."""
        if page[: len(MAGIC)] != MAGIC:
            raise ValueError("there is no snapshot, or it was not finished")
        length, crc = (int.from_bytes(page[at : at + 4], "little") for at in (len(MAGIC), len(MAGIC) + 4))
        text = page[_FIXED : _FIXED + length]
        if _FIXED + length > REACHED_AT or len(text) != length or zlib.crc32(text) != crc:
            raise ValueError("the header of a snapshot is not what was written")
        try:
            told = json.loads(text)
        except RecursionError:
            raise ValueError("the header of a snapshot is nested too deeply") from None
        return cls.from_message(told)

    @classmethod
    def from_message(cls, told: Any) -> Header:
        """The header with these fields. Raises ValueError."""
        if not isinstance(told, dict) or told.keys() != set(cls.__slots__):
            raise ValueError("the header of a snapshot has other fields")
        for name in ("step", "lineage", "rank", "world_size", "layout_bytes", "data_at", "data_bytes"):
            if type(told[name]) is not int or not 0 <= told[name] <= (2**63 if name == "lineage" else BYTES_MAX):
                raise ValueError(f"the {name} of a snapshot is not a number that can be")
        for name in ("is_replicated", "has_own_parts", "is_for_peer"):
            if type(told[name]) is not bool:
                raise ValueError(f"the {name} of a snapshot is not true or false")
        for name in ("layout_sum", "data_sum"):
            if not isinstance(told[name], str) or len(told[name]) > _SUM_DIGITS:
                raise ValueError(f"the {name} of a snapshot is no checksum")
        if HEADER_BYTES + told["layout_bytes"] > told["data_at"]:
            raise ValueError("the parts of a snapshot overlap")
        return cls(**told)
