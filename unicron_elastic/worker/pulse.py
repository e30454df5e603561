"""The pulse page: a small shared-memory page per worker, written in place by the worker and read by the agent.

Writing makes no system call and takes no lock: each field is one aligned 64-bit store, and the time is stored last,
so a reader sees a step never newer than its time. The page is an anonymous memory file: it needs no /dev/shm, has no
name to leak, and outlives the worker in the agent's hands. The agent seals its size, so a script that truncates the
descriptor gets an error instead of killing the agent. What a reader takes from the page is checked, never trusted.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import time
from dataclasses import dataclass

__all__ = ["Pulse", "PulsePage", "PulseReading"]

PAGE_BYTES = 4096
MAGIC = 0x554E4943_50554C32  # "UNICPUL2"
STEP_MAX = 2**53  # beyond this a counter is garbage, not a step

# Word numbers (64 bits each) in the page.
_MAGIC, _STEP, _MICRO_BATCH, _PHASE, _COLLECTIVE, _STEP_NS, _FIRST_STEP_NS, _AT_NS = range(8)

# From Linux's include/uapi/linux/fcntl.h; Python names them only from 3.9 on with a new enough glibc.
_F_ADD_SEALS = getattr(fcntl, "F_ADD_SEALS", 1033)
_F_SEAL_SEAL_SHRINK_GROW = 0x1 | 0x2 | 0x4


@dataclass(frozen=True, slots=True, kw_only=True)
class PulseReading:
    """What a worker's page said. Times are monotonic seconds of this host (CLOCK_MONOTONIC)."""

    step: int  # optimizer steps done since the worker started
    micro_batch: int
    phase: int
    collective: int
    step_time_s: float | None  # duration of the latest step; None before the second step
    first_step_at: float | None
    at: float | None  # when the page was last written; None: never


class PulsePage:
    """The agent's side: creates the page and reads it."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("unicron-pulse", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, PAGE_BYTES)
        fcntl.fcntl(self.fd, _F_ADD_SEALS, _F_SEAL_SEAL_SHRINK_GROW)
        self._map = mmap.mmap(self.fd, PAGE_BYTES)
        self._words = memoryview(self._map).cast("Q")
        self._words[_MAGIC] = MAGIC

    def read(self) -> PulseReading | None:
        """The present reading, or None if the script overwrote the page (then its steps are unknown)."""
        words = self._words[:8].tolist()
        if words[_MAGIC] != MAGIC or words[_STEP] > STEP_MAX or words[_AT_NS] > time.monotonic_ns() + 1_000_000_000:
            return None
        return PulseReading(
            step=words[_STEP],
            micro_batch=words[_MICRO_BATCH],
            phase=words[_PHASE],
            collective=words[_COLLECTIVE],
            step_time_s=words[_STEP_NS] / 1e9 or None,
            first_step_at=words[_FIRST_STEP_NS] / 1e9 or None,
            at=words[_AT_NS] / 1e9 or None,
        )

    def close(self) -> None:
        """Gives the memory back."""
        self._words.release()
        with contextlib.suppress(BufferError):
            self._map.close()
        os.close(self.fd)


class Pulse:
    """The worker's side: opens the inherited page and writes it."""

    def __init__(self, fd: int) -> None:
        """Maps ``fd`` and closes it. Raises OSError or ValueError if it is no pulse page."""
        try:
            if os.fstat(fd).st_size != PAGE_BYTES:
                raise ValueError(f"the pulse page must have {PAGE_BYTES} bytes, has {os.fstat(fd).st_size}")
            self._map = mmap.mmap(fd, PAGE_BYTES)
        finally:
            os.close(fd)
        self._words = memoryview(self._map).cast("Q")
        if self._words[_MAGIC] != MAGIC:
            raise ValueError("the inherited page is not a pulse page of this version")

    def beat(self, step: int) -> None:
        """Says that optimizer step number ``step`` of this process has just ended."""
        now = time.monotonic_ns()
        words = self._words
        if step > 1:
            words[_STEP_NS] = now - words[_AT_NS]
        else:
            words[_FIRST_STEP_NS] = now
        words[_STEP] = step
        words[_AT_NS] = now
