"""Reads the memory of another process of this host, and lets others read that of this one."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

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
