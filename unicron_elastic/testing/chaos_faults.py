"""Does the faults, to the process it runs in."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import sys
import tempfile
import time
from math import inf
from typing import NoReturn

from unicron_elastic.testing.chaos_plan import ChaosFault, ChaosKind, How
from unicron_elastic.testing.explain_chaos import NEEDS_TEST_LIBRARY

MEGABYTE = 2**20
_CHUNK_BYTES = 64 * MEGABYTE
_SMALLEST_CHUNK_BYTES = 4096
_LONG_S = 1000.0

FAKE_NVML = "FAKE_NVML"  # the folder through which tests/health/fake_nvml.c is told what to answer
_NVML_XID, _NVML_DOUBLE_BIT_ECC = 8, 2  # nvmlEventType

_kept: list[object] = []  # what is leaked or fills a disk stays until the process ends


def say(text: str) -> None:
    """One line on stderr, past every buffer: the process may have no other moment."""
    with contextlib.suppress(OSError):
        os.write(2, f"unicron chaos: {text}\n".encode(errors="replace"))


def do(fault: ChaosFault) -> None:
    """Does a fault that strikes once; returns only from those that a process survives. May raise the wanted error."""
    match fault.kind:
        case ChaosKind.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case ChaosKind.SEGV:
            ctypes.string_at(0)
        case ChaosKind.ABORT:
            os.abort()
        case ChaosKind.EXIT:
            _exit(fault.code)
        case ChaosKind.EXCEPTION:
            raise RuntimeError(fault.text)
        case ChaosKind.HANG:
            os.kill(os.getpid(), signal.SIGSTOP)
        case ChaosKind.HANG_GIL:
            _sleep_with_gil(fault.seconds)
        case ChaosKind.SLEEP:
            _sleep(fault.seconds)
        case ChaosKind.DISK:
            _fill(fault.folder, fault.limit_mb)
        case ChaosKind.XID | ChaosKind.ECC:
            _gpu_event(fault)
        case _:
            raise ValueError(f"{fault.kind.value} does not strike once")


def _exit(code: int) -> NoReturn:
    """Ends at once, as ``exit`` in a C library would, but for what was printed already."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def _sleep_with_gil(seconds: float) -> None:
    libc = ctypes.PyDLL(None)  # unlike CDLL, it keeps the interpreter's lock during a call
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:  # a signal's handler ends one call early
        if left == inf:
            libc.sleep(ctypes.c_uint(2**32 - 1))
        else:
            libc.usleep(ctypes.c_uint(int(min(left, _LONG_S) * 1e6) + 1))


def _sleep(seconds: float) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, _LONG_S))


def _gpu_event(fault: ChaosFault) -> None:
    """Have the library that stands in for NVML tell of this worker's GPU what the driver would."""
    event = f"{_NVML_XID} {fault.xid}" if fault.kind is ChaosKind.XID else f"{_NVML_DOUBLE_BIT_ECC} 0"
    try:
        events = os.open(os.path.join(os.environ[FAKE_NVML], "events"), os.O_WRONLY | os.O_NONBLOCK)
    except (KeyError, OSError):
        say(f"nothing is done: {fault.kind.value} {NEEDS_TEST_LIBRARY}")
        return
    try:
        os.write(events, f"{os.environ.get('LOCAL_RANK', '0')} {event}\n".encode())
    finally:
        os.close(events)


def _fill(folder: str, limit_mb: float) -> None:
    """Takes space with a file that has no name, so that the kernel frees it however the process ends."""
    try:
        file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - stays open until the process ends
    except OSError as error:
        say(f"{folder} cannot be filled: {error.strerror}")
        return
    _kept.append(file)
    limit = sys.maxsize if limit_mb == inf else int(limit_mb * MEGABYTE)
    size, chunk = 0, _CHUNK_BYTES
    while size < limit and chunk >= _SMALLEST_CHUNK_BYTES:
        step = min(chunk, limit - size)
        try:
            os.posix_fallocate(file.fileno(), size, step)
            size += step
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                say(f"{folder} cannot be filled: {error.strerror}")
                return
            chunk //= 2
    say(f"{size / MEGABYTE:.1f} MB of {folder} are taken{'' if size >= limit else ', and no more are free'}")


class SlowSteps:
    """Makes each step ``factor`` times as long, by a pause after it."""

    def __init__(self, fault: ChaosFault) -> None:
        self._fault = fault
        self._left = inf if fault.steps is None else fault.steps
        # Before the worker's first step lies its whole start, which is no step: that one has no beginning.
        self._began_at = time.monotonic() if fault.step > 1 or fault.after is not None else None

    def after_step(self) -> bool:
        """Pauses; false after the last slow step."""
        now = time.monotonic()
        if self._began_at is not None:
            self._pause(now + (now - self._began_at) * (self._fault.factor - 1.0))
        self._began_at = time.monotonic()
        self._left -= 1
        return self._left > 0

    def _pause(self, end: float) -> None:
        if self._fault.how is How.SLEEP:
            _sleep(end - time.monotonic())
        else:
            while time.monotonic() < end:
                pass


class Leak:
    """Keeps some memory more after each step."""

    def __init__(self, fault: ChaosFault) -> None:
        self._fault = fault
        self._kept_mb = 0.0

    def after_step(self) -> bool:
        """Takes the memory of one step; false when the limit is reached."""
        more = min(self._fault.mb_per_step, self._fault.limit_mb - self._kept_mb)
        _kept.append(b"\xaa" * int(more * MEGABYTE))  # written to, as untouched zeroes would cost nothing
        self._kept_mb += more
        if self._kept_mb < self._fault.limit_mb:
            return True
        say(f"{self._kept_mb:g} MB are leaked; that is the limit")
        return False
