"""Text to people that can neither block nor end the one who writes it.

A terminal stopped with Ctrl-S, a pager nobody scrolls and a sleeping laptop at the far end of ssh all stop reading.
An agent that waited for them would not see the next fault. So what cannot be written now is kept and tried again at
the next write, and once the reader is gone nothing more is said.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
import threading
import time
from collections import deque
from datetime import datetime
from typing import TextIO

__all__ = ["Output", "stamped"]

_MOST_KEPT_BYTES = 1 << 20
_PATIENCE_AT_CLOSE_S = 1.0


def stamped(sentence: str) -> str:
    """``sentence`` as a line for people; further lines of it (a stack) follow as they are. No control characters."""
    lines = [_printable(line) for line in sentence.rstrip().splitlines()] or [""]
    return "\n".join([f"[unicron] {datetime.now():%H:%M:%S} {lines[0]}", *lines[1:]]) + "\n"


def _printable(line: str) -> str:
    return "".join(c if c.isprintable() else "    " if c == "\t" else " " for c in line)


class Output:
    """A text stream that never blocks, never raises and is safe to use from any thread and from signal handlers."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._encoding = getattr(stream, "encoding", None) or "utf-8"
        self._fd = _own_descriptor(stream)  # None: a stream without one, such as StringIO
        self._kept: deque[bytes] = deque()
        self._is_lost = False  # the reader is gone
        self._is_flushing = False
        self._lock = threading.RLock()  # re-entrant, because a signal handler may speak while its thread speaks

    @property
    def fd(self) -> int | None:
        """The descriptor written to, for questions about the terminal; None after ``close``."""
        return self._fd

    def write(self, text: str) -> None:
        """Writes ``text`` in one piece where the reader takes it, else as soon as it does."""
        with self._lock:
            self._kept.append(text.encode(self._encoding, "replace"))
            while len(self._kept) > 1 and sum(map(len, self._kept)) > _MOST_KEPT_BYTES:
                del self._kept[1]  # not the first: the start of it may have been written
            self.flush()

    def offer(self, text: str) -> bool:
        """Writes ``text`` if nothing waits and the reader takes it now, else does nothing and returns False."""
        with self._lock:
            self.flush()
            if self._kept or self._is_lost or not self._is_writable(0):
                return False
            self.write(text)
            return True

    def close(self) -> None:
        """Writes what is kept, waiting at most a second; a later ``write`` goes straight to the stream."""
        with self._lock:
            deadline = time.monotonic() + _PATIENCE_AT_CLOSE_S
            while self._kept and self._is_writable(max(0.0, deadline - time.monotonic())):
                self.flush()
                if time.monotonic() >= deadline:
                    break
            self._kept.clear()
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None

    def flush(self) -> None:
        """Writes as much of what is kept as the reader takes now."""
        with self._lock:
            if self._is_flushing:
                return  # a signal handler spoke during a write: that write's loop will find what it left
            self._is_flushing = True
            try:
                self._write_kept()
            finally:
                self._is_flushing = False

    def _write_kept(self) -> None:
        while self._kept and not self._is_lost and self._is_writable(0):
            try:
                written = self._write_some(self._kept[0])
            except BlockingIOError:
                return
            except (OSError, ValueError):  # ValueError: the stream was closed
                self._is_lost = True
                self._kept.clear()
                return
            if written < len(self._kept[0]):
                self._kept[0] = self._kept[0][written:]
            else:
                self._kept.popleft()

    def _write_some(self, data: bytes) -> int:
        if self._fd is not None:
            return os.write(self._fd, data)
        self._stream.write(data.decode(self._encoding))
        self._stream.flush()
        return len(data)

    def _is_writable(self, timeout_s: float) -> bool:
        if self._fd is None:
            return True
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        return bool(poll.poll(timeout_s * 1e3))  # an error counts: the write will find out what it is


def _own_descriptor(stream: TextIO) -> int | None:
    """A descriptor of our own for what ``stream`` writes to.

    It is opened anew where that is possible, because O_NONBLOCK on an inherited one would reach the worker processes
    and the shell, which share it. A regular file is not: its new descriptor would start to write at its beginning.
    """
    try:
        fd = stream.fileno()
        mode = os.fstat(fd).st_mode
    except (OSError, ValueError, AttributeError):
        return None
    if stat.S_ISCHR(mode) or stat.S_ISFIFO(mode):
        with contextlib.suppress(OSError):  # a terminal of another user (su), a pipe without a reader
            return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    return os.dup(fd)
