"""Text to people that can neither hold up nor end the one who writes it.

A terminal stopped with Ctrl-S, a pager nobody scrolls and a sleeping laptop at the far end of ssh all stop reading.
An agent that waited for them would not see the next fault, so a thread does the writing. O_NONBLOCK is no way out: it
would reach the workers and the shell, which share the descriptor, and it cuts a write in two where the buffer is
full, after which a script's output would land in the middle of an escape sequence.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections import deque
from datetime import datetime
from typing import TextIO

from unicron_elastic.base.text import set_apart

PANEL_MIN_ROWS = 12  # of a terminal; below this a panel would take more than half of the screen
_MOST_KEPT_BYTES = 1 << 20
PATIENCE_S = 0.05  # once per stall, so that what others write to the same place comes after what we wrote first
_PATIENCE_AT_CLOSE_S = 1.0


def stamped(sentence: str) -> str:
    """``sentence`` as a line for people; further lines of it (a stack) are indented. No control characters."""
    return f"[unicron] {datetime.now():%H:%M:%S} {set_apart(sentence)}\n"


class StampedFormatter(logging.Formatter):
    """Formats what is logged as all else that is said; a name, a reason or a traceback forges no line of it."""

    def format(self, record: logging.LogRecord) -> str:
        """One record, without the break at its end."""
        return stamped(super().format(record)).rstrip("\n")


class Output:
    """A text stream that never blocks for long, never raises and may be used from any thread and signal handler."""

    def __init__(self, stream: TextIO, patience_s: float = PATIENCE_S) -> None:
        self._stream = stream
        self._patience_s = patience_s
        self._encoding = getattr(stream, "encoding", None) or "utf-8"
        self._fd = _own_descriptor(stream)  # None: a stream without one, such as StringIO
        self._kept: deque[bytes] = deque()  # the first is being written
        self._is_lost = False  # the reader is gone
        self._is_stalled = False  # the reader does not read
        self._is_closing = False
        self._changed = threading.Condition()  # re-entrant: a signal handler may speak while its thread speaks
        self._thread: threading.Thread | None = None

    @property
    def fd(self) -> int | None:
        """The descriptor written to, for questions about the terminal; None after ``close``."""
        return self._fd

    def write(self, text: str) -> None:
        """Writes ``text`` in one piece, now or as soon as the reader takes it."""
        with self._changed:
            if self._is_lost:
                return
            if self._fd is None:
                self._write_to_stream(text)
                return
            self._kept.append(text.encode(self._encoding, "replace"))
            while len(self._kept) > 2 and sum(map(len, self._kept)) > _MOST_KEPT_BYTES:
                del self._kept[1]
            self._hand_over()

    def offer(self, text: str) -> bool:
        """Writes ``text`` if nothing written before still waits for the reader, else does nothing: False."""
        with self._changed:
            if self._kept or self._is_lost:
                return False
            self.write(text)
            return True

    def close(self) -> None:
        """Waits at most a second for the reader; a later ``write`` goes straight to the stream."""
        with self._changed:
            if self._fd is None or (self._is_lost and self._kept):
                return
            if not self._changed.wait_for(lambda: not self._kept, _PATIENCE_AT_CLOSE_S):
                self._is_lost = True  # the thread still writes: leave it the descriptor, and say nothing more
                return
            self._is_closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        os.close(self._fd)
        self._fd = None

    def _hand_over(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_kept, name="unicron-output", daemon=True)
            self._thread.start()
        self._changed.notify_all()
        if not self._is_stalled:
            self._is_stalled = not self._changed.wait_for(lambda: not self._kept, self._patience_s)

    def _write_kept(self) -> None:
        """The thread: writes what is kept until ``close``."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._kept or self._is_closing)
                if not self._kept:
                    return
                data = self._kept[0]
            is_written = self._write_all(data)
            with self._changed:
                self._kept.popleft()
                if not is_written:
                    self._is_lost = True
                    self._kept.clear()
                self._is_stalled = self._is_stalled and bool(self._kept)
                self._changed.notify_all()

    def _write_all(self, data: bytes) -> bool:
        assert self._fd is not None
        try:
            while data:
                try:
                    data = data[os.write(self._fd, data) :]
                except BlockingIOError:  # somebody else made the descriptor so
                    select.select([], [self._fd], [])
        except (OSError, ValueError):  # ValueError: a descriptor too large for select
            return False
        return True

    def _write_to_stream(self, text: str) -> None:
        try:
            self._stream.write(text.encode(self._encoding, "replace").decode(self._encoding))
            self._stream.flush()
        except (OSError, ValueError):  # ValueError: the stream was closed
            self._is_lost = True


def _own_descriptor(stream: TextIO) -> int | None:
    """A descriptor of our own, because ``stream`` may be closed and its number used again before we are done."""
    try:
        return os.dup(stream.fileno())
    except (OSError, ValueError, AttributeError):
        return None


def is_foreground(fd: int) -> bool:
    """False for a job the shell runs in the background: the terminal then belongs to somebody else."""
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:
        return True  # not our controlling terminal: nobody else can claim it
