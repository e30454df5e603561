"""The pulse page: a small shared-memory page per worker, written in place by the worker and read by the agent.

Writing makes no system call and takes no lock: each number is one aligned 64-bit store, and the time is stored last,
so a reader sees a step never newer than its time. The name of a phase is longer than that: whoever reads it while it
is being written sees that from the time of its change, and reads again.

The page is an anonymous memory file: it needs no /dev/shm, leaves nothing behind, and outlives the worker in the
agent's hands. The agent seals its size, so a script that truncates the descriptor gets an error instead of killing the
agent. What a reader takes from the page is checked, never trusted.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import time
from dataclasses import dataclass
from operator import le

PAGE_BYTES = 4096
MAGIC = 0x554E4943_50554C35  # "UNICPUL5"
STEP_MAX = 2**53  # beyond this a counter is garbage, not a step
TRAIN = "train"  # the phase of a worker that names none
SPARE = "spare"  # of one without a place among those who train
MEET = "meet"  # of one that waits for the other members of a new world
PHASE_BYTES_MAX = 64
BEATS_MAX = 128  # of the latest steps, whose ends the page keeps

# Word numbers (64 bits each) in the page.
_MAGIC, _STEP, _STEP_NS, _FIRST_STEP_NS, _AT_NS, _PHASE_NS = range(6)
_NAME = slice(64, 64 + PHASE_BYTES_MAX)  # bytes; zeros: TRAIN
_IS_COUNTED, _SAVED_NS, _RESTORES = range(16, 19)
_BEATS = 32  # the first of BEATS_MAX words; that of a step is found by its number

# From Linux's include/uapi/linux/fcntl.h; Python names them only from 3.9 on with a new enough glibc.
_F_ADD_SEALS = getattr(fcntl, "F_ADD_SEALS", 1033)
_F_SEAL_SEAL_SHRINK_GROW = 0x1 | 0x2 | 0x4
_RUN_ID_CHARACTERS = 150  # the kernel takes names of 249 bytes
_READS_MAX = 3  # of a phase that is changed at this very moment


PAGE_PATH = "/memfd:unicron-pulse:"  # how the path of a page begins in /proc/PID/maps


def page_name(rank: int, local_rank: int, run_id: str) -> str:
    """The name of a worker's page. In /proc/PID/maps it tells who a warm worker is, whose environ is its parent's."""
    from urllib.parse import quote  # the agent's need alone

    return f"unicron-pulse:{rank}:{local_rank}:{quote(run_id, safe='')[:_RUN_ID_CHARACTERS]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PulseReading:
    """What a worker's page said. Times are monotonic seconds of this host (CLOCK_MONOTONIC)."""

    step: int  # optimizer steps done since the worker started
    is_counted: bool = False  # it has made an optimizer: 0 steps are none, and not unknown
    saved_at: float | None = None  # a checkpoint was written last, of what was learned since the worker started
    has_restored: bool = False  # one was read: it began where a process before it had come to
    step_time_s: float | None = None  # duration of the latest step; None before the second step
    first_step_at: float | None = None
    at: float | None = None  # end of the latest step; None before the first
    phase: str = TRAIN
    phase_since: float | None = None  # None: it was never changed

    @property
    def has_saved(self) -> bool:
        """Whether a checkpoint was written."""
        return self.saved_at is not None


class PulsePage:
    """The agent's side: creates the page and reads it."""

    def __init__(self, name: str = "unicron-pulse") -> None:
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, PAGE_BYTES)
        fcntl.fcntl(self.fd, _F_ADD_SEALS, _F_SEAL_SEAL_SHRINK_GROW)
        self._map = mmap.mmap(self.fd, PAGE_BYTES)
        self._words = memoryview(self._map).cast("Q")
        self._words[_MAGIC] = MAGIC

    def read(self) -> PulseReading | None:
        """The present reading, or None if the script overwrote the page (then its steps are unknown)."""
        phase, phase_ns = self._phase()
        words = self._words[:_PHASE_NS].tolist()
        latest_ns = max(words[_AT_NS], words[_FIRST_STEP_NS], self._words[_SAVED_NS], phase_ns)
        if words[_MAGIC] != MAGIC or words[_STEP] > STEP_MAX or latest_ns > time.monotonic_ns() + 1_000_000_000:
            return None
        return PulseReading(
            step=words[_STEP],
            is_counted=bool(words[_STEP] or self._words[_IS_COUNTED]),
            saved_at=self._words[_SAVED_NS] / 1e9 or None,
            has_restored=bool(self._words[_RESTORES]),
            step_time_s=words[_STEP_NS] / 1e9 or None,
            first_step_at=words[_FIRST_STEP_NS] / 1e9 or None,
            at=words[_AT_NS] / 1e9 or None,
            phase=phase,
            phase_since=phase_ns / 1e9 or None,
        )

    def beats(self) -> tuple[int, tuple[float, ...]]:
        """The number of a step, and when it and the steps after it ended, up to the latest.

        At most the latest BEATS_MAX - 1, as the worker may write the next one meanwhile; none if they make no sense.
        """
        step = self._words[_STEP]
        first = max(1, step - BEATS_MAX + 2)
        if step > STEP_MAX:
            return 0, ()
        at = tuple(self._words[_BEATS + number % BEATS_MAX] / 1e9 for number in range(first, step + 1))
        return first, at if all(map(le, at, at[1:])) else ()

    def _phase(self) -> tuple[str, int]:
        """The phase's name and since when, in nanoseconds; TRAIN if a worker died while it wrote."""
        for _ in range(_READS_MAX):
            before_ns = self._words[_PHASE_NS]
            name = self._map[_NAME].rstrip(b"\0")
            if before_ns and before_ns == self._words[_PHASE_NS]:
                return name.decode(errors="replace") or TRAIN, before_ns
            if not before_ns and not name:
                break  # never changed
        return TRAIN, 0

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
        for left_out in range(max(words[_STEP] + 1, step - BEATS_MAX), step):  # a scaler may skip the optimizer's turn
            words[_BEATS + left_out % BEATS_MAX] = words[_AT_NS]
        if step > 1:
            words[_STEP_NS] = now - words[_AT_NS]
        else:
            words[_FIRST_STEP_NS] = now
        words[_BEATS + step % BEATS_MAX] = now
        words[_STEP] = step
        words[_AT_NS] = now

    def count(self) -> None:
        """Says that this process has made an optimizer, whose steps are counted."""
        self._words[_IS_COUNTED] = 1

    def saved(self) -> None:
        """Says that a checkpoint was written. One of a state that was only read is no progress."""
        words = self._words
        if words[_STEP] or not words[_IS_COUNTED]:
            words[_SAVED_NS] = time.monotonic_ns()

    def restored(self) -> None:
        """Says that a checkpoint was read."""
        self._words[_RESTORES] = 1

    def enter(self, phase: str) -> None:
        """Says that this process is in ``phase`` from now on; a name is cut at PHASE_BYTES_MAX bytes."""
        name = b"" if phase == TRAIN else phase.encode(errors="replace")[:PHASE_BYTES_MAX]
        self._words[_PHASE_NS] = 0  # being written
        self._map[_NAME] = name.ljust(PHASE_BYTES_MAX, b"\0")
        self._words[_PHASE_NS] = time.monotonic_ns()
