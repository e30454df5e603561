"""A snapshot in an anonymous memory file, which outlives the process that writes it in whoever else has it open.

The file cannot be made smaller any more, so that who has mapped it need not fear for its pages.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from unicron_elastic.state.checksum import Checksum
from unicron_elastic.state.layout import Layout, empty_tensors
from unicron_elastic.state.pull.chunks import view_of
from unicron_elastic.state.snapshot.gpu import GpuCopier
from unicron_elastic.state.snapshot.header import BYTES_MAX, HEADER_BYTES, REACHED_AT, Header

ALIGNMENT_BYTES = 64  # of each tensor
COPY_BYTES = 4 * 1024 * 1024  # at once, without the interpreter
_F_ADD_SEALS, _F_GET_SEALS, _F_SEAL_SHRINK = 1033, 1034, 0x2  # from Linux's include/uapi/linux/fcntl.h


def read_header(fd: int) -> Header:
    """The header of the snapshot in a file, of which no more is touched. Raises ValueError if there is none whole."""
    try:
        header = Header.parse(os.pread(fd, HEADER_BYTES, 0))
        size = os.fstat(fd).st_size
    except OSError as error:
        raise ValueError(f"a snapshot cannot be read: {error}") from error
    if header.total_bytes > size:
        raise ValueError(f"a snapshot of {header.total_bytes} bytes is in a file of {size}")
    return header


class SnapshotFile:
    """One file, which belongs to this object from now on."""

    def __init__(self, fd: int) -> None:
        """Raises ValueError if ``fd`` is no memory file that keeps its size, and leaves it to the caller then."""
        try:
            seals = fcntl.fcntl(fd, _F_GET_SEALS)
        except OSError:
            seals = 0
        if not seals & _F_SEAL_SHRINK:
            raise ValueError("a snapshot must be in a memory file that cannot be made smaller")
        self.fd = fd
        self._map: mmap.mmap | None = None

    @classmethod
    def create(cls) -> SnapshotFile:
        """A new one, empty. Raises OSError."""
        fd = os.memfd_create("unicron-snapshot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK)
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    def header(self) -> Header | None:
        """What it holds; None if that is nothing whole."""
        try:
            return read_header(self.fd)
        except ValueError:
            return None

    def note_reached(self, step: int) -> None:
        """Writes down the step that the job has come to, of which there need be no snapshot. Raises OSError."""
        if os.fstat(self.fd).st_size >= HEADER_BYTES:
            os.pwrite(self.fd, step.to_bytes(8, "little"), REACHED_AT)

    def reached(self) -> int:
        """Returns the step that was written down last; 0 if none was."""
        step = int.from_bytes(os.pread(self.fd, 8, REACHED_AT), "little")
        return step if step <= BYTES_MAX else 0

    def clear(self) -> None:
        """Empty the file."""
        if os.fstat(self.fd).st_size:
            os.pwrite(self.fd, bytes(16), 0)

    def close(self) -> None:
        """Closes the descriptor; mappings live on as long as tensors refer to them."""
        with suppress(OSError):
            os.close(self.fd)
        self._map = None

    def room(self, size: int) -> memoryview:
        """Writable memory of ``size`` bytes, which the kernel has set aside. Raises OSError if it has not that much."""
        if os.fstat(self.fd).st_size < size:
            os.posix_fallocate(self.fd, 0, size)
            self._map = None
        if self._map is None or len(self._map) < size:
            # Not MAP_POPULATE: Python waits for it with the interpreter locked, seconds for some GB, and meanwhile
            # nobody tells the cluster that this node lives. Who copies fills the pages as it goes, and is done sooner.
            self._map = mmap.mmap(self.fd, os.fstat(self.fd).st_size, mmap.MAP_SHARED)
        return memoryview(self._map)[:size]

    def block(self, size: int) -> Tensor:
        """Its first ``size`` bytes as a tensor that shares them, (size,) uint8. Raises OSError."""
        return torch.frombuffer(self.room(size), dtype=torch.uint8)

    # -- writing ------------------------------------------------------------------------------------------------------

    def write(
        self,
        layout: Layout,
        tensors: Sequence[Tensor],
        copied: threading.Event | None = None,
        gpu: GpuCopier | None = None,
        is_whole: Callable[[], bool] = lambda: True,
        **about: Any,
    ) -> Header | None:
        """Writes a state; ``about`` are the fields of its header that the state does not say.

        ``copied`` is set when the tensors are no longer needed. None, and an empty file, if the state is not whole
        then. Raises OSError if there is not enough memory.
        """
        text = layout.to_json().encode()
        data_at = -(-(HEADER_BYTES + len(text)) // HEADER_BYTES) * HEADER_BYTES
        places, data_bytes = _places(layout)
        self.clear()
        room = self.room(data_at + data_bytes)
        start = ctypes.addressof(ctypes.c_char.from_buffer(room))
        for tensor, place in zip(tensors, places, strict=True):
            _copy(start + data_at + place, tensor, gpu)
        is_kept = is_whole()
        if copied is not None:
            copied.set()
        if not is_kept:
            return None
        room[HEADER_BYTES : HEADER_BYTES + len(text)] = text
        header = Header(
            layout_bytes=len(text), layout_sum=f"{zlib.crc32(text):08x}", data_at=data_at, data_bytes=data_bytes,
            data_sum=_sum(room[data_at:]), **about,
        )  # fmt: skip
        packed = header.pack()
        room[len(packed[:8]) : len(packed)] = packed[8:]
        room[:8] = packed[:8]  # now it is there
        return header

    # -- reading ------------------------------------------------------------------------------------------------------

    def is_whole(self) -> bool:
        """Whether its contents are those that were written."""
        try:
            header = read_header(self.fd)
            self._layout(header)
        except ValueError:
            return False
        return _sum(self.room(header.total_bytes)[header.data_at :]) == header.data_sum

    def read(self) -> tuple[Header, Layout, list[Tensor]]:
        """What it holds, in new memory. Raises ValueError if that is not what was written."""
        header = read_header(self.fd)
        layout = self._layout(header)
        places, data_bytes = _places(layout)
        if data_bytes != header.data_bytes:
            raise ValueError("the layout of a snapshot does not fit its size")
        room = self.room(header.total_bytes)[header.data_at :]
        block = torch.empty(data_bytes, dtype=torch.uint8)
        _move(block.data_ptr(), ctypes.addressof(ctypes.c_char.from_buffer(room)) if data_bytes else 0, data_bytes)
        if _sum(view_of(block.data_ptr(), data_bytes)) != header.data_sum:
            raise ValueError(f"the snapshot of step {header.step} is not what was written: its checksum is wrong")
        tensors = empty_tensors(layout)
        for tensor, place in zip(tensors, places, strict=True):
            _move(tensor.data_ptr(), block.data_ptr() + place, tensor.nbytes)
        return header, layout, tensors

    def _layout(self, header: Header) -> Layout:
        text = os.pread(self.fd, header.layout_bytes, HEADER_BYTES)
        if f"{zlib.crc32(text):08x}" != header.layout_sum:
            raise ValueError(f"the snapshot of step {header.step} is not what was written: its layout has changed")
        return Layout.parse(text.decode("ascii", errors="replace"))


def _places(layout: Layout) -> tuple[list[int], int]:
    """Where each tensor begins in the data, and how many bytes there are."""
    places, end = [], 0
    for spec in layout.specs:
        places.append(end)
        end = -(-(end + spec.bytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return places, end


def _sum(view: memoryview) -> str:
    checksum = Checksum()
    checksum.add(view)
    return checksum.digest().hex()


def _copy(address: int, tensor: Tensor, gpu: GpuCopier | None) -> None:
    if tensor.device.type == "cpu":
        _move(address, tensor.data_ptr(), tensor.nbytes)
    elif gpu is not None:
        gpu.copy(address, tensor)
    else:
        host = tensor.detach().cpu()
        _move(address, host.data_ptr(), host.nbytes)


def _move(target: int, source: int, size: int) -> None:
    """Copies in pieces, between which other threads of the interpreter get their turn; in this thread alone."""
    for at in range(0, size, COPY_BYTES):
        ctypes.memmove(target + at, source + at, min(COPY_BYTES, size - at))
