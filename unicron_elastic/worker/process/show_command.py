"""Has the kernel show another command for this process: what ``ps`` and /proc/PID/cmdline say."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

# From Linux's include/uapi/linux/prctl.h. The whole map may be set by anybody, a single address by root alone.
_PR_SET_MM = 35
_PR_SET_MM_MAP = 14
_KEEP_EXECUTABLE = 0xFFFFFFFF
# Places in /proc/self/stat after the name, of the addresses that stay.
_PLACES = {
    "start_code": 23,
    "end_code": 24,
    "start_data": 42,
    "end_data": 43,
    "start_brk": 44,
    "start_stack": 25,
    "env_start": 47,
    "env_end": 48,
}
_ADDRESSES = (
    *("start_code", "end_code", "start_data", "end_data", "start_brk", "brk", "start_stack"),
    *("arg_start", "arg_end", "env_start", "env_end", "auxv"),
)
_shown: list[object] = []  # what the kernel reads; it is a fork's, too


class _Map(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in _ADDRESSES),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )


def show_command(argv: Sequence[str]) -> bool:
    """Show it; return whether it is shown, which not every kernel can do (CONFIG_CHECKPOINT_RESTORE)."""
    text = b"".join(os.fsencode(word) + b"\0" for word in argv)
    if _is_shown(text):
        return True
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    place = ctypes.create_string_buffer(text, len(text))
    begin = ctypes.addressof(place)
    own = {name: int(fields[at]) for name, at in _PLACES.items()}
    wanted = _Map(**own, brk=libc.sbrk(0), arg_start=begin, arg_end=begin + len(text), exe_fd=_KEEP_EXECUTABLE)
    _shown.append(place)
    libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(wanted), ctypes.c_ulong(ctypes.sizeof(wanted)), 0)
    return _is_shown(text)


def _is_shown(text: bytes) -> bool:
    with open("/proc/self/cmdline", "rb") as file:
        return file.read() == text
